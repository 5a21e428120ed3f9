"""The paged decode kernel against its reference: interpreted on a CPU, compiled where there is a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")
from longbatch_kernels import kv_fp8
from longbatch_kernels.paged_decode import OpenBlocks, paged_decode, paged_decode_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def case(
    lengths: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str = DEVICE, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Random q, pools and a block table of scattered pages; every slot that no sequence owns holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-length // 64) for length in lengths]
    order = torch.randperm(sum(pages) + 3, generator=generator)
    table = torch.zeros((len(lengths), max(pages)), dtype=torch.int32)
    k = torch.full((len(order) * 64, kv_heads, dim), float("nan"))
    v = k.clone()
    at = 0
    for b, (count, length) in enumerate(zip(pages, lengths, strict=True)):
        table[b, :count] = order[at : at + count].int()
        at += count
        slots = (table[b, :count].long()[:, None] * 64 + torch.arange(64)).reshape(-1)[:length]
        k[slots] = torch.randn(length, kv_heads, dim, generator=generator)
        v[slots] = torch.randn(length, kv_heads, dim, generator=generator)
    q = torch.randn(len(lengths), heads, dim, generator=generator)
    moved = [x.to(device, dtype) for x in (q, k, v)]
    return (*moved, table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device))


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "dim"),
    [
        pytest.param([1, 63, 64, 65, 127, 200], 4, 2, 32, id="odd-lengths"),
        pytest.param([130], 9, 3, 64, id="group-3"),
        pytest.param([40, 300], 7, 1, 16, id="group-7"),
        pytest.param([70], 3, 3, 80, id="dim-80"),
    ],
)
@pytest.mark.parametrize("window", [None, 1, 50, 128])
@pytest.mark.parametrize("sinks", [False, True])
def test_equals_reference(
    lengths: list[int], heads: int, kv_heads: int, dim: int, window: int | None, sinks: bool
) -> None:
    q, k, v, table, counts = case(lengths, heads, kv_heads, dim, torch.float32)
    logits = torch.randn(heads, device=DEVICE) if sinks else None
    expected = paged_decode_ref(q, (k,), (v,), table, counts, scale=0.2, window=window, sinks=logits)
    found = paged_decode(
        q, (k,), (v,), table, counts, max(lengths), scale=0.2, window=window, sinks=logits, split=128, block_n=32
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_does_not_depend_on_neighbours() -> None:
    q, k, v, table, counts = case([90, 700, 33], 4, 2, 32, torch.float32)
    together = paged_decode(q, (k,), (v,), table, counts, 700, scale=0.2, split=128, block_n=32)
    for b in range(3):
        alone = paged_decode(
            q[b : b + 1],
            (k,),
            (v,),
            table[b : b + 1],
            counts[b : b + 1],
            int(counts[b]),
            scale=0.2,
            split=128,
            block_n=32,
        )
        assert torch.equal(alone[0], together[b])


def test_small_workspace_changes_nothing() -> None:
    q, k, v, table, counts = case([90, 700, 33, 128], 4, 2, 32, torch.float32)
    whole = paged_decode(q, (k,), (v,), table, counts, 700, scale=0.2, split=128, block_n=32)
    parts = paged_decode(q, (k,), (v,), table, counts, 700, scale=0.2, split=128, block_n=32, workspace=4 * 6 * 32 * 3)
    assert torch.equal(parts, whole)


def test_half_precision() -> None:
    q, k, v, table, counts = case([150, 20], 4, 2, 32, torch.float16)
    expected = paged_decode_ref(q.float(), (k.float(),), (v.float(),), table, counts, scale=0.2)
    found = paged_decode(q, (k,), (v,), table, counts, 150, scale=0.2, split=128, block_n=32)
    assert relative_error(found, expected) < 2e-3


class Float8(NamedTuple):
    """A case whose whole pages are stored in float8; the scale of every other page is NaN, and so is every place of the
    open blocks that no token has."""

    q: torch.Tensor
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    table: torch.Tensor
    counts: torch.Tensor
    open_blocks: OpenBlocks


def float8_case(lengths: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Float8:
    q, k, v, table, counts = case(lengths, heads, kv_heads, dim, dtype)
    index = torch.randperm(len(lengths) + 2, generator=torch.Generator().manual_seed(1))[: len(lengths)].int()
    pools, opened = [], []
    for x in (k, v):
        described = kv_fp8.tensors(len(x) // 64, kv_heads, dim, dtype)
        pool = tuple(torch.zeros(shape, dtype=kind, device=DEVICE) for shape, kind in described)
        pool[1].fill_(float("nan"))
        open_x = torch.full(((len(lengths) + 2) * 64, kv_heads, dim), float("nan"), dtype=dtype, device=DEVICE)
        for b, length in enumerate(lengths):
            pages = table[b, : length // 64].long()
            kv_fp8.quantize_ref(x, pages * 64, pool, pages)
            if rest := length % 64:
                low = int(table[b, length // 64]) * 64
                first = int(index[b]) * 64
                open_x[first : first + rest] = x[low : low + rest]
        pools.append(pool)
        opened.append(open_x)
    return Float8(q, pools[0], pools[1], table, counts, OpenBlocks(opened[0], opened[1], index.to(DEVICE)))


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "dim"),
    [
        pytest.param([1, 63, 64, 65, 127, 128, 200, 256], 4, 2, 32, id="odd-lengths"),
        pytest.param([130], 9, 3, 64, id="group-3"),
        pytest.param([40, 300], 7, 1, 16, id="group-7"),
        pytest.param([70], 3, 3, 80, id="dim-80"),
        pytest.param([64, 128], 2, 2, 16, id="full-pages"),
        pytest.param([1], 2, 1, 16, id="one-token"),
    ],
)
@pytest.mark.parametrize("window", [None, 1, 50, 128])
@pytest.mark.parametrize("sinks", [False, True])
def test_float8_equals_reference(
    lengths: list[int], heads: int, kv_heads: int, dim: int, window: int | None, sinks: bool
) -> None:
    c = float8_case(lengths, heads, kv_heads, dim, torch.float32)
    logits = torch.randn(heads, device=DEVICE) if sinks else None
    more: dict[str, Any] = {"scale": 0.2, "window": window, "sinks": logits, "kv": kv_fp8, "open_blocks": c.open_blocks}
    expected = paged_decode_ref(c.q, c.k, c.v, c.table, c.counts, **more)
    found = paged_decode(c.q, c.k, c.v, c.table, c.counts, max(lengths), split=128, block_n=32, **more)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_float8_is_near_what_was_stored() -> None:
    """And not nearer than float8 can be where whole pages are read."""
    q, k, v, table, counts = case([300, 50], 4, 2, 32, torch.float32)
    exact = paged_decode_ref(q, (k,), (v,), table, counts, scale=0.2)
    c = float8_case([300, 50], 4, 2, 32, torch.float32)
    more: dict[str, Any] = {"scale": 0.2, "kv": kv_fp8, "open_blocks": c.open_blocks}
    found = paged_decode(c.q, c.k, c.v, c.table, c.counts, 300, split=128, block_n=32, **more)
    assert 1e-3 < relative_error(found[0], exact[0]) < 0.1
    torch.testing.assert_close(found[1], exact[1], rtol=1e-5, atol=1e-5)


def test_float8_in_parts_and_in_half_precision() -> None:
    c = float8_case([90, 700, 33, 128], 4, 2, 32, torch.float16)
    more: dict[str, Any] = {"scale": 0.2, "kv": kv_fp8, "open_blocks": c.open_blocks, "split": 128, "block_n": 64}
    whole = paged_decode(c.q, c.k, c.v, c.table, c.counts, 700, **more)
    parts = paged_decode(c.q, c.k, c.v, c.table, c.counts, 700, workspace=4 * 6 * 32 * 3, **more)
    assert torch.equal(parts, whole)
    opened = OpenBlocks(c.open_blocks.k.float(), c.open_blocks.v.float(), c.open_blocks.blocks)
    expected = paged_decode_ref(c.q.float(), c.k, c.v, c.table, c.counts, scale=0.2, kv=kv_fp8, open_blocks=opened)
    assert relative_error(whole, expected) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_float8_real_sizes(dim: int, window: int | None, dtype: torch.dtype) -> None:
    c = float8_case([1, 8191, 70_001], 32, 8, dim, dtype)
    opened = OpenBlocks(c.open_blocks.k.double(), c.open_blocks.v.double(), c.open_blocks.blocks)
    more: dict[str, Any] = {"scale": dim**-0.5, "window": window, "kv": kv_fp8}
    expected = paged_decode_ref(c.q.double(), c.k, c.v, c.table, c.counts, open_blocks=opened, **more)
    found = paged_decode(c.q, c.k, c.v, c.table, c.counts, 70_001, open_blocks=c.open_blocks, **more)
    assert relative_error(found, expected) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_real_sizes(dim: int, window: int | None, dtype: torch.dtype) -> None:
    q, k, v, table, counts = case([1, 8191, 70_001], 32, 8, dim, dtype, "cuda")
    expected = paged_decode_ref(q.double(), (k.double(),), (v.double(),), table, counts, scale=dim**-0.5, window=window)
    found = paged_decode(q, (k,), (v,), table, counts, 70_001, scale=dim**-0.5, window=window)
    assert relative_error(found, expected) < 4e-3


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """The last pages of a pool of 2^31 numbers and more."""
    num_slots = (1 << 31) // (8 * 128) + 4096
    k = torch.zeros((num_slots, 8, 128), dtype=torch.bfloat16, device="cuda")
    v = torch.zeros_like(k)
    k[-2048:].normal_()
    v[-2048:].normal_()
    table = torch.arange(num_slots // 64 - 32, num_slots // 64, dtype=torch.int32, device="cuda")[None]
    q = torch.randn(1, 32, 128, dtype=torch.bfloat16, device="cuda")
    counts = torch.tensor([2000], dtype=torch.int32, device="cuda")
    last = (k[-2048:].float(),), (v[-2048:].float(),)
    expected = paged_decode_ref(q.float(), *last, table - table[0, 0], counts, scale=0.1)
    found = paged_decode(q, (k,), (v,), table, counts, 2000, scale=0.1)
    assert relative_error(found, expected) < 4e-3


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected||; NaN never passes a comparison with it."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
