"""Attention over ranges and columns against its reference: interpreted on a CPU, compiled where there is a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from longbatch_kernels.range_attention import Carry, prepare, range_attention, range_attention_ref
from longbatch_kernels.range_index import PackedPrompt
from range_lists import Lists, random_lists
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_KINDS = 7


def tensors(num_queries: int, num_keys: int, heads: int, group: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v; keys and values are strided views of one tensor, as projections leave them."""
    torch.manual_seed(num_keys)
    both = torch.randn(num_keys, 2, heads // group, dim, device=DEVICE).to(dtype)
    return [torch.randn(num_queries, heads, dim, device=DEVICE).to(dtype), both[:, 0], both[:, 1]]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def agree(found: tuple[Tensor, Tensor] | Carry, expected: tuple[Tensor, Tensor], tolerance: float) -> None:
    out, lse = (finished(found)) if isinstance(found, Carry) else found
    assert relative(out, expected[0]) <= tolerance
    assert torch.equal(torch.isinf(lse), torch.isinf(expected[1]))
    error = (lse - expected[1]).nan_to_num(nan=0.0).abs().max()
    assert float(error) <= max(10 * tolerance, 1e-5)
    assert bool((out[torch.isinf(expected[1]).T] == 0).all())


def finished(carry: Carry) -> tuple[Tensor, Tensor]:
    total = torch.where(carry.total > 0, carry.total, 1.0)
    lse = (carry.top + total.log2()) * torch.log(torch.tensor(2.0))
    return carry.acc / total.T[..., None], lse


def check(
    num_keys: int, q_offset: int, heads: int, group: int, dim: int, seed: int, shared: bool, dtype: torch.dtype
) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    num_queries, scale = num_keys - q_offset, dim**-0.5
    q, k, v = tensors(num_queries, num_keys, heads, group, dim, dtype)
    selections = [head // group if shared else head for head in range(heads)]
    lists = random_lists(selections[-1] + 1, num_keys, seed, DEVICE)
    expected = range_attention_ref(
        q.double(), k.double(), v.double(), lists, selections, q_offset=q_offset, scale=scale
    )
    prepared = prepare(
        lists, k, v, selections=[selections], prompts=[PackedPrompt(0, num_queries, q_offset, 0, num_keys)]
    )
    found = range_attention(q, k, v, prepared, scale=scale, out=torch.full_like(q, torch.nan))
    agree(found, expected, tolerance)
    # In tiles that begin and end anywhere, and by a carry that is handed on; the same keys twice change nothing.
    size = max(1, num_queries // 3 + 1)
    parts = [
        range_attention(q[low : low + size], k, v, prepared, scale=scale, q_offset=q_offset + low)
        for low in range(0, num_queries, size)
    ]
    out, lse = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts], 1)
    assert torch.equal(out, found[0])
    assert torch.equal(lse, found[1])
    carry = range_attention(q, k, v, prepared, scale=scale, carry_out=True)
    assert isinstance(carry, Carry)
    agree(carry, expected, tolerance)
    again = range_attention(q, k, v, prepared, scale=scale, carry=carry, carry_out=True)
    assert isinstance(again, Carry)
    assert relative(finished(again)[0], expected[0]) <= tolerance


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("num_keys", "q_offset", "heads", "group", "dim", "seed"),
    [
        (1, 0, 2, 2, 64, 0),
        (5, 0, 4, 4, 64, 1),
        (64, 0, 3, 3, 64, 5),
        (130, 0, 7, 1, 64, 0),
        (191, 65, 8, 8, 96, 2),
        (257, 200, 7, 7, 128, 3),
        (300, 0, 8, 4, 64, 4),
        (129, 1, 3, 3, 256, 0),
    ],
)
def test_equals_reference(
    num_keys: int, q_offset: int, heads: int, group: int, dim: int, seed: int, shared: bool
) -> None:
    check(num_keys, q_offset, heads, group, dim, seed, shared, torch.float32)


@pytest.mark.parametrize("shared", [False, True])
def test_packed_prompts_of_mixed_patterns(shared: bool) -> None:
    """A prompt full of NaN harms no other, and heads without a selection keep what was there."""
    sizes, offsets, group, heads, dim = [150, 40, 193], [0, 13, 70], 2, 4, 64
    q, k, v = tensors(sum(sizes) - sum(offsets), sum(sizes), heads, group, dim, torch.float32)
    each = heads // group if shared else heads
    prompts, chosen, parts = [], [], []
    first_query = first_key = 0
    for p, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        prompts.append(PackedPrompt(first_query, size - offset, offset, first_key, size))
        chosen.append([p * each + (head // group if shared else head) for head in range(heads)])
        parts.append(random_lists(each, size, p, DEVICE))
        first_query, first_key = first_query + size - offset, first_key + size
    k[150:190], v[150:190] = torch.nan, torch.nan
    chosen[2][2:] = [-1, -1]
    lists = stacked(parts)
    prepared = prepare(lists, k, v, selections=chosen, prompts=prompts)
    out = torch.full_like(q, 7.0)
    found, _ = range_attention(q, k, v, prepared, scale=0.1, out=out)
    for p in (0, 2):
        prompt = prompts[p]
        rows = slice(prompt.first_query, prompt.first_query + prompt.num_queries)
        keys = slice(prompt.first_key, prompt.first_key + prompt.num_keys)
        expected, _ = range_attention_ref(
            q[rows].double(),
            k[keys].double(),
            v[keys].double(),
            lists,
            chosen[p],
            q_offset=prompt.q_offset,
            scale=0.1,
            out=torch.full_like(q[rows], 7.0).double(),
        )
        assert relative(found[rows], expected) <= 1e-5


def stacked(parts: list[Lists]) -> Lists:
    """The lists of several prompts as one."""
    width = max(part.starts.shape[1] for part in parts)
    columns = max(part.columns.shape[1] for part in parts)

    def padded(x: Tensor, size: int, value: int) -> Tensor:
        return torch.nn.functional.pad(x, (0, size - x.shape[1]), value=value)

    return Lists(
        torch.cat([padded(part.starts, width, 1) for part in parts]),
        torch.cat([padded(part.stops, width, 0) for part in parts]),
        torch.cat([part.counts for part in parts]),
        torch.cat([padded(part.columns, columns, 2**31 - 1) for part in parts]),
        torch.cat([part.column_counts for part in parts]),
        torch.cat([part.windows for part in parts]),
    )


def test_same_numbers_whatever_the_prompts_beside() -> None:
    q, k, v = tensors(300, 300, 4, 2, 64, torch.float32)
    lists = random_lists(4, 200, 0, DEVICE)
    alone = prepare(lists, k[:200], v[:200], selections=[[0, 1, 2, 3]], prompts=[PackedPrompt(0, 200, 0, 0, 200)])
    expected, _ = range_attention(q[:200], k[:200], v[:200], alone, scale=0.1)
    both = prepare(
        stacked([lists, random_lists(4, 100, 3, DEVICE)]),
        k,
        v,
        selections=[[0, 1, 2, 3], [4, 5, 6, 7]],
        prompts=[PackedPrompt(0, 200, 0, 0, 200), PackedPrompt(200, 100, 0, 200, 100)],
    )
    assert torch.equal(range_attention(q, k, v, both, scale=0.1)[0][:200], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("num_keys", "q_offset", "heads", "group", "dim", "seed"),
    [
        (1, 0, 2, 2, 128, 0),
        (130, 0, 8, 4, 128, 0),
        (777, 513, 7, 1, 128, 3),
        (2049, 0, 14, 7, 128, 2),
        (5000, 1234, 32, 4, 128, 5),
        (8191, 0, 8, 8, 64, 0),
        (4097, 0, 6, 3, 96, 1),
        (3001, 0, 2, 1, 256, 0),
        (20011, 3, 8, 8, 128, 3),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(
    num_keys: int, q_offset: int, heads: int, group: int, dim: int, seed: int, shared: bool, dtype: torch.dtype
) -> None:
    check(num_keys, q_offset, heads, group, dim, seed, shared, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [128, 96])
def test_300_000_tokens_beyond_32_bit_offsets(dim: int) -> None:
    """300,001 tokens of 64 heads and 32 K/V heads; rows at the beginning, in the middle and at the end."""
    num_keys, heads, group = 300_001, 64, 2
    q, k, v = tensors(num_keys, num_keys, heads, group, dim, torch.bfloat16)
    assert q.nbytes > 2**31
    lists = random_lists(heads, num_keys, 0, DEVICE)
    prompt = PackedPrompt(0, num_keys, 0, 0, num_keys)
    prepared = prepare(lists, k, v, selections=[[*range(heads)]], prompts=[prompt])
    out, _ = range_attention(q, k, v, prepared, scale=dim**-0.5, out=torch.full_like(q, torch.nan))
    assert bool(out.isfinite().all())
    for low, high in ((0, 100), (150_000, 150_100), (299_901, 300_001)):
        expected, _ = range_attention_ref(
            q[low:high].float(), k.float(), v.float(), lists, [*range(heads)], q_offset=low, scale=dim**-0.5
        )
        assert relative(out[low:high], expected.double()) <= 4e-3
