"""The executor of block selections against its reference: interpreted on a CPU, compiled where there is a GPU."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")
from longbatch_kernels.block_attention import block_attention, block_attention_ref, tiles

from longbatch.attention.selection import Blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Case(NamedTuple):
    """Tensors and the arguments that kernel and reference have in common."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    indices: torch.Tensor
    counts: torch.Tensor
    arguments: dict[str, object]

    def run(self, **more: object) -> tuple[torch.Tensor, ...]:
        return block_attention(self.q, self.k, self.v, self.indices, self.counts, **self.arguments, **more)

    def reference(self, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (x.to(dtype or x.dtype) for x in (self.q, self.k, self.v))
        return block_attention_ref(q, k, v, self.indices, self.counts, **self.arguments)


def case(
    num_queries: int,
    num_keys: int,
    *,
    heads: int = 2,
    kv_heads: int = 1,
    dim: int = 64,
    block_rows: int = 64,
    block_keys: int = 64,
    first_row: int = 0,
    dtype: torch.dtype = torch.float32,
    shared: bool = False,
    most: int = 4,
    seed: int = 0,
    device: str = DEVICE,
) -> Case:
    """The last queries of a prompt and random lists of up to `most` blocks; padding names a block that is not there.

    q, k and v are views whose surroundings hold NaN.
    """
    generator = torch.Generator().manual_seed(seed)

    def view(*shape: int) -> torch.Tensor:
        whole = torch.full((shape[0] + 2, shape[1] + 1, shape[2]), float("nan"))
        whole[1:-1, :-1] = torch.randn(shape, generator=generator)
        return whole.to(device, dtype)[1:-1, :-1]

    q, k, v = view(num_queries, heads, dim), view(num_keys, kv_heads, dim), view(num_keys, kv_heads, dim)
    num_lists = kv_heads if shared else heads
    num_blocks = -(-(num_keys - first_row) // block_rows)
    indices = torch.full((num_lists, num_blocks, most), -1, dtype=torch.int32)
    counts = torch.randint(0, most + 1, (num_lists, num_blocks), generator=generator, dtype=torch.int32)
    for s in range(num_lists):
        for b in range(num_blocks):
            high = -(-min(first_row + (b + 1) * block_rows, num_keys) // block_keys)
            chosen = torch.randperm(high, generator=generator)[: int(counts[s, b])].sort().values
            counts[s, b] = len(chosen)
            indices[s, b, : len(chosen)] = chosen
    selections = torch.arange(heads, dtype=torch.int32)
    arguments = {
        "block_rows": block_rows,
        "block_keys": block_keys,
        "first_row": first_row,
        "heads": torch.arange(heads, dtype=torch.int32, device=device),
        "selections": (selections // (heads // kv_heads) if shared else selections).to(device),
        "q_offset": num_keys - num_queries,
        "scale": dim**-0.5,
    }
    return Case(q, k, v, indices.to(device), counts.to(device), arguments)


def same_state(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], tolerance: float) -> None:
    """Outputs by relative RMS, log-sum-exps exactly where -inf and to the tolerance elsewhere; no NaN passes."""
    out, lse = found
    assert relative_error(out, expected[0]) <= tolerance
    assert torch.equal(lse.isneginf(), expected[1].isneginf())
    seen = ~lse.isneginf()
    torch.testing.assert_close(lse[seen].double(), expected[1][seen].double(), rtol=tolerance, atol=10 * tolerance)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected||, in double precision."""
    difference = float((found.double() - expected.double()).norm())
    return difference if difference == 0 else difference / float(expected.double().norm())


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 129, 200])
@pytest.mark.parametrize("block_keys", [32, 64, 128])
def test_lengths(length: int, block_keys: int) -> None:
    given = case(length, length, block_keys=block_keys, seed=length)
    same_state(given.run(), given.reference(), 1e-5)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("block_rows", "block_keys"), [(64, 64), (128, 128)])
@pytest.mark.parametrize("descriptors", [False, True])
def test_head_dims(dim: int, block_rows: int, block_keys: int, descriptors: bool) -> None:
    given = case(150, 150, dim=dim, block_rows=block_rows, block_keys=block_keys, seed=dim)
    same_state(given.run(descriptors=descriptors), given.reference(), 1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1), (7, 1), (8, 1)])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_groups(heads: int, kv_heads: int, shared: bool, dtype: torch.dtype) -> None:
    """In half precision heads that share a selection are paired in one tile, odd groups with half a tile left over."""
    given = case(70, 130, heads=heads, kv_heads=kv_heads, shared=shared, dtype=dtype, seed=heads)
    found = given.run(share=heads // kv_heads if shared else 1)
    same_state(found, given.reference(torch.float32), 1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("block_rows", [64, 128])
@pytest.mark.parametrize("dim", [96, 128])
def test_half_precision(dim: int, block_rows: int, descriptors: bool) -> None:
    given = case(201, 201, dim=dim, block_rows=block_rows, block_keys=64, dtype=torch.float16, seed=dim)
    same_state(given.run(descriptors=descriptors), given.reference(torch.float32), 2e-3)


def test_reference_goes_by_the_mask_of_a_selection() -> None:
    given = case(150, 200, block_rows=128, block_keys=32, heads=1, seed=6)
    mask = Blocks(given.indices, given.counts, 128, 32, 0).mask(0, 50, 200, 200)
    scores = (given.q[:, 0] @ given.k[:, 0].T * given.arguments["scale"]).masked_fill(~mask, float("-inf"))
    expected = scores.softmax(-1).nan_to_num() @ given.v[:, 0]
    same_state(given.reference(), (expected[:, None], scores.logsumexp(-1)[None]), 1e-5)


def test_no_block_listed() -> None:
    given = case(130, 130)
    given.counts.zero_()
    out, lse = given.run()
    assert torch.equal(out, torch.zeros_like(out))
    assert bool(lse.isneginf().all())


def test_lists_without_a_key_for_some_rows() -> None:
    """A block of later keys: rows before it see nothing, its first row one key; and one that no key is in."""
    given = case(128, 128, heads=1, block_rows=128, block_keys=32, most=2)
    given.counts.fill_(2)
    given.indices[0, 0] = torch.tensor([1, 9], dtype=torch.int32)
    out, lse = given.run()
    same_state((out, lse), given.reference(), 1e-5)
    assert bool(lse[0, :32].isneginf().all())
    assert torch.equal(out[:32], torch.zeros_like(out[:32]))
    torch.testing.assert_close(out[32], given.v[32])
    score = given.arguments["scale"] * (given.q[32, 0] @ given.k[32, 0])
    torch.testing.assert_close(lse[0, 32], score)


@pytest.mark.parametrize(("num_queries", "num_keys", "first_row"), [(1, 130, 0), (65, 150, 64), (10, 256, 192)])
@pytest.mark.parametrize("block_rows", [64, 128])
def test_queries_at_an_offset(num_queries: int, num_keys: int, first_row: int, block_rows: int) -> None:
    first_row = first_row // block_rows * block_rows
    given = case(num_queries, num_keys, first_row=first_row, block_rows=block_rows, seed=num_keys)
    same_state(given.run(), given.reference(), 1e-5)


@pytest.mark.parametrize("descriptors", [False, True])
def test_keys_that_end_before_the_queries(descriptors: bool) -> None:
    """Listed keys that are not there yet do not count; those after them in memory are NaN."""
    given = case(100, 200, seed=5)
    k, v = given.k.clone(), given.v.clone()
    k[70:], v[70:] = float("nan"), float("nan")
    given = given._replace(k=k[:70], v=v[:70])
    same_state(given.run(descriptors=descriptors), given.reference(), 1e-5)


@pytest.mark.parametrize("cuts", [[64, 128], [1, 70, 71, 199]])
def test_chunks_equal_one_pass(cuts: list[int]) -> None:
    """Tiles of queries, against the keys up to their end or against more; their outputs stand in one tensor."""
    given = case(200, 200, heads=2, block_rows=128, seed=1)
    whole = given.run()
    for beyond in (0, 1000):
        out, lse = torch.full_like(whole[0], float("nan")), torch.full_like(whole[1], float("nan"))
        for low, high in zip([0, *cuts], [*cuts, 200], strict=True):
            stop = min(200, high + beyond)
            part = Case(given.q[low:high], given.k[:stop], given.v[:stop], *given[3:5], {**given.arguments})
            part.arguments["q_offset"] = low
            part.run(out=out[low:high], lse=lse[:, low:high])
        same_state((out, lse), whole, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_carry_equals_one_pass(dtype: torch.dtype) -> None:
    """The lists in three parts, the state going from one launch to the next; the last one writes the output."""
    given = case(150, 150, most=3, block_keys=32, dtype=dtype, seed=2)
    whole = given.run()
    carry: tuple[torch.Tensor, ...] | None = None
    for i in range(3):
        counts = (given.counts > i).int()
        part = given._replace(indices=given.indices[:, :, i : i + 1].contiguous(), counts=counts)
        last = part.run(carry=carry, carry_out=i < 2)
        if i == 0:
            carry = last
        elif i == 1:
            assert carry is not None
            assert all(a is b for a, b in zip(last, carry, strict=True))
    same_state(last, whole, 1e-6 if dtype == torch.float32 else 1e-3)


def test_carry_of_strided_tiles() -> None:
    """A tile's part of a state that spans all queries is updated in place, and nothing beside it."""
    given = case(130, 130, seed=3)
    whole = given.run(carry_out=True)
    state = tuple(torch.full_like(x, float("nan")) for x in whole)
    tile = (state[0][64:], state[1][:, 64:], state[2][:, 64:])
    for x, empty in zip(tile, (0.0, float("-inf"), 0.0), strict=True):
        x.fill_(empty)
    part = given._replace(q=given.q[64:], arguments={**given.arguments, "q_offset": 64})
    part.run(carry=tile, carry_out=True)
    torch.testing.assert_close(tile, (whole[0][64:], whole[1][:, 64:], whole[2][:, 64:]))
    assert bool(state[0][:64].isnan().all() & state[1][:, :64].isnan().all() & state[2][:, :64].isnan().all())


def test_some_heads_only() -> None:
    """Heads that are not listed keep what `out` and `lse` hold; new ones hold 0 and -inf; lists may be in any order."""
    given = case(70, 70, heads=4, kv_heads=2, seed=4)
    whole = given.run()
    chosen = torch.tensor([3, 1], dtype=torch.int32, device=DEVICE)
    given.arguments.update(heads=chosen, selections=chosen)
    out, lse = torch.full_like(whole[0], float("nan")), torch.full_like(whole[1], float("nan"))
    given.run(out=out, lse=lse)
    same_state((out[:, [1, 3]], lse[[1, 3]]), (whole[0][:, [1, 3]], whole[1][[1, 3]]), 0)
    assert bool(out[:, [0, 2]].isnan().all() & lse[[0, 2]].isnan().all())
    out, lse = given.run()
    assert bool((out[:, [0, 2]] == 0).all() & lse[[0, 2]].isneginf().all())


def test_no_queries() -> None:
    given = case(1, 64)
    out, lse = given._replace(q=given.q[:0]).run()
    assert out.shape == (0, 2, 64)
    assert lse.shape == (2, 0)


def test_tiles_fit_and_divide() -> None:
    for memory in (99 << 10, 163 << 10, 227 << 10):
        for dim in (64, 96, 128, 256):
            for rows in (64, 128):
                for keys in (32, 64, 128):
                    tile = tiles(torch.bfloat16, dim, block_rows=rows, block_keys=keys, share=4, shared_memory=memory)
                    assert rows % tile.rows == 0
                    assert keys % tile.keys == 0
                    assert tile.rows * tile.pack in (64, 128)
    at_home = tiles(torch.bfloat16, 128, block_rows=64, block_keys=64, share=4, shared_memory=227 << 10)
    assert at_home == (64, 2, 64, 8, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("block_rows", "block_keys"), [(64, 64), (128, 128), (128, 64), (64, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shared", [False, True])
def test_real_sizes(dim: int, block_rows: int, block_keys: int, dtype: torch.dtype, shared: bool) -> None:
    given = case(
        1500, 20_001, heads=8, kv_heads=2, dim=dim, block_rows=block_rows, block_keys=block_keys, dtype=dtype,
        shared=shared, most=100, device="cuda",
    )  # fmt: skip
    expected = given.reference(torch.float64)
    for descriptors in (None, False):
        same_state(given.run(share=4 if shared else 1, descriptors=descriptors), expected, 4e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_real_sizes_float32(dim: int) -> None:
    given = case(300, 5001, heads=4, kv_heads=2, dim=dim, most=50, device="cuda")
    same_state(given.run(), given.reference(torch.float64), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("descriptors", [None, False])
def test_offsets_beyond_32_bits(descriptors: bool | None) -> None:
    """The last queries of a prompt whose keys are 2^31 numbers and more."""
    num_keys = (1 << 31) // (8 * 128) + 301
    k = torch.zeros((num_keys, 8, 128), dtype=torch.bfloat16, device="cuda")
    v = torch.zeros_like(k)
    tail = 4096 + num_keys % 64
    k[-tail:].normal_()
    v[-tail:].normal_()
    q = torch.randn(200, 8, 128, dtype=torch.bfloat16, device="cuda")
    low = (num_keys - tail) // 64
    rows = torch.arange(low, low + 66, dtype=torch.int32, device="cuda")
    first_row = (num_keys - 200) // 64 * 64
    # One of the lists' blocks in two, and the prompt's first block.
    listed = torch.cat([rows.new_zeros(1), rows[1::2]]).expand(8, 4, -1).contiguous()
    counts = torch.full((8, 4), listed.shape[2], dtype=torch.int32, device="cuda")
    heads = torch.arange(8, dtype=torch.int32, device="cuda")
    same = {"block_rows": 64, "block_keys": 64, "heads": heads, "selections": heads, "scale": 0.1}
    found = block_attention(
        q, k, v, listed, counts, first_row=first_row, q_offset=num_keys - 200, descriptors=descriptors, **same
    )
    # The same with the empty middle cut out.
    cut = (low - 1) * 64
    k, v = torch.cat([k[:64], k[cut + 64 :]]), torch.cat([v[:64], v[cut + 64 :]])
    expected = block_attention_ref(
        q.float(), k.float(), v.float(), (listed - low + 1).clamp(min=0), counts,
        first_row=first_row - cut, q_offset=num_keys - 200 - cut, **same,
    )  # fmt: skip
    same_state(found, expected, 4e-3)
