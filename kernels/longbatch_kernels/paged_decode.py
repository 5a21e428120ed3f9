"""One-token attention over paged K/V, split along the keys (Flash-Decoding).

For sequence b with L = lengths[b] cached tokens (the new one included) and query head h of group g = h // G:

    out[b, h] = sum_j p_j V[j, g],  p = softmax_j(scale * q[b, h] . K[j, g]),  max(0, L - window) <= j < L

A sink adds exp(sinks[h]) to the denominator. Token j lies at place j % 64 of page table[b, j // 64], in the storage
format of a `kv_NAME`, whose `load_tile` reads it; with a format that stores only whole pages, the tokens after the last
one lie in the sequence's open block, in q's type.
Every program takes one sequence, one kv head and one fixed range of SPLIT key positions, and packs the G query
heads of the group into the rows of its tile; a second kernel merges the ranges in order. The ranges depend on
positions only, so a sequence's result does not depend on what shares its batch.
Source: Dao et al., Flash-Decoding for long-context inference, 2023.

Shapes: q [B, H, D], pools as the format has them, table int32 [B, pages], lengths int32 [B], out [B, H, D].
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longbatch_kernels import kv_plain

PAGE_TOKENS = 64
# 256 MiB of partial outputs.
WORKSPACE = 1 << 26


class OpenBlocks(NamedTuple):
    """The blocks that are not full. k, v: [blocks * 64, Hkv, D] in q's type. blocks: int32 [B], each sequence's."""

    k: Tensor
    v: Tensor
    blocks: Tensor


def paged_decode_ref(
    q: Tensor,
    k_pool: tuple[Tensor, ...],
    v_pool: tuple[Tensor, ...],
    table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    kv: Any = kv_plain,
    open_blocks: OpenBlocks | None = None,
) -> Tensor:
    """The same in plain torch, in the precision of q: [B, H, D]."""
    out = torch.empty_like(q)
    groups = q.shape[1] // k_pool[0].shape[1]
    for b in range(q.shape[0]):
        length = int(lengths[b])
        rest = 0 if open_blocks is None else length % PAGE_TOKENS
        pages = table[b].long()[: -(-(length - rest) // PAGE_TOKENS)]
        both = []
        for i, pool in enumerate((k_pool, v_pool)):
            x = kv.dequantize_ref(pool, pages, q.dtype)
            if open_blocks is not None:
                low = int(open_blocks.blocks[b]) * PAGE_TOKENS
                x = torch.cat([x, open_blocks[i][low : low + rest]])
            both.append(x[max(0, length - window) if window else 0 : length].repeat_interleave(groups, 1))
        k, v = both  # [L, H, D]
        scores = torch.einsum("hd,lhd->hl", q[b], k) * scale
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores.dtype)[:, None]], dim=1)
        weights = scores.softmax(-1)[:, : len(k)]
        out[b] = torch.einsum("hl,lhd->hd", weights, v)
    return out


@triton.jit
def _accumulate(b_q, b_k, b_v, m_n, b_acc, b_max, b_sum, scale_log2, EXACT: tl.constexpr):
    """Take one tile of keys and values, at least one of them unmasked, into the running softmax."""
    if EXACT:
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale_log2
    else:
        b_s = tl.dot(b_q, tl.trans(b_k)) * scale_log2
    b_s = tl.where(m_n[None, :], b_s, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    b_alpha = tl.exp2(b_max - b_new)
    b_p = tl.exp2(b_s - b_new[:, None])
    b_sum = b_sum * b_alpha + tl.sum(b_p, 1)
    if EXACT:
        b_acc = b_acc * b_alpha[:, None] + tl.dot(b_p, b_v, input_precision="ieee")
    else:
        b_acc = b_acc * b_alpha[:, None] + tl.dot(b_p.to(b_v.dtype), b_v)
    return b_acc, b_new, b_sum


@triton.jit
def paged_decode_kernel(
    q,
    k_pool,
    v_pool,
    k_open,
    v_open,
    open_index,
    table,
    lengths,
    partial_out,
    partial_lse,
    scale_log2,
    stride_table,
    num_heads,
    num_splits,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGE: tl.constexpr,
    EXACT: tl.constexpr,
    LOAD: tl.constexpr,
    NATIVE: tl.constexpr,
    HAS_OPEN: tl.constexpr,
):
    i_split = tl.program_id(0)
    i_kv = tl.program_id(1)
    i_b = tl.program_id(2)
    num_kv = num_heads // GROUP
    length = tl.load(lengths + i_b)
    low = i_split * SPLIT
    if low >= length:
        return
    high = tl.minimum(low + SPLIT, length)
    if WINDOW > 0:
        low = tl.maximum(low, length - WINDOW)
    # Where the open block begins.
    whole = high
    if HAS_OPEN:
        whole = tl.minimum(high, length // PAGE * PAGE)

    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    heads = i_kv * GROUP + o_m
    m_m = o_m < GROUP
    m_d = o_d < HEAD_DIM
    # [BLOCK_M, BLOCK_D]
    p_q = q + (i_b.to(tl.int64) * num_heads + heads[:, None]) * HEAD_DIM + o_d[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None] & m_d[None, :], other=0.0)

    b_acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(low, whole, BLOCK_N):
        positions = start + o_n
        m_n = positions < whole
        pages = tl.load(table + i_b.to(tl.int64) * stride_table + positions // PAGE, mask=m_n, other=0)
        places = positions % PAGE
        # [BLOCK_N, BLOCK_D]
        b_k = LOAD(k_pool, pages, places, i_kv, num_kv, o_d, m_n, m_d, HEAD_DIM, b_q.dtype, NATIVE)
        b_v = LOAD(v_pool, pages, places, i_kv, num_kv, o_d, m_n, m_d, HEAD_DIM, b_q.dtype, NATIVE)
        b_acc, b_max, b_sum = _accumulate(b_q, b_k, b_v, m_n, b_acc, b_max, b_sum, scale_log2, EXACT)
    if HAS_OPEN:
        first = tl.load(open_index + i_b).to(tl.int64) * PAGE
        # One or two tiles: nothing to load ahead.
        for start in tl.range(tl.maximum(low, whole), high, BLOCK_N, num_stages=1):
            positions = start + o_n
            m_n = positions < high
            slots = first + positions % PAGE
            offsets = (slots[:, None] * num_kv + i_kv) * HEAD_DIM + o_d[None, :]
            mask = m_n[:, None] & m_d[None, :]
            b_k = tl.load(k_open + offsets, mask=mask, other=0.0)
            b_v = tl.load(v_open + offsets, mask=mask, other=0.0)
            b_acc, b_max, b_sum = _accumulate(b_q, b_k, b_v, m_n, b_acc, b_max, b_sum, scale_log2, EXACT)

    # An empty range leaves log-sum-exp at -inf, which the merge ignores.
    b_empty = b_sum == 0.0
    b_out = b_acc / tl.where(b_empty, 1.0, b_sum)[:, None]
    b_lse = tl.where(b_empty, float("-inf"), b_max + tl.log2(tl.where(b_empty, 1.0, b_sum)))
    index = (i_b.to(tl.int64) * num_heads + heads) * num_splits + i_split
    tl.store(partial_out + index[:, None] * HEAD_DIM + o_d[None, :], b_out, mask=m_m[:, None] & m_d[None, :])
    tl.store(partial_lse + index, b_lse, mask=m_m)


@triton.jit
def paged_decode_merge_kernel(
    partial_out,
    partial_lse,
    sinks,
    lengths,
    out,
    num_heads,
    num_splits,
    HAS_SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
):
    i_h = tl.program_id(0)
    i_b = tl.program_id(1)
    o_s = tl.arange(0, BLOCK_S)
    o_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    row = i_b.to(tl.int64) * num_heads + i_h
    used = tl.cdiv(tl.load(lengths + i_b), SPLIT)
    b_acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    b_max = -float("inf")
    b_sum = 0.0
    if HAS_SINKS:
        b_max = tl.load(sinks + i_h).to(tl.float32) * 1.4426950408889634
        b_sum = 1.0
    for start in range(0, used, BLOCK_S):
        splits = start + o_s
        m_s = splits < used
        b_lse = tl.load(partial_lse + row * num_splits + splits, mask=m_s, other=-float("inf"))
        p_part = partial_out + (row * num_splits + splits[:, None]) * HEAD_DIM + o_d[None, :]
        # [BLOCK_S, BLOCK_D]
        b_part = tl.load(p_part, mask=m_s[:, None] & m_d[None, :], other=0.0)
        new = tl.maximum(b_max, tl.max(b_lse, 0))
        # Ranges before the window are empty: all of them weigh nothing.
        base = tl.where(new == -float("inf"), 0.0, new)
        alpha = tl.exp2(b_max - base)
        b_weight = tl.exp2(b_lse - base)
        b_acc = b_acc * alpha + tl.sum(b_part * b_weight[:, None], 0)
        b_sum = b_sum * alpha + tl.sum(b_weight, 0)
        b_max = new
    tl.store(out + row * HEAD_DIM + o_d, (b_acc / b_sum).to(out.dtype.element_ty), mask=m_d)


def paged_decode(
    q: Tensor,
    k_pool: tuple[Tensor, ...],
    v_pool: tuple[Tensor, ...],
    table: Tensor,
    lengths: Tensor,
    max_length: int,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    kv: Any = kv_plain,
    open_blocks: OpenBlocks | None = None,
    split: int = 1024,
    block_n: int = 64,
    workspace: int = WORKSPACE,
) -> Tensor:
    """Launch both kernels. max_length: an upper bound of `lengths`, known on the host. kv: the `kv_NAME` of the pools.
    open_blocks: given where it stores whole blocks only. Returns [B, H, D].

    `split` must be the same for every call whose results are compared; a multiple of `block_n`. workspace: most float32
    numbers of partial outputs at a time; more sequences than fit run one part after the other.
    """
    num_sequences, num_heads, head_dim = q.shape
    num_kv = k_pool[0].shape[1]
    group = num_heads // num_kv
    num_splits = triton.cdiv(max_length, split)
    rows = max(1, workspace // (num_heads * num_splits * head_dim))
    if num_sequences > rows:
        parts = [slice(low, low + rows) for low in range(0, num_sequences, rows)]
        same = partial(paged_decode, scale=scale, window=window, sinks=sinks, kv=kv, split=split, block_n=block_n)
        outs = []
        for i in parts:
            opened = None if open_blocks is None else open_blocks._replace(blocks=open_blocks.blocks[i])
            outs.append(same(q[i], k_pool, v_pool, table[i], lengths[i], max_length, open_blocks=opened))
        return torch.cat(outs)
    block_d = triton.next_power_of_2(head_dim)
    # In larger tiles these need more shared memory than chips below sm_90 have, or more registers than there are.
    wide = q.dtype == torch.float32 and head_dim > (128 if open_blocks is None else 64)
    partial_out = torch.empty((num_sequences, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((num_sequences, num_heads, num_splits), dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)
    paged_decode_kernel[(num_splits, num_kv, num_sequences)](
        q.contiguous(),
        k_pool,
        v_pool,
        q if open_blocks is None else open_blocks.k,
        q if open_blocks is None else open_blocks.v,
        lengths if open_blocks is None else open_blocks.blocks,
        table,
        lengths,
        partial_out,
        partial_lse,
        scale * 1.4426950408889634,
        table.stride(0),
        num_heads,
        num_splits,
        WINDOW=window or 0,
        GROUP=group,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_N=min(block_n, 32) if wide else block_n,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        SPLIT=split,
        PAGE=PAGE_TOKENS,
        EXACT=q.dtype == torch.float32,
        LOAD=kv.load_tile,
        NATIVE=q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) >= (8, 9),
        HAS_OPEN=open_blocks is not None,
        num_warps=4,
        num_stages=2 if wide else 3,
    )
    merge_d = min(64, block_d)
    paged_decode_merge_kernel[(num_heads, num_sequences, triton.cdiv(head_dim, merge_d))](
        partial_out,
        partial_lse,
        q if sinks is None else sinks,
        lengths,
        out,
        num_heads,
        num_splits,
        HAS_SINKS=sinks is not None,
        HEAD_DIM=head_dim,
        BLOCK_S=128,
        BLOCK_D=merge_d,
        SPLIT=split,
        num_warps=4,
    )
    return out
