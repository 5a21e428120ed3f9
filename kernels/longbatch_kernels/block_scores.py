"""Scores of key blocks for a tile of query blocks: of block means, and of strided antidiagonals.

Block b holds the positions block * b .. block * b + block - 1, and a tile of queries any run of positions, so its first
and last block may be partial: a mean is over the rows that are there.

    pooled_scores[h, b, c] = mean(q of block b) . mean(k of block c), -inf where block c lies after block b

`antidiagonal_scores` takes groups of `stride` positions, a of queries and b of keys, and samples each square on one
antidiagonal; positions that are absent count as zero vectors:

    x[a, b] = scale / stride * sum_i q[a * stride + stride - 1 - i] . k[b * stride + i],  A = softmax of x over b <= a

and sums A over the groups of each pair of blocks. A query group none of whose rows is there counts nothing.
Sources: Jiang et al., MInference 1.0, 2024 (arXiv 2407.02490), algorithm 3; Xu et al., XAttention, 2025
(arXiv 2503.16428).

Shapes: q [n, H, D], k [N, Hkv, D], both with a contiguous last dimension; scores float32 [H, B, C] with B the blocks
that the tile touches and C = ceil(N / block).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# 256 MiB of log-sum-exps.
WORKSPACE = 1 << 26
# Bytes per program from which the large tile of the antidiagonal product fits: sm_80, 90 and 100 have them.
LARGE_SHARED_MEMORY = 160 * 1024


def pooled_ref(x: Tensor, block: int, first_position: int = 0) -> Tensor:
    """The same as `pooled` in plain torch."""
    blocks = (first_position + torch.arange(x.shape[0], device=x.device)) // block - first_position // block
    num_blocks = num_blocks_of(x.shape[0], block, first_position)
    dtype = torch.promote_types(x.dtype, torch.float32)
    sums = torch.zeros((num_blocks, *x.shape[1:]), dtype=dtype, device=x.device).index_add_(0, blocks, x.to(dtype))
    return (sums / torch.bincount(blocks, minlength=num_blocks)[:, None, None]).to(x.dtype)


def pooled_scores_ref(q_means: Tensor, k_means: Tensor, *, first_block: int) -> Tensor:
    """The same as `pooled_scores` in plain torch, in float32 (float64 for float64 inputs)."""
    dtype = torch.promote_types(q_means.dtype, torch.float32)
    group = q_means.shape[1] // k_means.shape[1]
    keys = k_means.to(dtype).repeat_interleave(group, 1)
    scores = torch.einsum("bhd,chd->hbc", q_means.to(dtype), keys)
    blocks = torch.arange(q_means.shape[0], device=q_means.device) + first_block
    later = torch.arange(k_means.shape[0], device=q_means.device) > blocks[:, None]
    return scores.masked_fill_(later, float("-inf"))


def antidiagonal_scores_ref(q: Tensor, k: Tensor, *, stride: int, block: int, scale: float, q_offset: int) -> Tensor:
    """The same as `antidiagonal_scores` in plain torch, in float32 (float64 for float64 inputs)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    num_queries, num_heads, _ = q.shape
    num_keys, num_kv, _ = k.shape
    first_block = q_offset // block
    num_rows = num_blocks_of(num_queries, block, q_offset)
    num_columns = num_blocks_of(num_keys, block, 0)
    before = q_offset - first_block * block
    after = num_rows * block - before - num_queries
    per_block = block // stride
    first_group = first_block * per_block
    groups = first_group + torch.arange(num_rows * per_block, device=q.device)
    there = (groups >= q_offset // stride) & (groups * stride < q_offset + num_queries)
    later = torch.arange(num_columns * per_block, device=q.device) > groups[:, None]
    out = torch.empty((num_heads, num_rows, num_columns), dtype=dtype, device=q.device)
    for h in range(num_heads):
        rows = torch.nn.functional.pad(q[:, h].to(dtype), (0, 0, before, after))
        keys = torch.nn.functional.pad(
            k[:, h * num_kv // num_heads].to(dtype), (0, 0, 0, num_columns * block - num_keys)
        )
        rows = rows.unflatten(0, (-1, stride)).flip(1).flatten(1)  # [groups, stride * D]
        scores = rows @ keys.unflatten(0, (-1, stride)).flatten(1).T * (scale / stride)
        weights = scores.masked_fill_(later, float("-inf")).softmax(-1) * there[:, None]
        out[h] = weights.unflatten(1, (-1, per_block)).sum(2).unflatten(0, (-1, per_block)).sum(1)
    return out


@triton.jit
def pooled_kernel(
    x,
    means,
    stride_n,
    stride_h,
    num_rows,
    first_position,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_b = tl.program_id(0)
    i_h = tl.program_id(1)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    start = (first_position // BLOCK + i_b) * BLOCK - first_position
    low = tl.maximum(start, 0)
    high = tl.minimum(start + BLOCK, num_rows)
    b_sum = tl.zeros([BLOCK_D], dtype=tl.float32)
    for row in range(low, high, BLOCK_R):
        rows = row + tl.arange(0, BLOCK_R)
        # [BLOCK_R, BLOCK_D]
        p_x = x + rows.to(tl.int64)[:, None] * stride_n + i_h * stride_h + o_d[None, :]
        b_x = tl.load(p_x, mask=(rows < high)[:, None] & m_d[None, :], other=0.0)
        b_sum += tl.sum(b_x.to(tl.float32), 0)
    p_means = means + (i_b.to(tl.int64) * tl.num_programs(1) + i_h) * HEAD_DIM + o_d
    tl.store(p_means, (b_sum / (high - low)).to(means.dtype.element_ty), mask=m_d)


def pooled(x: Tensor, block: int, first_position: int = 0) -> Tensor:
    """Launch: the mean of x's rows [n, H, D] in every block [blocks, H, D], summed in float32, in x's dtype.

    first_position: the position of x[0], from the prompt's start.
    """
    num_rows, num_heads, head_dim = x.shape
    assert x.stride(2) == 1
    num_blocks = num_blocks_of(num_rows, block, first_position)
    means = torch.empty((num_blocks, num_heads, head_dim), dtype=x.dtype, device=x.device)
    pooled_kernel[(num_blocks, num_heads)](
        x,
        means,
        x.stride(0),
        x.stride(1),
        num_rows,
        first_position,
        BLOCK=block,
        BLOCK_R=min(32, triton.next_power_of_2(block)),
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
    return means


@triton.jit
def pooled_scores_kernel(
    q_means,
    k_means,
    scores,
    num_rows,
    num_columns,
    first_block,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EXACT: tl.constexpr,
):
    i_r = tl.program_id(0)
    i_c = tl.program_id(1)
    i_h = tl.program_id(2).to(tl.int64)
    num_heads = tl.num_programs(2)
    o_r = tl.arange(0, BLOCK_R)
    o_c = tl.arange(0, BLOCK_C)
    rows = i_r * BLOCK_R + o_r
    columns = i_c * BLOCK_C + o_c
    m_r = rows < num_rows
    m_c = columns < num_columns
    p_q = q_means + (rows.to(tl.int64) * num_heads + i_h)[:, None] * HEAD_DIM
    p_k = k_means + (columns.to(tl.int64) * (num_heads // GROUP) + i_h // GROUP)[None, :] * HEAD_DIM
    b_s = tl.zeros([BLOCK_R, BLOCK_C], dtype=tl.float32)
    # Tiles whose every key block comes later need no product.
    depth = tl.where(i_c * BLOCK_C < first_block + (i_r + 1) * BLOCK_R, HEAD_DIM, 0)
    for d in range(0, depth, BLOCK_D):
        o_d = d + tl.arange(0, BLOCK_D)
        m_d = o_d < HEAD_DIM
        b_q = tl.load(p_q + o_d[None, :], mask=m_r[:, None] & m_d[None, :], other=0.0)
        b_k = tl.load(p_k + o_d[:, None], mask=m_d[:, None] & m_c[None, :], other=0.0)
        b_s = tl.dot(b_q, b_k, b_s, input_precision="ieee" if EXACT else "tf32")
    b_s = tl.where(columns[None, :] <= first_block + rows[:, None], b_s, float("-inf"))
    # [BLOCK_R, BLOCK_C]
    p_s = scores + (i_h * num_rows + i_r * BLOCK_R) * num_columns + i_c * BLOCK_C
    tl.store(p_s + (o_r[:, None] * num_columns + o_c[None, :]), b_s, mask=m_r[:, None] & m_c[None, :])


def pooled_scores(q_means: Tensor, k_means: Tensor, *, first_block: int) -> Tensor:
    """Launch: products of means [B, H, D] and [C, Hkv, D], float32 [H, B, C], -inf where a key block comes later.

    first_block: the block of q_means[0]. Both as `pooled` gives them, by the same block size.
    """
    num_rows, num_heads, head_dim = q_means.shape
    num_columns, num_kv, _ = k_means.shape
    scores = torch.empty((num_heads, num_rows, num_columns), dtype=torch.float32, device=q_means.device)
    exact = q_means.dtype == torch.float32
    block_c = 64 if exact else 128
    pooled_scores_kernel[(triton.cdiv(num_rows, 64), triton.cdiv(num_columns, block_c), num_heads)](
        q_means.contiguous(),
        k_means.contiguous(),
        scores,
        num_rows,
        num_columns,
        first_block,
        GROUP=num_heads // num_kv,
        HEAD_DIM=head_dim,
        BLOCK_R=64,
        BLOCK_C=block_c,
        BLOCK_D=depth_of(head_dim, exact),
        EXACT=exact,
        num_warps=4,
        num_stages=2,
    )
    return scores


@triton.jit
def antidiagonal_lse_kernel(
    q,
    k,
    partial_lse,
    scale_log2,
    stride_qn,
    stride_qh,
    stride_kn,
    stride_kh,
    num_queries,
    num_keys,
    q_offset,
    first_group,
    num_groups,
    num_columns,
    GROUP: tl.constexpr,
    STRIDE: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Log-sum-exp, in powers of two, of each group of queries over the key groups of each block."""
    i_a = tl.program_id(0) // GROUP
    i_h = tl.program_id(2).to(tl.int64) * GROUP + tl.program_id(0) % GROUP
    i_b = tl.program_id(1)
    a = first_group + i_a * BLOCK_A + tl.arange(0, BLOCK_A)
    b = i_b * BLOCK_B + tl.arange(0, BLOCK_B)
    o_d = tl.arange(0, BLOCK_D)
    num_depths: tl.constexpr = (HEAD_DIM + BLOCK_D - 1) // BLOCK_D
    if i_b * BLOCK_B <= first_group + i_a * BLOCK_A + BLOCK_A - 1:
        b_s = tl.zeros([BLOCK_A, BLOCK_B], dtype=tl.float32)
        for step in range(STRIDE * num_depths):
            i = step // num_depths
            d = step % num_depths * BLOCK_D + o_d
            m_d = d < HEAD_DIM
            rows = a * STRIDE + (STRIDE - 1 - i) - q_offset
            keys = b * STRIDE + i
            # [BLOCK_A, BLOCK_D]
            p_q = q + rows.to(tl.int64)[:, None] * stride_qn + i_h * stride_qh + d[None, :]
            b_q = tl.load(p_q, mask=((rows >= 0) & (rows < num_queries))[:, None] & m_d[None, :], other=0.0)
            # [BLOCK_D, BLOCK_B]
            p_k = k + keys.to(tl.int64)[None, :] * stride_kn + i_h // GROUP * stride_kh + d[:, None]
            b_k = tl.load(p_k, mask=m_d[:, None] & (keys < num_keys)[None, :], other=0.0)
            b_s = tl.dot(b_q, b_k, b_s, input_precision="ieee" if EXACT else "tf32")
        b_s = tl.where(b[None, :] <= a[:, None], b_s * scale_log2, float("-inf"))
        b_s = tl.reshape(b_s, [BLOCK_A, BLOCK_B // PER_BLOCK, PER_BLOCK])
        # [BLOCK_A, BLOCK_B / PER_BLOCK]
        b_max = tl.max(b_s, 2)
        m_seen = b_max > float("-inf")
        b_sum = tl.sum(tl.exp2(b_s - tl.where(m_seen, b_max, 0.0)[:, :, None]), 2)
        b_lse = b_max + tl.log2(tl.where(m_seen, b_sum, 1.0))
        rows = i_a * BLOCK_A + tl.arange(0, BLOCK_A)
        columns = i_b * (BLOCK_B // PER_BLOCK) + tl.arange(0, BLOCK_B // PER_BLOCK)
        p_lse = partial_lse + (i_h * num_groups + rows[:, None]) * num_columns + columns[None, :]
        tl.store(p_lse, b_lse, mask=(rows < num_groups)[:, None] & (columns < num_columns)[None, :])


@triton.jit
def antidiagonal_sums_kernel(
    partial_lse,
    out,
    stride_out,
    num_queries,
    q_offset,
    first_block,
    num_columns,
    STRIDE: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Softmax over the whole row of key blocks, summed over the query groups of a block."""
    i_r = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    o_g = tl.arange(0, PER_BLOCK)
    groups = (first_block + i_r) * PER_BLOCK + o_g
    m_there = (groups >= q_offset // STRIDE) & (groups * STRIDE < q_offset + num_queries)
    row = (i_h * tl.num_programs(0) + i_r) * PER_BLOCK + o_g
    # [PER_BLOCK, BLOCK_C]
    p_lse = partial_lse + row[:, None] * num_columns + tl.arange(0, BLOCK_C)[None, :]
    seen = tl.minimum(first_block + i_r + 1, num_columns)
    b_max = tl.full([PER_BLOCK], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([PER_BLOCK], dtype=tl.float32)
    # Every group sees key group 0, so the maximum is finite from the first tile on.
    for start in range(0, seen, BLOCK_C):
        m_c = start + tl.arange(0, BLOCK_C) < seen
        b_lse = tl.load(p_lse + start, mask=m_c[None, :], other=float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_lse, 1))
        b_sum = b_sum * tl.exp2(b_max - b_new) + tl.sum(tl.exp2(b_lse - b_new[:, None]), 1)
        b_max = b_new
    b_scale = tl.where(m_there, 1.0 / b_sum, 0.0)
    for start in range(0, num_columns, BLOCK_C):
        columns = start + tl.arange(0, BLOCK_C)
        b_lse = tl.load(p_lse + start, mask=(columns < seen)[None, :], other=float("-inf"))
        b_out = tl.sum(tl.exp2(b_lse - b_max[:, None]) * b_scale[:, None], 0)
        tl.store(out + i_h * stride_out + i_r.to(tl.int64) * num_columns + columns, b_out, mask=columns < num_columns)


def antidiagonal_scores(
    q: Tensor, k: Tensor, *, stride: int, block: int, scale: float, q_offset: int, workspace: int = WORKSPACE
) -> Tensor:
    """Launch: block sums of the antidiagonal weights, float32 [H, B, C].

    stride and block are powers of two, stride at most block. q_offset: the position of q[0]; q_offset + n is at most N.
    workspace: most float32 numbers of log-sum-exps at a time, unless one block row needs more; heads and rows that do
    not fit run one part after the other.
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv = k.shape[1]
    group = num_heads // num_kv
    assert q_offset + num_queries <= k.shape[0]
    assert q.stride(2) == k.stride(2) == 1
    exact = q.dtype == torch.float32
    per_block = block // stride
    first_block = q_offset // block
    num_rows = num_blocks_of(num_queries, block, q_offset)
    num_columns = num_blocks_of(k.shape[0], block, 0)
    out = torch.empty((num_heads, num_rows, num_columns), dtype=torch.float32, device=q.device)
    row_size = group * per_block * num_columns
    rows_at_once = max(1, min(num_rows, workspace // row_size))
    kv_at_once = max(1, min(num_kv, workspace // (row_size * rows_at_once)))
    tile = antidiagonal_tile(q, per_block)
    partial_lse = torch.empty(kv_at_once * rows_at_once * row_size, dtype=torch.float32, device=q.device)
    for kv in range(0, num_kv, kv_at_once):
        kvs = min(kv_at_once, num_kv - kv)
        for row in range(0, num_rows, rows_at_once):
            rows = min(rows_at_once, num_rows - row)
            num_groups = rows * per_block
            tiles = triton.cdiv(num_groups, tile["BLOCK_A"]) * group
            spans = triton.cdiv((first_block + row + rows) * per_block, tile["BLOCK_B"])
            antidiagonal_lse_kernel[(tiles, spans, kvs)](
                q[:, kv * group :],
                k[:, kv:],
                partial_lse,
                scale / stride * 1.4426950408889634,
                q.stride(0),
                q.stride(1),
                k.stride(0),
                k.stride(1),
                num_queries,
                k.shape[0],
                q_offset,
                (first_block + row) * per_block,
                num_groups,
                num_columns,
                GROUP=group,
                STRIDE=stride,
                PER_BLOCK=per_block,
                HEAD_DIM=head_dim,
                BLOCK_D=depth_of(head_dim, exact),
                EXACT=exact,
                **tile,
            )
            antidiagonal_sums_kernel[(rows, kvs * group)](
                partial_lse,
                out[kv * group :, row:],
                out.stride(0),
                num_queries,
                q_offset,
                first_block + row,
                num_columns,
                STRIDE=stride,
                PER_BLOCK=per_block,
                BLOCK_C=max(16, min(1024, 4096 // per_block)),
                num_warps=4,
            )
    return out


def num_blocks_of(num_rows: int, block: int, first_position: int) -> int:
    """How many blocks hold a position from first_position to first_position + num_rows - 1."""
    return (first_position + num_rows - 1) // block - first_position // block + 1


def depth_of(head_dim: int, exact: bool) -> int:
    """How much of a head a step of a product takes; `exact` ones have more in registers."""
    return next(depth for depth in (32 if exact else 64, 32, 16) if head_dim % depth == 0 or depth == 16)


def antidiagonal_tile(q: Tensor, per_block: int) -> dict[str, int]:
    """Tile and launch options of the antidiagonal product: as large as the chip's shared memory allows."""
    if q.dtype == torch.float32:
        return {"BLOCK_A": 64, "BLOCK_B": max(64, per_block), "num_warps": 4, "num_stages": 2}
    properties = triton.runtime.driver.active.utils.get_device_properties(q.device.index) if q.is_cuda else {}
    if properties.get("max_shared_mem", 0) >= LARGE_SHARED_MEMORY:
        return {"BLOCK_A": 128, "BLOCK_B": max(256, per_block), "num_warps": 8, "num_stages": 3}
    return {"BLOCK_A": 128, "BLOCK_B": max(128, per_block), "num_warps": 8, "num_stages": 2}
