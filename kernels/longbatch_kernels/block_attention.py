"""Causal attention to chosen blocks of keys: the executor of a block selection.

Row q (a position) lies in query block b = (q - first_row) // block_rows and sees key j <= q if j // block_keys is
among indices[s, b, :counts[s, b]], s the selection of the head. Over those keys, with group size G = H // Hkv:

    out[q, h] = sum_j p_j v[j, h // G],  p = softmax_j(scale * q[h] . k[j, h // G]),  lse[h, q] = log sum_j exp(...)

A row that sees no key has out 0 and lse -inf. The softmax is one online pass in float32. Its state (acc, top, total),
acc = sum_j w_j v_j, total = sum_j w_j, w_j = 2^(log2(e) scale q . k_j - top), can be taken up and handed on, so that
the keys may come in parts and nothing is rounded in between. Listed blocks ascend, so that only the last ones touch
the diagonal or the end of the keys; no other is masked.
Sources: Dao, FlashAttention-2, arXiv 2307.08691; Jiang et al., MInference, arXiv 2407.02490 (block lists).

Shapes: q, out [n, H, D], k, v [N, Hkv, D] (last dimension contiguous, others strided), indices int32 [S, B, K],
counts int32 [S, B], lse, top, total float32 [H, n], acc float32 [n, H, D].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
# Bytes of shared memory kept free for reductions and barriers.
SHARED_SPARE = 2048


def block_attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    counts: Tensor,
    *,
    block_rows: int,
    block_keys: int,
    first_row: int,
    heads: Tensor,
    selections: Tensor,
    q_offset: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The same in plain torch, in the precision of q: out [n, H, D] and lse [H, n], 0 and -inf for heads not run."""
    num_queries, num_heads, _ = q.shape
    group = num_heads // k.shape[1]
    out, lse = torch.zeros_like(q), q.new_full((num_heads, num_queries), float("-inf"))
    rows = q_offset + torch.arange(num_queries, device=q.device)
    keys = torch.arange(k.shape[0], device=q.device)
    blocks = (rows - first_row) // block_rows
    for head, selection in zip(heads.tolist(), selections.tolist(), strict=True):
        listed = torch.zeros((num_queries, k.shape[0] // block_keys + 1), dtype=torch.bool, device=q.device)
        for b in blocks.unique().tolist():
            chosen = indices[selection, b, : int(counts[selection, b])].long()
            listed[(blocks == b).nonzero(), chosen[chosen < listed.shape[1]]] = True
        seen = listed[:, keys // block_keys] & (keys <= rows[:, None])
        scores = (q[:, head] @ k[:, head // group].T * scale).masked_fill(~seen, float("-inf"))
        lse[head] = scores.logsumexp(-1)
        weights = torch.where(seen, (scores - lse[head][:, None]).exp(), 0.0)
        out[:, head] = weights.to(v.dtype) @ v[:, head // group]
    return out, lse


@triton.jit
def _load_tile(
    x,
    start,
    i_kv,
    strides,
    num_keys,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    # [BLOCK_N, BLOCK_D], 0 beyond HEAD_DIM and, masked or by descriptor, beyond the last key.
    if DESCRIPTORS:
        b_x = x.load([start, i_kv, 0]).reshape(BLOCK_N, BLOCK_D)
    else:
        o_n = start + tl.arange(0, BLOCK_N)
        o_d = tl.arange(0, BLOCK_D)
        p_x = x + o_n[:, None].to(tl.int64) * strides[0] + i_kv.to(tl.int64) * strides[1] + o_d[None, :]
        if MASKED:
            b_x = tl.load(p_x, mask=(o_n < num_keys)[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0)
        elif HEAD_DIM < BLOCK_D:
            b_x = tl.load(p_x, mask=(o_d < HEAD_DIM)[None, :], other=0.0)
        else:
            b_x = tl.load(p_x)
    return b_x


# Lengths and offsets differ from tile to tile: compiling for their divisibility would only compile again and again.
VARYING = ["q_offset", "num_queries", "num_keys", "first_row", "first_tile", "num_tiles", "num_units", "num_blocks"]
VARYING += ["stride_index", "stride_lse", "stride_top"]


@triton.jit(do_not_specialize=VARYING)
def block_attention_kernel(
    q,
    k,
    v,
    indices,
    counts,
    heads,
    selections,
    out,
    lse,
    carry_acc,
    carry_top,
    carry_total,
    scale_log2,
    q_offset,
    num_queries,
    num_keys,
    first_row,
    first_tile,
    num_tiles,
    num_units,
    units_per_share,
    share,
    group,
    num_blocks,
    stride_q,
    stride_k,
    stride_v,
    stride_index,
    stride_out,
    stride_lse,
    stride_acc,
    stride_top,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    CARRY_IN: tl.constexpr,
    CARRY_OUT: tl.constexpr,
):
    BLOCK_M: tl.constexpr = PACK * ROWS
    PARTS: tl.constexpr = BLOCK_KEYS // BLOCK_N
    # Late rows have the longest lists and go first; heads of one tile run together and share K and V in the L2 cache.
    i_tile = num_tiles - 1 - tl.program_id(0) // num_units
    i_unit = tl.program_id(0) % num_units
    low = first_tile + i_tile * ROWS
    i_block = (low - first_row) // BLOCK_ROWS

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_slot = (i_unit % units_per_share) * PACK + o_m // ROWS
    i_list = (i_unit // units_per_share) * share
    m_slot = o_slot < share
    b_head = tl.load(heads + i_list + o_slot, mask=m_slot, other=0).to(tl.int64)
    i_kv = tl.load(heads + i_list) // group
    selection = tl.load(selections + i_list).to(tl.int64)
    o_row = low + o_m % ROWS
    o_q = (o_row - q_offset).to(tl.int64)
    m_m = m_slot & (o_q >= 0) & (o_q < num_queries)
    mask = m_m[:, None] & (o_d < HEAD_DIM)[None, :]
    # [BLOCK_M, BLOCK_D]
    b_q = tl.load(q + o_q[:, None] * stride_q[0] + b_head[:, None] * stride_q[1] + o_d[None, :], mask=mask, other=0.0)

    b_acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    b_top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_total = tl.zeros([BLOCK_M], dtype=tl.float32)
    p_acc = carry_acc + o_q[:, None] * stride_acc[0] + b_head[:, None] * stride_acc[1] + o_d[None, :]
    o_state = b_head * stride_top + o_q
    if CARRY_IN:
        b_acc = tl.load(p_acc, mask=mask, other=0.0)
        b_top = tl.load(carry_top + o_state, mask=m_m, other=float("-inf"))
        b_total = tl.load(carry_total + o_state, mask=m_m, other=0.0)

    p_index = indices + (selection * num_blocks + i_block) * stride_index
    count = tl.load(counts + selection * num_blocks + i_block)
    # Blocks that end at or before the first row's own key, and before the end of the keys, need no mask.
    limit = tl.minimum(low + 1, num_keys)
    whole = count
    last = tl.load(p_index + whole - 1, mask=whole > 0, other=-1)
    while (last + 1) * BLOCK_KEYS > limit:
        whole -= 1
        last = tl.load(p_index + whole - 1, mask=whole > 0, other=-1)

    # Each block number is read one step before it is needed.
    block = tl.load(p_index, mask=count > 0, other=0)
    for MASKED in tl.static_range(2):
        begin = whole * PARTS if MASKED else 0
        end = count * PARTS if MASKED else whole * PARTS
        for i in range(begin, end):
            start = block * BLOCK_KEYS + (i % PARTS) * BLOCK_N
            block = tl.load(p_index + (i + 1) // PARTS, mask=i + 1 < count * PARTS, other=0)
            b_k = _load_tile(k, start, i_kv, stride_k, num_keys, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED, DESCRIPTORS)
            # [BLOCK_M, BLOCK_N]
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            if MASKED:
                o_n = start + tl.arange(0, BLOCK_N)
                b_s = tl.where((o_n[None, :] <= o_row[:, None]) & (o_n < num_keys)[None, :], b_s, float("-inf"))
            # The scale is positive: it can wait until after the maximum, where it is part of a fused multiply-add.
            b_new = tl.maximum(b_top, tl.max(b_s, 1) * scale_log2)
            b_base = b_new
            if MASKED:
                # A row that has seen no key yet: any finite base makes its weights 0.
                b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_alpha = tl.exp2(b_top - b_base)
            b_p = tl.exp2(b_s * scale_log2 - b_base[:, None])
            b_total = b_total * b_alpha + tl.sum(b_p, 1)
            b_acc = b_acc * b_alpha[:, None]
            b_v = _load_tile(v, start, i_kv, stride_v, num_keys, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED, DESCRIPTORS)
            b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
            b_top = b_new

    if CARRY_OUT:
        tl.store(p_acc, b_acc, mask=mask)
        tl.store(carry_top + o_state, b_top, mask=m_m)
        tl.store(carry_total + o_state, b_total, mask=m_m)
    else:
        b_some = tl.where(b_total == 0.0, 1.0, b_total)
        b_lse = tl.where(b_total == 0.0, float("-inf"), (b_top + tl.log2(b_some)) * LN_2)
        p_out = out + o_q[:, None] * stride_out[0] + b_head[:, None] * stride_out[1] + o_d[None, :]
        tl.store(p_out, (b_acc / b_some[:, None]).to(out.dtype.element_ty), mask=mask)
        tl.store(lse + b_head * stride_lse + o_q, b_lse, mask=m_m)


class Tiles(NamedTuple):
    """How a launch is cut: rows of one head and heads of a tile, keys of a step, warps, pipeline stages."""

    rows: int
    pack: int
    keys: int
    num_warps: int
    num_stages: int


def tiles(
    dtype: torch.dtype, head_dim: int, *, block_rows: int, block_keys: int, share: int, shared_memory: int
) -> Tiles:
    """The largest tiles whose queries, keys and values fit `shared_memory` bytes.

    128 query rows keep the tensor cores busy; where a block has 64, two heads of one selection make them up.
    """
    width: int = triton.next_power_of_2(head_dim) * dtype.itemsize
    if dtype == torch.float32:
        # No tensor core: small tiles, because each thread's products are unrolled.
        return Tiles(32 if head_dim <= 64 else 16, 1, 32 if head_dim <= 128 else 16, num_warps=4, num_stages=1)
    rows, pack, keys, stages = block_rows, 2 if block_rows == 64 and share > 1 else 1, min(block_keys, 128), 3

    def fits() -> bool:
        return (rows * pack + 2 * stages * keys) * width + SHARED_SPARE <= shared_memory

    if not fits():
        stages = 2
    if not fits() and keys > 64:
        keys = 64
    if not fits():
        rows, pack = 64, 1
    if not fits():
        keys = 32
    return Tiles(rows, pack, keys, num_warps=4 if rows * pack == 64 else 8, num_stages=stages)


def _chip(device: torch.device) -> tuple[int, bool]:
    """Bytes of shared memory that a block can have, and whether the chip copies tiles by descriptor (TMA)."""
    if device.type != "cuda":
        return 227 << 10, False
    # torch's type stubs lack the first field.
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin, properties.major >= 9


def _describable(x: Tensor) -> bool:
    """Whether a descriptor can stand for x [N, Hkv, D]: not empty, 16-byte addresses."""
    return x.numel() > 0 and x.data_ptr() % 16 == 0 and all(s * x.itemsize % 16 == 0 for s in x.stride()[:2])


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    counts: Tensor,
    *,
    block_rows: int,
    block_keys: int,
    first_row: int,
    heads: Tensor,
    selections: Tensor,
    q_offset: int,
    scale: float,
    share: int = 1,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    carry: tuple[Tensor, Tensor, Tensor] | None = None,
    carry_out: bool = False,
    descriptors: bool | None = None,
) -> tuple[Tensor, ...]:
    """Launch for the queries at positions q_offset..q_offset+n-1: (out, lse), or (acc, top, total) with `carry_out`.

    k, v: positions 0..N-1 of the prompt. indices, counts: ascending key blocks of each query block; block 0 begins at
    position `first_row`, which is at most q_offset. block_rows 64 or 128, block_keys 32, 64 or 128.
    heads, selections int32 [H']: the query heads to run and the row of `indices` for each. share: every so many
    consecutive entries have one kv head and one selection; H' is a multiple of it.
    out, lse: where results go; new ones hold 0 and -inf for heads that are not run. carry: the state (acc, top, total)
    to start from; with `carry_out` the new state overwrites it (None: it starts empty) and no output is written.
    descriptors: whether keys and values are copied by descriptor; None: where the chip can.
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv = k.shape[1]
    num_run = heads.shape[0]
    num_blocks = indices.shape[1]
    assert scale > 0
    assert block_rows in (64, 128)
    assert block_keys in (32, 64, 128)
    assert first_row <= q_offset
    assert q_offset + num_queries <= first_row + num_blocks * block_rows
    assert num_run % share == 0
    assert counts.shape == indices.shape[:2]
    assert indices.is_contiguous()
    assert counts.is_contiguous()
    if carry is None and carry_out:
        carry = (
            q.new_zeros(q.shape, dtype=torch.float32),
            q.new_full((num_heads, num_queries), float("-inf"), dtype=torch.float32),
            q.new_zeros((num_heads, num_queries), dtype=torch.float32),
        )
    if not carry_out:
        out = torch.zeros_like(q) if out is None else out
        if lse is None:
            lse = q.new_full((num_heads, num_queries), float("-inf"), dtype=torch.float32)
    # What is not read or written needs a pointer of the right type all the same.
    p_out, p_lse = q if out is None else out, counts if lse is None else lse
    acc, top, total = (q, q, q) if carry is None else carry
    assert all(x.stride(2) == 1 for x in (q, k, v, p_out, acc))
    assert p_lse.stride(1) == top.stride(-1) == total.stride(-1) == 1
    assert top.stride() == total.stride()

    memory, copies = _chip(q.device)
    tile = tiles(q.dtype, head_dim, block_rows=block_rows, block_keys=block_keys, share=share, shared_memory=memory)
    block_d = triton.next_power_of_2(head_dim)
    described = copies if descriptors is None else descriptors
    described = described and _describable(k) and _describable(v)
    shape = [tile.keys, 1, block_d]
    first_tile = first_row + (q_offset - first_row) // tile.rows * tile.rows
    num_tiles = triton.cdiv(q_offset + num_queries - first_tile, tile.rows)
    units_per_share = triton.cdiv(share, tile.pack)
    num_units = num_run // share * units_per_share
    if num_queries and num_units:
        block_attention_kernel[(num_tiles * num_units,)](
            q,
            TensorDescriptor.from_tensor(k, shape) if described else k,
            TensorDescriptor.from_tensor(v, shape) if described else v,
            indices,
            counts,
            heads,
            selections,
            p_out,
            p_lse,
            acc,
            top,
            total,
            scale * LOG2_E,
            q_offset,
            num_queries,
            k.shape[0],
            first_row,
            first_tile,
            num_tiles,
            num_units,
            units_per_share,
            share,
            num_heads // num_kv,
            num_blocks,
            q.stride()[:2],
            k.stride()[:2],
            v.stride()[:2],
            indices.shape[2],
            p_out.stride()[:2],
            p_lse.stride(0),
            acc.stride()[:2],
            top.stride(0),
            BLOCK_ROWS=block_rows,
            BLOCK_KEYS=block_keys,
            ROWS=tile.rows,
            PACK=tile.pack,
            BLOCK_N=tile.keys,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            PRECISION="ieee" if q.dtype == torch.float32 else None,
            DESCRIPTORS=described,
            CARRY_IN=carry is not None,
            CARRY_OUT=carry_out,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    if carry_out:
        assert carry is not None
        return carry
    assert out is not None
    assert lse is not None
    return out, lse
