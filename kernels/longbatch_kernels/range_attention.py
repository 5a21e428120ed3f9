"""Causal attention over ranges of distances and columns (`Ranges`), for every head of a layer in one launch.

    block of rows b holds positions 64 b .. 64 b + 63 and ends at e = 64 (b + 1); its row q sees key j <= q if
        e - c - 64 <= j < e - a   for one of the selection's ranges [a, c], or
        q - j < window, or
        j is one of the selection's columns.
    out = softmax(scale q k^T) v over the keys seen; each key counts once. No key seen: out 0, log-sum-exp -inf.

Vertical-slash selections are MInference's (arXiv 2407.02490, with its 64-row blocks); windows with sinks are
StreamingLLM's (arXiv 2309.17453); a window without end is dense attention. Online softmax as in FlashAttention-2
(arXiv 2307.08691), in float32 and base 2.

Shapes: q [Tq, H, D]; k, v [Tk, Hkv, D], H a multiple of Hkv, grouped queries never expanded; out [Tq, H, D]; lse
[H, Tq] float32, natural logarithm. A carry is (acc float32 [Tq, H, D], top float32 [H, Tq], total float32 [H, Tq]):
sum of exp2(score log2(e) - top) v, the greatest score times log2(e), and the sum of the exponentials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longbatch_kernels import range_attention_hopper as hopper
from longbatch_kernels.range_columns import RangeLists
from longbatch_kernels.range_index import (
    ROWS,
    PackedPrompt,
    RangeIndex,
    build_index,
    on_device,
    records,
)

LOG2E = math.log2(math.e)
# Two wider heads in one tile need more shared memory than smaller chips have.
WIDEST_PAIR = 128


class Carry(NamedTuple):
    """An unnormalized state over some keys."""

    acc: Tensor
    top: Tensor
    total: Tensor


@dataclass(frozen=True, slots=True)
class Prepared:
    """Selections made ready for `range_attention`.

    jobs int32 [J, 3]: one head, or two that share a selection: both heads and the selection. job_groups: the prompt and
    the K/V head of each job. on_hopper: which kernel runs it. items: the `records` of all tiles of queries, where they
    were made beforehand.
    """

    index: RangeIndex
    jobs: Tensor
    prompts: tuple[PackedPrompt, ...]
    job_groups: tuple[tuple[int, int], ...]
    heads_per_tile: int
    on_hopper: bool
    items: Tensor | None = None


def range_attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: RangeLists,
    selections: Sequence[int],
    *,
    q_offset: int,
    scale: float,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same for one prompt in plain torch, in the precision of its arguments; heads with selection -1 keep what
    `out` holds."""
    num_queries, num_heads, _ = q.shape
    group = num_heads // k.shape[1]
    out = torch.zeros_like(q) if out is None else out
    lse = torch.full(
        (num_heads, num_queries), -math.inf, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32
    )
    row = torch.arange(q_offset, q_offset + num_queries, device=q.device)[:, None]
    key = torch.arange(k.shape[0], device=q.device)[None]
    end = (row // ROWS + 1) * ROWS
    for head, s in enumerate(selections):
        if s < 0:
            continue
        seen = row - key < lists.windows[s]
        for a, c in zip(lists.starts[s, : lists.counts[s]], lists.stops[s, : lists.counts[s]], strict=True):
            seen |= (key >= end - c - ROWS) & (key < end - a)
        seen |= torch.isin(key, lists.columns[s, : lists.column_counts[s]])
        seen &= key <= row
        scores = (q[:, head] @ k[:, head // group].T) * scale
        scores = scores.masked_fill(~seen, -math.inf)
        lse[head] = scores.logsumexp(-1)
        out[:, head] = torch.where(seen, scores.softmax(-1), 0).to(q.dtype) @ v[:, head // group]
    return out, lse.to(q.device)


@triton.jit(do_not_specialize=["capacity", "num_rows"])
def range_attention_kernel(
    q,
    k,
    v,
    out,
    lse,
    acc_in,
    top_in,
    total_in,
    acc_out,
    top_out,
    total_out,
    items,
    runs,
    columns,
    column_keys,
    column_values,
    column_bits,
    column_clean,
    width,
    capacity,
    num_rows,
    num_heads,
    scale_log2,
    stride_q_t,
    stride_q_h,
    stride_k_t,
    stride_k_h,
    stride_v_t,
    stride_v_h,
    stride_o_t,
    stride_o_h,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CARRY_IN: tl.constexpr,
    CARRY_OUT: tl.constexpr,
):
    """One block of 64 rows, for HEADS heads that share a selection."""
    p_item = items + tl.program_id(0).to(tl.int64) * 24
    end = tl.load(p_item + 2)
    i_kv = tl.load(p_item + 3)
    low = tl.load(p_item + 5)
    high = tl.load(p_item + 6)
    first_key = tl.load(p_item + 7).to(tl.int64)
    num_keys = tl.load(p_item + 8)
    i_s = tl.load(p_item + 9).to(tl.int64)
    i_block = tl.load(p_item + 19).to(tl.int64)
    window = tl.load(p_item + 20)

    o_m = tl.arange(0, HEADS * 64)
    o_d = tl.arange(0, BLOCK_D)
    o_n = tl.arange(0, BLOCK_N)
    row = end - 64 + o_m % 64
    # Heads of a job follow one another.
    head = (tl.load(p_item) + o_m // 64).to(tl.int64)
    place = (tl.load(p_item + 4) + row).to(tl.int64)
    m_row = (row >= low) & (row < high)
    m_d = o_d < D
    p_q = q + place[:, None] * stride_q_t + head[:, None] * stride_q_h + o_d[None, :]
    b_q = tl.load(p_q, mask=m_row[:, None] & m_d[None, :], other=0.0)

    p_head = head * num_rows + place
    if CARRY_IN:
        p_acc = (place[:, None] * num_heads + head[:, None]) * D + o_d[None, :]
        b_acc = tl.load(acc_in + p_acc, mask=m_row[:, None] & m_d[None, :], other=0.0)
        b_top = tl.load(top_in + p_head, mask=m_row, other=float("-inf"))
        b_total = tl.load(total_in + p_head, mask=m_row, other=0.0)
    else:
        b_acc = tl.zeros([HEADS * 64, BLOCK_D], tl.float32)
        b_top = tl.full([HEADS * 64], float("-inf"), tl.float32)
        b_total = tl.zeros([HEADS * 64], tl.float32)

    p_k = k + first_key * stride_k_t + i_kv * stride_k_h
    p_v = v + first_key * stride_v_t + i_kv * stride_v_h
    reach = tl.where(window > 0, window, 2147483647)
    PARTS: tl.constexpr = 128 // BLOCK_N
    # Class 0 needs masks throughout; of class 1 only the last tile, which may begin before the prompt.
    runs += i_s * capacity * 2
    masked = tl.load(p_item + 10)
    whole = tl.load(p_item + 11)
    n_masked = tl.load(p_item + 14) * PARTS
    n_whole = tl.load(p_item + 15) * PARTS
    inner = tl.maximum(n_whole - PARTS, 0)
    for i_t in tl.range(0, n_masked + n_whole - inner):
        tail = i_t - n_masked
        p_run = tl.where(tail < 0, masked, whole) + tl.where(tail < 0, i_t, inner + tail) * (BLOCK_N // 16) + o_n // 16
        # A run that leaves the prompt is moved inside, and what it then holds beside its own keys is masked.
        begin = end - tl.load(runs + p_run * 2)
        key = tl.minimum(tl.maximum(begin, 0), tl.maximum(num_keys - 16, 0)) + o_n % 16
        taken = (tl.load(runs + p_run * 2 + 1) >> tl.minimum(tl.maximum(key - begin, 0), 15)) & 1
        taken = (taken > 0) & (key >= begin) & (key < begin + 16) & (key < num_keys)
        seen = taken[None, :] & (key[None, :] <= row[:, None]) & (row[:, None] - key[None, :] < reach)
        p_kt = p_k + key.to(tl.int64)[None, :] * stride_k_t + o_d[:, None]
        b_k = tl.load(p_kt, mask=m_d[:, None] & (key < num_keys)[None, :], other=0.0)
        p_vt = p_v + key.to(tl.int64)[:, None] * stride_v_t + o_d[None, :]
        b_v = tl.load(p_vt, mask=m_d[None, :] & (key < num_keys)[:, None], other=0.0)
        b_s = tl.dot(b_q, b_k, input_precision="ieee") * scale_log2
        b_s = tl.where(seen, b_s, float("-inf"))
        b_acc, b_top, b_total = _absorb(b_acc, b_top, b_total, b_s, b_v)
    for i_t in tl.range(0, inner):
        p_run = whole + i_t * (BLOCK_N // 16) + o_n // 16
        key = (end - tl.load(runs + p_run * 2) + o_n % 16).to(tl.int64)
        b_k = tl.load(p_k + key[None, :] * stride_k_t + o_d[:, None], mask=m_d[:, None], other=0.0)
        b_v = tl.load(p_v + key[:, None] * stride_v_t + o_d[None, :], mask=m_d[None, :], other=0.0)
        b_s = tl.dot(b_q, b_k, input_precision="ieee") * scale_log2
        b_acc, b_top, b_total = _absorb(b_acc, b_top, b_total, b_s, b_v)

    p_ck = column_keys + i_s * width * D
    p_cv = column_values + i_s * width * D
    for i_t in tl.range(0, tl.load(p_item + 18) * PARTS):
        o_c = i_t * BLOCK_N + o_n
        b_k = tl.load(p_ck + o_c[None, :] * D + o_d[:, None], mask=m_d[:, None], other=0.0)
        b_v = tl.load(p_cv + o_c[:, None] * D + o_d[None, :], mask=m_d[None, :], other=0.0)
        b_s = tl.dot(b_q, b_k, input_precision="ieee") * scale_log2
        if tl.load(column_clean + i_block * (width // 128) + i_t // PARTS) < 2:
            taken = (tl.load(column_bits + i_block * (width // 32) + o_c // 32) >> (o_c % 32)) & 1
            away = row[:, None] - tl.load(columns + i_s * width + o_c)[None, :]
            # What a window holds is counted there.
            b_s = tl.where((taken > 0)[None, :] & (away >= window), b_s, float("-inf"))
        b_acc, b_top, b_total = _absorb(b_acc, b_top, b_total, b_s, b_v)

    if CARRY_OUT:
        p_acc = (place[:, None] * num_heads + head[:, None]) * D + o_d[None, :]
        tl.store(acc_out + p_acc, b_acc, mask=m_row[:, None] & m_d[None, :])
        tl.store(top_out + p_head, b_top, mask=m_row)
        tl.store(total_out + p_head, b_total, mask=m_row)
    else:
        b_some = tl.where(b_total > 0.0, b_total, 1.0)
        b_o = b_acc / b_some[:, None]
        p_o = out + place[:, None] * stride_o_t + head[:, None] * stride_o_h + o_d[None, :]
        tl.store(p_o, b_o.to(out.dtype.element_ty), mask=m_row[:, None] & m_d[None, :])
        tl.store(lse + p_head, (b_top + tl.log2(b_some)) * 0.6931471805599453, mask=m_row)


@triton.jit
def _absorb(b_acc, b_top, b_total, b_s, b_v):
    """One step of the online softmax; rows that have seen nothing stay at -inf."""
    b_new = tl.maximum(b_top, tl.max(b_s, 1))
    b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s - b_safe[:, None])
    b_keep = tl.exp2(b_top - b_safe)
    b_acc = b_acc * b_keep[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")
    return b_acc, b_new, b_total * b_keep + tl.sum(b_p, 1)


def prepare(
    lists: RangeLists,
    k: Tensor,
    v: Tensor,
    *,
    selections: Sequence[Sequence[int]],
    prompts: Sequence[PackedPrompt],
) -> Prepared:
    """Make selections ready for any tiles of these queries. k, v [Tk, Hkv, D].

    selections: for each prompt, the row of the lists that each query head goes by; -1 leaves the head out. Heads with
    the same row must belong to one K/V head.
    """
    num_heads = len(selections[0])
    group = num_heads // k.shape[1]
    num_selections = lists.starts.shape[0]
    owner: list[tuple[int, int] | None] = [None] * num_selections
    shared = True
    jobs = []
    for p, of_head in enumerate(selections):
        head = 0
        while head < num_heads:
            s = of_head[head]
            if s < 0:
                head += 1
                continue
            assert owner[s] in (None, (p, head // group)), "a selection serves one prompt and one K/V head"
            owner[s] = (p, head // group)
            pair = head + 1 < num_heads and of_head[head + 1] == s and k.shape[2] <= WIDEST_PAIR
            shared &= pair
            jobs.append((head, s, p, pair))
            head += 1 + pair
    if not shared:
        jobs = [(head, s, p, False) for p, of in enumerate(selections) for head, s in enumerate(of) if s >= 0]
    on_hopper = hopper.serves(k, min(prompt.num_keys for prompt in prompts))
    owners = [found or (0, 0) for found in owner]
    index = build_index(lists, k, v, [*prompts], owners, paired=on_hopper and not shared)
    table = on_device(tuple((head, head + pair, s) for head, s, _, pair in jobs), k.device)
    return Prepared(
        index, table, tuple(prompts), tuple((p, head // group) for head, _, p, _ in jobs), 2 if shared else 1, on_hopper
    )


def range_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prepared: Prepared,
    *,
    scale: float,
    q_offset: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    carry: Carry | None = None,
    carry_out: bool = False,
) -> tuple[Tensor, Tensor] | Carry:
    """(out, lse), or a `Carry` where `carry_out`. Heads without a selection keep what out, lse or the carry hold.

    q_offset: q holds only a run of the queries of the one prompt that was prepared, from this position on; None: q
    holds the queries of all prompts. carry: a state over other keys to go on from; it is updated in place.
    """
    num_rows, num_heads, dim = q.shape
    index = prepared.index
    items = prepared.items
    if items is None:
        items = records(index, prepared.jobs, _bounds(prepared, num_rows, q_offset))
    if carry_out:
        carry_into = carry or Carry(
            torch.zeros(num_rows, num_heads, dim, dtype=torch.float32, device=q.device),
            torch.full((num_heads, num_rows), -math.inf, device=q.device),
            torch.zeros(num_heads, num_rows, device=q.device),
        )
    else:
        carry_into = None
    out = torch.empty_like(q) if out is None else out
    lse = torch.empty(num_heads, num_rows, dtype=torch.float32, device=q.device) if lse is None else lse
    assert q.stride(2) == k.stride(2) == v.stride(2) == out.stride(2) == 1
    if not items.shape[0]:
        return carry_into or (out, lse)
    if prepared.on_hopper:
        hopper.launch(q, k, v, index, items, out, lse, carry, carry_into, scale * LOG2E)
        return carry_into or (out, lse)
    read, write = carry or (None, None, None), carry_into or (None, None, None)
    block_n = 128 if dim <= 64 else 64
    range_attention_kernel[(items.shape[0],)](
        q,
        k,
        v,
        out,
        lse,
        *read,
        *write,
        items,
        index.runs,
        index.columns.places,
        index.columns.keys,
        index.columns.values,
        index.columns.bits,
        index.columns.clean,
        index.columns.places.shape[1],
        index.runs.shape[1],
        num_rows,
        num_heads,
        scale * LOG2E,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *out.stride()[:2],
        HEADS=prepared.heads_per_tile,
        D=dim,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_N=block_n,
        CARRY_IN=carry is not None,
        CARRY_OUT=carry_out,
        num_warps=4 * prepared.heads_per_tile if dim <= 128 else 8,
        num_stages=2 if dim <= 128 else 1,
    )
    return carry_into or (out, lse)


def _bounds(prepared: Prepared, num_rows: int, q_offset: int | None) -> tuple[tuple[int, ...], ...]:
    """What `records` takes for each job."""
    rows_per_unit = ROWS * (2 if prepared.index.paired else 1)
    if q_offset is None:
        spans = [(p.first_query - p.q_offset, p.q_offset, p.q_offset + p.num_queries) for p in prepared.prompts]
    else:
        (prompt,) = prepared.prompts
        assert prompt.q_offset <= q_offset
        assert q_offset + num_rows <= prompt.q_offset + prompt.num_queries
        spans = [(-q_offset, q_offset, q_offset + num_rows)]
    # Heads of one K/V head side by side, so that they find its keys in the cache.
    bounds, base = [], 0
    for (p, _), jobs in groupby(prepared.job_groups):
        place, low, high = spans[p]
        last = (high - 1) // rows_per_unit
        count = last - low // rows_per_unit + 1 if high > low else 0
        stride = len([*jobs])
        bounds += [(count, last, base + number, place, low, high, stride) for number in range(stride)]
        base += count * stride
    return tuple(bounds)
