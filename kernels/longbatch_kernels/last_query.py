"""Where the last queries look: their softmax summed per key ("vertical") and per distance ("slash").

With A[r, j] = softmax_j(scale * q[r] . K[j]) over the keys j <= q_offset + r, for m <= 64 queries r of one prompt:

    vertical[j] = sum_r A[r, j]        slash[d] = sum_r A[r, q_offset + r - d]

per query head, or summed over the query heads of a kv group. Everything is float32 and no [m, N] matrix is stored.
The first kernel takes the log-sum-exp of every row over one fixed range of keys, the second has the whole row's and
makes both sums. Diagonals are summed on the way through the keys: a program walks along eight streams of keys, eight
keys of each at a time, while the sums of row tile j (rows 8 j .. 8 j + 7) are handed on to row tile j + 1, which meets
the same distances one step later. So only the last of eight tiles has to be rearranged. A stream begins 64 keys before
its own, to fill the tiles; no sum depends on where streams begin, and nothing is added in an order left to chance.
Source: Jiang et al., MInference 1.0, 2024 (arXiv 2407.02490), algorithm 2.

Shapes: q [m, H, D], k [N, Hkv, D] with a contiguous last dimension, vertical and slash float32 [S, N], S = H or Hkv.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Most queries: the rows of one tile.
ROWS = 64


def last_query_ref(q: Tensor, k: Tensor, *, scale: float, q_offset: int, shared: bool) -> tuple[Tensor, Tensor]:
    """The same in plain torch, in float32 (float64 for float64 inputs)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    num_queries, num_heads, _ = q.shape
    num_kv = k.shape[1]
    group = num_heads // num_kv
    vertical = torch.zeros((num_kv if shared else num_heads, k.shape[0]), dtype=dtype, device=q.device)
    slash = torch.zeros_like(vertical)
    seen = torch.arange(k.shape[0], device=q.device)
    hidden = seen > q_offset + torch.arange(num_queries, device=q.device)[:, None]
    for g in range(num_kv):
        scores = torch.einsum("rhd,jd->hrj", q[:, g * group : (g + 1) * group].to(dtype), k[:, g].to(dtype)) * scale
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)  # [G, m, N]
        if shared:
            weights = weights.sum(0, keepdim=True)
        rows = slice(g, g + 1) if shared else slice(g * group, (g + 1) * group)
        vertical[rows] = weights.sum(1)
        for r in range(num_queries):
            seen_by = q_offset + r + 1
            slash[rows, :seen_by] += weights[:, r, :seen_by].flip(-1)
    return vertical, slash


@triton.jit
def last_query_lse_kernel(
    q,
    k,
    partial_lse,
    scale_log2,
    stride_n,
    stride_h,
    num_queries,
    num_keys,
    q_offset,
    num_splits,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Log-sum-exp of the 64 rows of HEADS heads over SPLIT keys."""
    i_tile = tl.program_id(0)
    i_split = tl.program_id(1)
    i_kv = tl.program_id(2)
    o_m = tl.arange(0, HEADS * 64)
    o_d = tl.arange(0, BLOCK_D)
    member = i_tile * HEADS + o_m // 64
    rows = o_m % 64
    heads = i_kv * GROUP + member
    m_d = o_d < HEAD_DIM
    m_m = (member < GROUP) & (rows < num_queries)
    # [HEADS * 64, BLOCK_D]
    p_q = q + (rows[:, None] * (tl.num_programs(2) * GROUP) + heads[:, None]) * HEAD_DIM + o_d[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None] & m_d[None, :], other=0.0)
    b_max = tl.full([HEADS * 64], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([HEADS * 64], dtype=tl.float32)
    p_k = k + i_kv * stride_h + o_d[None, :]
    low = i_split * SPLIT
    high = tl.minimum(low + SPLIT, num_keys)
    for start in range(low, high, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        m_k = (positions < num_keys)[:, None] & m_d[None, :]
        # [BLOCK_N, BLOCK_D]
        b_k = tl.load(p_k + positions.to(tl.int64)[:, None] * stride_n, mask=m_k, other=0.0)
        # [HEADS * 64, BLOCK_N]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee" if EXACT else "tf32")
        # Every row sees the keys up to q_offset.
        if start + BLOCK_N > q_offset:
            b_s = tl.where(positions[None, :] <= q_offset + rows[:, None], b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        # A row that has seen no key yet needs a finite number to subtract.
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new) * scale_log2
        b_p = tl.exp2(b_s * scale_log2 - b_base[:, None])
        b_sum = b_sum * tl.exp2(b_max * scale_log2 - b_base) + tl.sum(b_p, 1)
        b_max = b_new
    b_lse = (b_max * scale_log2 + tl.log2(tl.where(b_sum == 0.0, 1.0, b_sum))) * 0.6931471805599453
    tl.store(partial_lse + (heads * 64 + rows) * num_splits + i_split, b_lse, mask=member < GROUP)


@triton.jit
def last_query_sums_kernel(
    q,
    k,
    lse,
    vertical,
    slash,
    scale_log2,
    stride_n,
    stride_h,
    stride_out,
    num_queries,
    num_keys,
    q_offset,
    length,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    SUMS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Both sums of HEADS heads, apart or (SUMS = 1) together, over eight streams of `length` keys and their halo."""
    i_tile = tl.program_id(0)
    i_span = tl.program_id(1)
    i_kv = tl.program_id(2)
    o_m = tl.arange(0, HEADS * 64)
    o_d = tl.arange(0, BLOCK_D)
    member = i_tile * HEADS + o_m // 64
    rows = o_m % 64
    heads = i_kv * GROUP + member
    m_d = o_d < HEAD_DIM
    m_m = (member < GROUP) & (rows < num_queries)
    p_q = q + (rows[:, None] * (tl.num_programs(2) * GROUP) + heads[:, None]) * HEAD_DIM + o_d[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None] & m_d[None, :], other=0.0)
    # Rows that are not there get the weight 2^-inf.
    b_lse = tl.load(lse + heads * 64 + rows, mask=m_m, other=float("inf")) * 1.4426950408889634
    o_n = tl.arange(0, 64)
    first_key = (i_span * 8 + o_n // 8) * length + o_n % 8
    p_k = k + i_kv * stride_h + o_d[None, :]
    sums = i_kv * (tl.num_programs(0) * SUMS) + i_tile * SUMS + tl.arange(0, SUMS)
    p_vertical = vertical + sums.to(tl.int64)[None, :] * stride_out + first_key[:, None]
    o_diagonal = tl.arange(0, 8)[None, None, None, :]
    o_key = tl.arange(0, 8)[None, :, None, None]
    o_source = tl.broadcast_to((o_key - o_diagonal) & 7, [8, 8, SUMS, 8])
    # [8, SUMS, 8]; a step ends the diagonals that row 0 meets 64 keys earlier.
    distances = q_offset + 64 - tl.reshape(first_key, [8, 8])[:, None, :]
    p_slash = slash + sums.to(tl.int64)[None, :, None] * stride_out + distances

    b_0 = tl.zeros([64, SUMS, 8], dtype=tl.float32)
    b_1, b_2, b_3, b_4, b_5, b_6 = b_0, b_0, b_0, b_0, b_0, b_0
    b_before = tl.zeros([8, 8, SUMS, 8], dtype=tl.float32)
    for step in range(-64, length, 8):
        keys = first_key + step
        m_k = ((keys >= 0) & (keys < num_keys))[:, None] & m_d[None, :]
        # [64, BLOCK_D]
        b_k = tl.load(p_k + keys.to(tl.int64)[:, None] * stride_n, mask=m_k, other=0.0)
        # [64, HEADS * 64]
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee" if EXACT else "tf32")
        b_s = b_s * scale_log2 - b_lse[None, :]
        if (i_span == 0) | ((i_span + 1) * 8 * length > q_offset):
            b_s = tl.where((keys[:, None] >= 0) & (keys[:, None] <= q_offset + rows[None, :]), b_s, float("-inf"))
        b_p = tl.exp2(b_s)
        if SUMS < HEADS:
            b_p = tl.sum(tl.reshape(b_p, [64, HEADS, 64]), 1)
        b_vertical = tl.sum(tl.reshape(b_p, [64, SUMS, 64]), 2)
        # Eight tiles [64, SUMS, 8]: number j holds the rows 8 j .. 8 j + 7 of every head.
        b_e = tl.permute(tl.reshape(b_p, [64, SUMS, 2, 2, 2, 8]), [0, 1, 5, 4, 3, 2])
        b_0123, b_4567 = tl.split(b_e)
        b_01, b_23 = tl.split(b_0123)
        b_45, b_67 = tl.split(b_4567)
        p_0, p_1 = tl.split(b_01)
        p_2, p_3 = tl.split(b_23)
        p_4, p_5 = tl.split(b_45)
        p_6, p_7 = tl.split(b_67)
        # Row tile j meets now the distances that row tile j - 1 met one step ago.
        b_7 = b_6 + p_7
        b_6 = b_5 + p_6
        b_5 = b_4 + p_5
        b_4 = b_3 + p_4
        b_3 = b_2 + p_3
        b_2 = b_1 + p_2
        b_1 = b_0 + p_1
        b_0 = p_0
        # Key i and row r of an 8 x 8 square lie on diagonal (i - r) mod 8: of this step if i >= r, else of the last.
        b_diagonal = tl.gather(tl.reshape(b_7, [8, 8, SUMS, 8]), o_source, 3)
        b_slash = tl.sum(tl.where(o_key >= o_diagonal, b_before, b_diagonal), 1)
        b_before = b_diagonal
        if step >= 0:
            tl.store(p_vertical + step, b_vertical, mask=(keys < num_keys)[:, None])
            tl.store(p_slash - step, b_slash, mask=(distances >= step) & (distances - step < num_keys))


def last_query(
    q: Tensor, k: Tensor, *, scale: float, q_offset: int, shared: bool, split: int = 2048, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Launch both kernels: (vertical, slash), float32 [S, N]; S is Hkv if `shared`, else H. scale is positive.

    q_offset: the position of q[0]; q_offset + m is at most N, and later keys count nothing. split: keys per
    log-sum-exp, the same for every call whose results are compared; a multiple of 64. length: keys per stream, a
    multiple of 8, which changes no result; chosen to fill a GPU.
    """
    num_queries, num_heads, head_dim = q.shape
    num_keys = q_offset + num_queries
    num_kv = k.shape[1]
    group = num_heads // num_kv
    assert num_queries <= ROWS
    assert num_keys <= k.shape[0]
    assert k.stride(2) == 1
    block_d = max(16, triton.next_power_of_2(head_dim))
    exact = q.dtype == torch.float32
    # Tiles that fit in the shared memory and registers of every chip: two heads over the same keys, three stages.
    small = block_d <= 128 and not exact
    heads = 2 if group > 1 and small else 1
    num_tiles = triton.cdiv(group, heads)
    num_splits = triton.cdiv(num_keys, split)
    if length is None:
        length = 1024
        while length > 128 and num_keys * num_tiles * num_kv < 256 * 8 * length:
            length //= 2
    same = {
        "GROUP": group,
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "EXACT": exact,
        "num_warps": 4,
        "num_stages": 1 if exact else 3 if small else 2,
    }
    scale_log2 = scale * 1.4426950408889634
    partial_lse = torch.empty((num_heads, ROWS, num_splits), dtype=torch.float32, device=q.device)
    q = q.contiguous()
    last_query_lse_kernel[(num_tiles, num_splits, num_kv)](
        q,
        k,
        partial_lse,
        scale_log2,
        k.stride(0),
        k.stride(1),
        num_queries,
        num_keys,
        q_offset,
        num_splits,
        BLOCK_N=64,
        SPLIT=split,
        **same,
    )
    # Tiles of a group add up afterwards if the group shares its sums.
    sums = 1 if shared else heads
    both = torch.empty((2, num_kv, num_tiles * sums, k.shape[0]), dtype=torch.float32, device=q.device)
    both[..., num_keys:] = 0.0
    # Distance 0 is written at the place of key q_offset + 64.
    num_spans = triton.cdiv(q_offset + ROWS + 1, 8 * length)
    last_query_sums_kernel[(num_tiles, num_spans, num_kv)](
        q,
        k,
        torch.logsumexp(partial_lse, -1),
        both[0],
        both[1],
        scale_log2,
        k.stride(0),
        k.stride(1),
        both.stride(2),
        num_queries,
        num_keys,
        q_offset,
        length,
        SUMS=sums,
        **same,
    )
    if not shared:
        both = both[:, :, :group].flatten(1, 2)
    elif num_tiles == 1:
        both = both.squeeze(2)
    else:
        both = both.sum(2)
    return both[0], both[1]
