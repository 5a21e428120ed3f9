"""Which keys each run of queries looks at: the softmax of sampled rows, summed per key.

With A[r, j] = softmax_j(scale * q[r] . K[j]) over the keys j up to the position p(r) = q_offset + r of the row:

    sums[b, s, j] = sum of A[r, j] over the sampled rows r of run b (and the query heads of s) with p(r) - j >= window
    totals[b, s]  = the number of rows in that sum, so that totals - sums.sum(-1) is the mass of the keys nearer by

Run b holds the positions p with p // rows == q_offset // rows + b. Its samples are the rows with (p + 1) % step == 0
and its last row. Everything is float32 and no [rows, N] matrix is stored: the first kernel takes the log-sum-exp of
every sampled row over fixed ranges of keys, the second has the whole row's and writes every sum once. A program has the
samples of several heads of a kv group before it, so that they share the tiles of keys that go by; what is more than one
tile of rows is gone through for each tile of keys. Nothing is added in an order left to chance.
Estimating from some of the queries: Lai et al., FlexPrefill, 2025 (arXiv 2502.20766) samples the last ones, Xu et al.,
XAttention, 2025 (arXiv 2503.16428) strided ones.

Shapes: q [n, H, D], k [N, Hkv, D], both with a contiguous last dimension; sums float32 [B, S, N] and totals [B, S],
S = H or (where a kv group's heads share their sums) Hkv.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Keys per log-sum-exp: cut elsewhere, sums would round differently. Most keys per program of the sums, fewer where that
# fills a GPU: it changes nothing. Both are multiples of 128.
SPLIT, LONGEST_SPAN = 2048, 2048
# Most numbers of the reference's softmax at a time.
WORKSPACE = 1 << 25
# Bytes per program from which the large tiles fit: sm_80, 90 and 100 have them.
LARGE_SHARED_MEMORY = 160 * 1024


def key_mass_ref(
    q: Tensor, k: Tensor, *, scale: float, q_offset: int, rows: int, step: int, window: int, shared: bool
) -> tuple[Tensor, Tensor]:
    """The same in plain torch, in float32 (float64 for float64 inputs)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    num_heads, num_kv = q.shape[1], k.shape[1]
    group = num_heads // num_kv
    stop = q_offset + q.shape[0]
    num_runs = num_runs_of(q.shape[0], q_offset, rows)
    sums = torch.zeros((num_runs, num_kv if shared else num_heads, k.shape[0]), dtype=dtype, device=q.device)
    for g in range(num_kv):
        keys = k[:stop, g].to(dtype)
        own = slice(g, g + 1) if shared else slice(g * group, (g + 1) * group)
        for b in range(num_runs):
            low, high = max(q_offset, (q_offset // rows + b) * rows), min(stop, (q_offset // rows + b + 1) * rows)
            ends = range((low // step + 1) * step, high + step, step)
            at_once = max(1, WORKSPACE // (group * high))
            for start in range(0, len(ends), at_once):
                sampled = [min(end, high) - 1 for end in ends[start : start + at_once]]
                first, last = sampled[0], sampled[-1]
                places = torch.tensor(sampled, device=q.device)
                heads = q[places - q_offset, g * group : (g + 1) * group].to(dtype).transpose(0, 1) * scale
                weights = (heads.flatten(0, 1) @ keys[: last + 1].T).unflatten(0, (group, -1))  # [G, m, seen]
                # Every row sees the keys up to the first one's position.
                later = torch.arange(first + 1, last + 1, device=q.device) > places[:, None]
                weights[..., first + 1 :].masked_fill_(later, float("-inf"))
                weights.sub_(weights.amax(-1, keepdim=True)).exp_()
                inverse = weights.sum(-1).reciprocal_()
                outside = max(0, last + 1 - window)
                fully = max(0, min(first + 1 - window, outside))
                near = torch.arange(fully, outside, device=q.device) > places[:, None] - window
                weights[..., fully:outside].masked_fill_(near, 0.0)
                if shared:
                    inverse, weights = inverse.reshape(1, -1), weights.reshape(1, -1, last + 1)
                sums[b, own, :outside] += torch.bmm(inverse[:, None], weights[..., :outside]).squeeze(1)
    return sums, _totals(q, sums.shape[:2], q_offset, rows, step, group if shared else 1).to(dtype)


@triton.jit
def _span_of_run(i_run, num_queries, q_offset, ROWS: tl.constexpr):
    """The positions of a run that are among the queries: from, and up to."""
    run = q_offset // ROWS + i_run
    return tl.maximum(q_offset, run * ROWS), tl.minimum(q_offset + num_queries, (run + 1) * ROWS)


@triton.jit
def _tile_of_rows(
    q,
    stride_n,
    stride_h,
    num_runs,
    num_queries,
    q_offset,
    i_run,
    i_tile,
    i_kv,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    SAMPLES: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Tile number i_tile of a run, PER_HEAD samples of HEADS heads: queries [M, BLOCK_D], and by row the position, the
    place of its log-sum-exp, and whether it is there."""
    TILES_PER_HEAD: tl.constexpr = SAMPLES // PER_HEAD
    low, high = _span_of_run(i_run, num_queries, q_offset, ROWS)
    o_m = tl.arange(0, HEADS * PER_HEAD)
    o_d = tl.arange(0, BLOCK_D)
    member = i_tile // TILES_PER_HEAD * HEADS + o_m // PER_HEAD
    samples = i_tile % TILES_PER_HEAD * PER_HEAD + o_m % PER_HEAD
    heads = (i_kv * GROUP + member).to(tl.int64)
    positions = tl.minimum((low // STEP + 1 + samples) * STEP, high) - 1
    m_m = (member < GROUP) & (samples < (high + STEP - 1) // STEP - low // STEP)
    p_q = q + (positions - q_offset).to(tl.int64)[:, None] * stride_n + heads[:, None] * stride_h + o_d[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0)
    return b_q, positions, (heads * num_runs + i_run) * SAMPLES + samples, m_m


# These differ from call to call: compiling for their divisibility would only compile again and again.
VARYING = ["num_runs", "num_queries", "num_keys", "q_offset", "num_splits", "span"]


@triton.jit(do_not_specialize=VARYING)
def key_mass_lse_kernel(
    q,
    k,
    partial_lse,
    scale_log2,
    stride_qn,
    stride_qh,
    stride_kn,
    stride_kh,
    num_runs,
    num_queries,
    q_offset,
    num_splits,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    SAMPLES: tl.constexpr,
    HEADS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Log-sum-exp of a tile of rows over SPLIT keys; -inf where a row sees none of them."""
    TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS * (SAMPLES // PER_HEAD)
    i_run = tl.program_id(0) // TILES
    i_split = tl.program_id(1)
    i_kv = tl.program_id(2)
    b_q, positions, rows, m_m = _tile_of_rows(
        q,
        stride_qn,
        stride_qh,
        num_runs,
        num_queries,
        q_offset,
        i_run,
        tl.program_id(0) % TILES,
        i_kv,
        ROWS=ROWS,
        STEP=STEP,
        SAMPLES=SAMPLES,
        GROUP=GROUP,
        HEADS=HEADS,
        PER_HEAD=PER_HEAD,
        HEAD_DIM=HEAD_DIM,
        BLOCK_D=BLOCK_D,
    )
    b_max = tl.full([HEADS * PER_HEAD], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([HEADS * PER_HEAD], dtype=tl.float32)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    p_k = k + i_kv.to(tl.int64) * stride_kh + o_d[None, :]
    first = tl.min(positions, 0)
    stop = tl.minimum((i_split + 1) * SPLIT, tl.max(positions, 0) + 1)
    for start in range(i_split * SPLIT, stop, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        # [BLOCK_N, BLOCK_D]
        m_k = (keys < stop)[:, None] & m_d[None, :]
        b_k = tl.load(p_k + keys.to(tl.int64)[:, None] * stride_kn, mask=m_k, other=0.0)
        # [M, BLOCK_N]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee" if EXACT else "tf32")
        # Every row sees the keys up to the first one's position.
        if start + BLOCK_N > first + 1:
            b_s = tl.where(keys[None, :] <= positions[:, None], b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        # A row that has seen no key yet needs a finite number to subtract.
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new) * scale_log2
        b_p = tl.exp2(b_s * scale_log2 - b_base[:, None])
        b_sum = b_sum * tl.exp2(b_max * scale_log2 - b_base) + tl.sum(b_p, 1)
        b_max = b_new
    b_lse = (b_max * scale_log2 + tl.log2(tl.where(b_sum == 0.0, 1.0, b_sum))) * 0.6931471805599453
    tl.store(partial_lse + rows * num_splits + i_split, b_lse, mask=m_m)


@triton.jit
def _mass(b_q, positions, b_lse, b_k, start, window, scale_log2, BLOCK_N: tl.constexpr, EXACT: tl.constexpr):
    """The softmax of a tile of rows at a tile of keys, [BLOCK_N, M]; 0 for keys near to the row."""
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee" if EXACT else "tf32")
    # Rows that are not there get the weight 2^-inf.
    b_s = b_s * scale_log2 - (b_lse * 1.4426950408889634)[None, :]
    if tl.min(positions, 0) - start - (BLOCK_N - 1) < window:
        keys = start + tl.arange(0, BLOCK_N)
        b_s = tl.where(positions[None, :] - keys[:, None] >= window, b_s, float("-inf"))
    return tl.exp2(b_s)


@triton.jit(do_not_specialize=VARYING)
def key_mass_sums_kernel(
    q,
    k,
    lse,
    sums,
    scale_log2,
    stride_qn,
    stride_qh,
    stride_kn,
    stride_kh,
    num_runs,
    num_queries,
    num_keys,
    q_offset,
    window,
    span,
    ROWS: tl.constexpr,
    SHARED: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    SAMPLES: tl.constexpr,
    HEADS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Sums of a run over `span` keys, of all heads of a group together (SHARED) or of HEADS heads apart."""
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    # Programs of a run, the tiles of rows of each, and the sums that it makes.
    PROGRAMS: tl.constexpr = 1 if SHARED else HEAD_TILES
    TILES: tl.constexpr = (HEAD_TILES if SHARED else 1) * (SAMPLES // PER_HEAD)
    SUMS: tl.constexpr = 1 if SHARED else HEADS
    M: tl.constexpr = HEADS * PER_HEAD
    i_run = tl.program_id(0) // PROGRAMS
    i_program = tl.program_id(0) % PROGRAMS
    i_kv = tl.program_id(2)
    _, high = _span_of_run(i_run, num_queries, q_offset, ROWS)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    p_k = k + i_kv.to(tl.int64) * stride_kh + o_d[None, :]
    members = i_program * SUMS + tl.arange(0, SUMS)
    PER_KV: tl.constexpr = 1 if SHARED else GROUP
    lines = i_run.to(tl.int64) * (tl.num_programs(2) * PER_KV) + i_kv * PER_KV + members
    # [BLOCK_N, SUMS]
    p_sums = sums + lines[None, :] * num_keys + o_n[:, None]
    m_sums = (members < PER_KV)[None, :]
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, num_keys)
    # Beyond, every key is near to the run's last row or comes after it.
    stop = tl.minimum(end, tl.cdiv(tl.maximum(high - window, 0), BLOCK_N) * BLOCK_N)
    if TILES == 1:
        b_q, positions, rows, m_m = _tile_of_rows(
            q,
            stride_qn,
            stride_qh,
            num_runs,
            num_queries,
            q_offset,
            i_run,
            i_program,
            i_kv,
            ROWS=ROWS,
            STEP=STEP,
            SAMPLES=SAMPLES,
            GROUP=GROUP,
            HEADS=HEADS,
            PER_HEAD=PER_HEAD,
            HEAD_DIM=HEAD_DIM,
            BLOCK_D=BLOCK_D,
        )
        b_lse = tl.load(lse + rows, mask=m_m, other=float("inf"))
    for start in range(begin, stop, BLOCK_N):
        keys = start + o_n
        # [BLOCK_N, BLOCK_D]
        m_k = (keys < num_keys)[:, None] & m_d[None, :]
        b_k = tl.load(p_k + keys.to(tl.int64)[:, None] * stride_kn, mask=m_k, other=0.0)
        if TILES == 1:
            b_p = _mass(b_q, positions, b_lse, b_k, start, window, scale_log2, BLOCK_N=BLOCK_N, EXACT=EXACT)
        else:
            b_p = tl.zeros([BLOCK_N, M], dtype=tl.float32)
            for i_tile in range(TILES):
                b_q, positions, rows, m_m = _tile_of_rows(
                    q,
                    stride_qn,
                    stride_qh,
                    num_runs,
                    num_queries,
                    q_offset,
                    i_run,
                    i_program * TILES + i_tile,
                    i_kv,
                    ROWS=ROWS,
                    STEP=STEP,
                    SAMPLES=SAMPLES,
                    GROUP=GROUP,
                    HEADS=HEADS,
                    PER_HEAD=PER_HEAD,
                    HEAD_DIM=HEAD_DIM,
                    BLOCK_D=BLOCK_D,
                )
                b_lse = tl.load(lse + rows, mask=m_m, other=float("inf"))
                b_p += _mass(b_q, positions, b_lse, b_k, start, window, scale_log2, BLOCK_N=BLOCK_N, EXACT=EXACT)
        b_sums = tl.sum(tl.reshape(b_p, [BLOCK_N, SUMS, M // SUMS]), 2)
        tl.store(p_sums + start, b_sums, mask=m_sums & (keys < num_keys)[:, None])
    for start in range(tl.maximum(begin, stop), end, BLOCK_N):
        zeros = tl.zeros([BLOCK_N, SUMS], dtype=tl.float32)
        tl.store(p_sums + start, zeros, mask=m_sums & (start + o_n < num_keys)[:, None])


def key_mass(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    q_offset: int,
    rows: int,
    step: int,
    window: int,
    shared: bool,
) -> tuple[Tensor, Tensor]:
    """Launch both kernels: (sums, totals). scale is positive, rows and step are powers of two. q_offset: the position
    of q[0]; q_offset + n is at most N, and later keys count nothing."""
    num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv, _ = k.shape
    group = num_heads // num_kv
    assert q_offset + num_queries <= num_keys
    assert q.stride(2) == k.stride(2) == 1
    assert rows & (rows - 1) == step & (step - 1) == 0
    num_runs = num_runs_of(num_queries, q_offset, rows)
    samples = max(1, rows // step)
    most_rows, options = _tile(q)
    # Whole heads as long as they fit; and no fewer rows than a product takes.
    per_head = min(samples, most_rows)
    heads = max(16 // per_head, min(triton.next_power_of_2(group), most_rows // per_head))
    head_tiles = triton.cdiv(group, heads)
    num_splits = triton.cdiv(q_offset + num_queries, SPLIT)
    num_programs = num_runs * (1 if shared else head_tiles)
    span = LONGEST_SPAN
    while span > 256 and num_programs * num_kv * num_keys < 512 * span:
        span //= 2
    same = {
        "ROWS": rows,
        "GROUP": group,
        "STEP": step,
        "SAMPLES": samples,
        "HEADS": heads,
        "PER_HEAD": per_head,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "EXACT": q.dtype == torch.float32,
        **options,
    }
    scale_log2 = scale * 1.4426950408889634
    strides = *q.stride()[:2], *k.stride()[:2]
    partial_lse = torch.empty((num_heads, num_runs, samples, num_splits), dtype=torch.float32, device=q.device)
    key_mass_lse_kernel[(num_runs * head_tiles * (samples // per_head), num_splits, num_kv)](
        q, k, partial_lse, scale_log2, *strides, num_runs, num_queries, q_offset, num_splits, SPLIT=SPLIT, **same
    )
    sums = torch.empty((num_runs, num_kv if shared else num_heads, num_keys), dtype=torch.float32, device=q.device)
    key_mass_sums_kernel[(num_programs, triton.cdiv(num_keys, span), num_kv)](
        q,
        k,
        torch.logsumexp(partial_lse, -1),
        sums,
        scale_log2,
        *strides,
        num_runs,
        num_queries,
        num_keys,
        q_offset,
        window,
        span,
        SHARED=shared,
        **same,
    )
    return sums, _totals(q, sums.shape[:2], q_offset, rows, step, group if shared else 1)


def num_runs_of(num_queries: int, q_offset: int, rows: int) -> int:
    """How many runs have a row among the queries."""
    return (q_offset + num_queries - 1) // rows - q_offset // rows + 1


def _totals(q: Tensor, shape: torch.Size, q_offset: int, rows: int, step: int, heads: int) -> Tensor:
    """How many rows a sum adds up, float32 [B, S], made on the device."""
    start = (torch.arange(shape[0], device=q.device) + q_offset // rows) * rows
    stop = (start + rows).clamp_(max=q_offset + q.shape[0])
    counts = (stop + step - 1) // step - start.clamp_(min=q_offset) // step
    return (counts * heads).float()[:, None].repeat(1, shape[1])


def _tile(q: Tensor) -> tuple[int, dict[str, int]]:
    """Most rows of a tile, and the launch options: as large as the chip's shared memory and registers allow."""
    if q.dtype == torch.float32:
        return 32, {"BLOCK_N": 32, "num_warps": 4, "num_stages": 1}
    if q.shape[2] <= 128:
        # Several small programs side by side: one takes exponentials while another multiplies.
        return 128, {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    properties = triton.runtime.driver.active.utils.get_device_properties(q.device.index) if q.is_cuda else {}
    if properties.get("max_shared_mem", 0) >= LARGE_SHARED_MEMORY:
        return 128, {"BLOCK_N": 128, "num_warps": 8, "num_stages": 2}
    return 128, {"BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
