"""The next token of each row from its logits: the likeliest, or one drawn by temperature, top-k, top-p and min-p.

Probabilities are whole numbers, so that sums depend neither on their order nor on the device: with x the row's logits,

    w_i = 2^38 * 2^(-n_i / 2^24), rounded down,  n_i = trunc(2^24 * min(39, (max(x) - x_i) * slope))
    slope = log2(e) / temperature in float32; the power by a polynomial in integers, to 1.2e-8

The order is that of the weights, ties to the lower token. Each filter keeps a beginning of that order: top-k the first
k; top-p those before which less than top_p of what top-k left has been summed up; min-p those of at least min_p times
the largest weight. A token that has weight 0 is never kept, and the first always is. The draw goes through what is kept
in the order of the vocabulary: the first token whose running sum exceeds trunc(u * sum). All devices choose the same.

A row whose logits have a NaN, or whose largest is not finite, has no token.

The kernels: one lists the tokens that the filters may keep, from the sums above eight limits; the other finds what they
keep by a search over the bits of the weights, three at a time. One program per row each, and nothing is sorted.
Source of the hash: Steele et al., Fast splittable pseudorandom number generators, 2014.

Shapes: logits float32 [B, V]; slopes (0: take the likeliest), top_p, min_p float32 [B]; top_k (0: none) int64 [B];
points float64 [B], in [0, 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    # Where there is no Triton, the references are all that runs.
    triton = None

# 2^(-f) = sum of COEFFICIENTS[k] * f^k / 2^32 for 0 <= f < 1, by least squares at Chebyshev's nodes; 1 at f = 0.
COEFFICIENTS = (4294967296, -2977044448, 1031763232, -238367582, 41219527, -5548193, 493839)
WEIGHT_BITS = 38
# Numbers that the reference sorts at once, and those that a launch lists.
_SORTED = 1 << 22
_LISTED = 1 << 25
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def uniform_ref(seeds: Tensor, steps: Tensor) -> Tensor:
    """Numbers in [0, 1), float64 [B], from a hash of (seed, step), both int64 [B]."""

    def signed(number: int) -> int:
        return number - (1 << 64) if number >> 63 else number

    z = seeds + (steps + 1) * signed(_GOLDEN)
    # Shifts of unsigned numbers.
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * signed(_FIRST)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * signed(_SECOND)
    z = z ^ ((z >> 31) & ((1 << 33) - 1))
    return ((z >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def weights_ref(logits: Tensor, slopes: Tensor) -> Tensor:
    """w of each token: int64 [B, V]."""
    distance = (logits.amax(1, keepdim=True) - logits) * slopes[:, None]
    n = (distance * 2.0**24).clamp_(max=39.0 * 2**24).long()
    fraction = n & ((1 << 24) - 1)
    power = torch.full_like(n, COEFFICIENTS[-1])
    for coefficient in COEFFICIENTS[-2::-1]:
        power.mul_(fraction).bitwise_right_shift_(24).add_(coefficient)
    return (power << (WEIGHT_BITS - 32)) >> (n >> 24)


def sample_ref(
    logits: Tensor, slopes: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, points: Tensor, *, warm: bool = True
) -> tuple[Tensor, Tensor]:
    """tokens int64 [B], 0 where a row has none, and found int64 [B]: -1 there. warm: False where all slopes are 0."""
    tokens = logits.argmax(1)
    usable = logits.gather(1, tokens[:, None])[:, 0].isfinite()
    tokens = torch.where(usable, tokens, 0)
    drawn = torch.where(usable & (slopes > 0))[0] if warm else tokens[:0]
    for rows in drawn.split(max(1, _SORTED // logits.shape[1])):
        tokens[rows] = _drawn_ref(*(x[rows] for x in (logits, slopes, top_k, top_p, min_p, points)))
    return tokens, torch.where(usable, tokens, -1)


def _drawn_ref(logits: Tensor, slopes: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, points: Tensor) -> Tensor:
    weights = weights_ref(logits, slopes)
    ordered, order = weights.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(weights.shape[1], device=weights.device)
    kept = ((rank < top_k[:, None]) | (top_k == 0)[:, None]) & (ordered > 0)
    sums = (ordered * kept).cumsum(1)
    goals = torch.where(top_p < 1, (sums[:, -1].double() * top_p.double()).ceil().long().clamp(min=1), sums[:, -1])
    kept &= sums - ordered < goals[:, None]
    kept &= ordered >= (min_p.double() * 2.0**WEIGHT_BITS).ceil().long()[:, None]
    sums = (weights * torch.zeros_like(kept).scatter_(1, order, kept)).cumsum(1)
    total = sums[:, -1]
    point = torch.minimum((points * total.double()).long(), total - 1)
    return (sums <= point[:, None]).sum(1)


def sample(
    logits: Tensor, slopes: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, points: Tensor, *, warm: bool = True
) -> tuple[Tensor, Tensor]:
    """`sample_ref`, on a GPU by kernels."""
    choose = sample_by_kernel if logits.device.type == "cuda" else sample_ref
    return choose(logits, slopes, top_k, top_p, min_p, points, warm=warm)


def uniform(seeds: Tensor, steps: Tensor) -> Tensor:
    """`uniform_ref`, on a GPU by a kernel."""
    return uniform_by_kernel(seeds, steps) if seeds.device.type == "cuda" else uniform_ref(seeds, steps)


def uniform_by_kernel(seeds: Tensor, steps: Tensor) -> Tensor:
    """The kernel: the same numbers."""
    points = torch.empty(seeds.shape, dtype=torch.float64, device=seeds.device)
    uniform_kernel[(triton.cdiv(len(seeds), 128),)](seeds, steps, points, len(seeds), BLOCK=128, num_warps=4)
    return points


def sample_by_kernel(
    logits: Tensor,
    slopes: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    points: Tensor,
    *,
    warm: bool = True,
    block: int = 4096,
    draw_block: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Launch both kernels, the second where a row may be drawn, over as many rows at a time as their lists may take.
    logits: rows contiguous."""
    num_rows, size = logits.shape
    assert logits.stride(1) == 1
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    found = torch.empty_like(tokens)
    some = min(num_rows, max(1, _LISTED // size)) if warm else num_rows
    listed = torch.empty((some, size) if warm else (1, 1), dtype=torch.int32, device=logits.device)
    counts = torch.empty(some, dtype=torch.int32, device=logits.device)
    totals = torch.empty(some, dtype=torch.int64, device=logits.device)
    for first in range(0, num_rows, some):
        part = slice(first, first + some)
        rows = len(tokens[part])
        filters = (slopes[part], top_k[part], top_p[part], min_p[part])
        lists, chosen = (listed, counts, totals), (tokens[part], found[part])
        candidates_kernel[(rows,)](
            logits[part],
            *filters,
            *lists,
            *chosen,
            size,
            logits.stride(0),
            WARM=warm,
            BLOCK=min(block, triton.next_power_of_2(size)),
            # Eight sums of each number fit in registers.
            SUM_BLOCK=min(block, 1024, triton.next_power_of_2(size)),
            num_warps=16,
        )
        if warm:
            draw_kernel[(rows,)](
                logits[part],
                *filters,
                points[part],
                *lists,
                *chosen,
                size,
                logits.stride(0),
                BLOCK=min(draw_block, triton.next_power_of_2(size)),
                num_warps=8,
            )
    return tokens, found


if triton is not None:

    @triton.jit
    def uniform_kernel(seeds, steps, points, size, BLOCK: tl.constexpr):
        o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = o < size
        z = tl.load(seeds + o, mask=mask, other=0).to(tl.uint64)
        z += (tl.load(steps + o, mask=mask, other=0) + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        z = z ^ (z >> 31)
        tl.store(points + o, (z >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16, mask=mask)

    @triton.jit
    def _weights(b_x, peak, slope):
        """w of logits, int64; 0 for -inf."""
        n = tl.minimum((peak - b_x) * slope * 16777216.0, 654311424.0).to(tl.int64)
        f = n & 0xFFFFFF
        power = -5548193 + ((493839 * f) >> 24)
        power = 41219527 + ((power * f) >> 24)
        power = -238367582 + ((power * f) >> 24)
        power = 1031763232 + ((power * f) >> 24)
        power = -2977044448 + ((power * f) >> 24)
        power = 4294967296 + ((power * f) >> 24)
        return (power << 6) >> (n >> 24)

    @triton.jit
    def _goal(share, total):
        """The least whole number that is not below share * total, and 1 at least."""
        product = total.to(tl.float64) * share.to(tl.float64)
        goal = product.to(tl.int64)
        return tl.maximum(goal + (goal.to(tl.float64) < product).to(tl.int64), 1)

    @triton.jit
    def candidates_kernel(
        logits,
        slopes,
        top_k,
        top_p,
        min_p,
        listed,
        counts,
        totals,
        tokens,
        found,
        size,
        stride,
        WARM: tl.constexpr,
        BLOCK: tl.constexpr,
        SUM_BLOCK: tl.constexpr,
    ):
        """The likeliest token; of rows that draw, also every token that may be kept, in order, how many, and the sum of
        all weights."""
        i_b = tl.program_id(0)
        p_x = logits + i_b.to(tl.int64) * stride
        o_n = tl.arange(0, BLOCK)
        b_peak = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        b_place = tl.zeros([BLOCK], dtype=tl.int32)
        b_odd = tl.zeros([BLOCK], dtype=tl.int32)
        for start in range(0, size, BLOCK):
            b_x = tl.load(p_x + start + o_n, mask=start + o_n < size, other=float("-inf"))
            better = b_x > b_peak
            b_peak = tl.where(better, b_x, b_peak)
            b_place = tl.where(better, start + o_n, b_place)
            b_odd = b_odd | (b_x != b_x).to(tl.int32)
        peak = tl.max(b_peak, 0)
        place = tl.min(tl.where(b_peak == peak, b_place, size), 0)
        usable = (tl.max(b_odd, 0) == 0) & (tl.abs(peak) < float("inf"))
        tl.store(tokens + i_b, tl.where(usable, place, 0).to(tl.int64))
        tl.store(found + i_b, tl.where(usable, place, -1).to(tl.int64))
        if WARM:
            slope = tl.load(slopes + i_b)
            count = 0
            if usable & (slope > 0.0):
                # 2^-1, 2^-2, 2^-4, 2^-7 ... 2^-22 of the largest weight, and all that have one.
                o_c = tl.arange(0, 8).to(tl.int64)
                drops = tl.where(o_c < 7, 1 + o_c * (o_c + 1) // 2, 38)
                limits = (tl.zeros([8], dtype=tl.int64) + 1) << (38 - drops)
                o_s = tl.arange(0, SUM_BLOCK)
                b_sums = tl.zeros([8, SUM_BLOCK], dtype=tl.int64)
                b_counts = tl.zeros([8, SUM_BLOCK], dtype=tl.int32)
                for start in range(0, size, SUM_BLOCK):
                    b_x = tl.load(p_x + start + o_s, mask=start + o_s < size, other=float("-inf"))
                    b_w = _weights(b_x, peak, slope)
                    above = b_w[None, :] >= limits[:, None]
                    b_sums += tl.where(above, b_w[None, :], 0)
                    b_counts += above.to(tl.int32)
                sums = tl.sum(b_sums, 1)
                total = tl.max(sums, 0)
                k = tl.load(top_k + i_b)
                share = tl.load(top_p + i_b)
                least = _goal(tl.load(min_p + i_b), tl.full([], 1 << 38, tl.int64))
                # One filter tells how far down to go; the others keep no token beyond.
                enough = limits <= least
                if k > 0:
                    enough = tl.sum(b_counts, 1) >= k
                elif share < 1.0:
                    enough = sums >= _goal(share, total)
                limit = tl.max(tl.where(enough, limits, 1), 0)
                p_list = listed + i_b.to(tl.int64) * size
                for start in range(0, size, BLOCK):
                    b_x = tl.load(p_x + start + o_n, mask=start + o_n < size, other=float("-inf"))
                    kept = (_weights(b_x, peak, slope) >= limit).to(tl.int32)
                    tl.store(p_list + count + tl.cumsum(kept, 0) - 1, start + o_n, mask=kept > 0)
                    count += tl.sum(kept, 0)
                tl.store(totals + i_b, total)
            tl.store(counts + i_b, count)

    @triton.jit
    def _listed_weights(p_x, p_list, o, count, peak, slope):
        """w of the tokens at places `o` of a list; 0 past its end."""
        token = tl.load(p_list + o, mask=o < count, other=0)
        return _weights(tl.load(p_x + token, mask=o < count, other=float("-inf")), peak, slope)

    @triton.jit
    def _threshold(p_x, p_list, count, peak, slope, goal, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
        """The largest t for which the weights of at least t number, or sum up to, `goal`; 0 where none do."""
        o_n = tl.arange(0, BLOCK)
        o_c = tl.arange(0, 8).to(tl.int64)
        t = tl.full([], 0, tl.int64)
        # 39 bits, three at a time.
        for i in range(13):
            shift = 36 - 3 * i
            limits = t + (o_c << shift)
            b_sums = tl.zeros([8, BLOCK], dtype=tl.int64)
            for start in range(0, count, BLOCK):
                b_w = _listed_weights(p_x, p_list, start + o_n, count, peak, slope)
                above = b_w[None, :] >= limits[:, None]
                if COUNTS:
                    b_sums += (above & (b_w > 0)[None, :]).to(tl.int64)
                else:
                    b_sums += tl.where(above, b_w[None, :], 0)
            reached = (tl.sum(b_sums, 1) >= goal) & (o_c > 0)
            t += tl.sum(reached.to(tl.int64), 0) << shift
        return t

    @triton.jit
    def _beyond(p_x, p_list, count, peak, slope, t, BLOCK: tl.constexpr):
        """Of the weights above t, how many there are and their sum; and how many are t. All int64."""
        o_n = tl.arange(0, BLOCK)
        b_sum = tl.zeros([BLOCK], dtype=tl.int64)
        b_above = tl.zeros([BLOCK], dtype=tl.int64)
        b_equal = tl.zeros([BLOCK], dtype=tl.int64)
        for start in range(0, count, BLOCK):
            b_w = _listed_weights(p_x, p_list, start + o_n, count, peak, slope)
            b_sum += tl.where(b_w > t, b_w, 0)
            b_above += (b_w > t).to(tl.int64)
            b_equal += (b_w == t).to(tl.int64)
        return tl.sum(b_above, 0), tl.sum(b_sum, 0), tl.sum(b_equal, 0)

    @triton.jit
    def draw_kernel(
        logits,
        slopes,
        top_k,
        top_p,
        min_p,
        points,
        listed,
        counts,
        totals,
        tokens,
        found,
        size,
        stride,
        BLOCK: tl.constexpr,
    ):
        """What is kept are the tokens of weights above t, and of those that weigh t the first `ties`."""
        i_b = tl.program_id(0)
        count = tl.load(counts + i_b)
        if count == 0:
            return
        p_x = logits + i_b.to(tl.int64) * stride
        p_list = listed + i_b.to(tl.int64) * size
        peak = tl.load(p_x + tl.load(tokens + i_b))
        slope = tl.load(slopes + i_b)
        k = tl.load(top_k + i_b).to(tl.int64)
        share = tl.load(top_p + i_b)
        total = tl.load(totals + i_b)
        t = tl.full([], 1, tl.int64)
        above, weight, ties = _beyond(p_x, p_list, count, peak, slope, t, BLOCK)
        if k > 0:
            t = tl.maximum(_threshold(p_x, p_list, count, peak, slope, k, True, BLOCK), 1)
            above, weight, ties = _beyond(p_x, p_list, count, peak, slope, t, BLOCK)
            ties = tl.minimum(ties, k - above)
            total = weight + ties * t
        if share < 1.0:
            goal = _goal(share, total)
            t = _threshold(p_x, p_list, count, peak, slope, goal, False, BLOCK)
            above, weight, ties = _beyond(p_x, p_list, count, peak, slope, t, BLOCK)
            ties = (goal - weight + t - 1) // t
        least = _goal(tl.load(min_p + i_b), tl.full([], 1 << 38, tl.int64))
        if least > t:
            t = least
            above, weight, ties = _beyond(p_x, p_list, count, peak, slope, t, BLOCK)
        total = weight + ties * t
        point = tl.minimum((tl.load(points + i_b) * total.to(tl.float64)).to(tl.int64), total - 1)
        o_n = tl.arange(0, BLOCK)
        passed = tl.full([], 0, tl.int64)
        equal = tl.full([], 0, tl.int64)
        picked = 0
        for start in range(0, count, BLOCK):
            b_w = _listed_weights(p_x, p_list, start + o_n, count, peak, slope)
            b_equal = (b_w == t).to(tl.int64)
            kept = (b_w > t) | ((b_w == t) & (equal + tl.cumsum(b_equal, 0) <= ties))
            b_w = tl.where(kept, b_w, 0)
            # Tokens whose running sum does not exceed the point come before the one that is drawn.
            before = (passed + tl.cumsum(b_w, 0) <= point) & (start + o_n < count)
            picked += tl.sum(before.to(tl.int32), 0)
            passed += tl.sum(b_w, 0)
            equal += tl.sum(b_equal, 0)
        token = tl.load(p_list + picked).to(tl.int64)
        tl.store(tokens + i_b, token)
        tl.store(found + i_b, token)
