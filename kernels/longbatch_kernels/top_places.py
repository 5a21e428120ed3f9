"""The places of each row's largest numbers, in ascending order, and the ranges that such places merge to.

    top_places: the `budget` largest of scores [S, N], the first `forced` places before all others, ties to the lower
    place, ascending.
    joined: places at most `gap` apart become one range [a, c].

By radix selection: scores are not negative, so their bits order them. Three passes find the bits of the smallest
score that is kept (11, 11 and 10 bits, by a histogram each), one more counts what every chunk keeps, and the last
writes it. Counts are whole numbers, so nothing depends on the order of the programs, and nothing waits for the host.
Alabi et al., Fast k-selection algorithms for graphics processing units, 2012.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NOWHERE = 2**31 - 1
BLOCK = 4096
MOST_CHUNKS = 64


def top_places_ref(scores: Tensor, budgets: Tensor, forced: Tensor, most: int) -> Tensor:
    """int32 [S, most], padded with NOWHERE, in plain torch."""
    place = torch.arange(scores.shape[1], device=scores.device)
    scores = torch.where(place < forced[:, None], torch.inf, scores)
    found = scores.sort(dim=1, descending=True, stable=True).indices[:, :most].int()
    found.masked_fill_(torch.arange(found.shape[1], device=scores.device) >= budgets[:, None], NOWHERE)
    return torch.nn.functional.pad(found.sort(dim=1).values, (0, most - found.shape[1]), value=NOWHERE)


def joined_ref(places: Tensor, width: int, gap: int) -> tuple[Tensor, Tensor, Tensor]:
    """(starts, stops) int32 [S, width] and counts int32 [S], in plain torch; places not in use hold 1 and 0."""
    starts = torch.ones(places.shape[0], width, dtype=torch.int32, device=places.device)
    stops, counts = torch.zeros_like(starts), torch.zeros_like(starts[:, 0])
    for row, own in enumerate(places):
        own = own[own != NOWHERE]
        cut = torch.where(own.diff() > gap)[0]
        first, last = torch.cat([own[:1], own[cut + 1]]), torch.cat([own[cut], own[-1:]])
        starts[row, : len(first)], stops[row, : len(last)], counts[row] = first, last, len(first)
    return starts, stops, counts


def most_ranges(size: int, gap: int) -> int:
    """More ranges than this do not fit among `size` places, when they are more than `gap` apart."""
    return (size - 1) // (gap + 1) + 1


@triton.jit
def histogram_kernel(
    scores, forced, state, counts, size, chunk, KNOWN: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """How often each value of bits SHIFT..KNOWN-1 occurs in a chunk, among keys that agree with what is known."""
    i_s = tl.program_id(0).to(tl.int64)
    i_c = tl.program_id(1)
    BINS: tl.constexpr = 1 << (KNOWN - SHIFT)
    begin = tl.load(forced + i_s)
    prefix = tl.load(state + i_s * 2).to(tl.uint32, bitcast=True)
    histogram = tl.zeros([BINS], tl.int32)
    for b0 in range(i_c * chunk, tl.minimum((i_c + 1) * chunk, size), BLOCK):
        o = b0 + tl.arange(0, BLOCK)
        key = tl.load(scores + i_s * size + o, mask=o < size, other=0.0).to(tl.uint32, bitcast=True)
        inside = (o >= begin) & (o < size)
        if KNOWN < 32:
            inside = inside & ((key >> KNOWN) == prefix)
        histogram += tl.histogram(((key >> SHIFT) & (BINS - 1)).to(tl.int32), BINS, mask=inside)
    tl.store(counts + (i_s * tl.num_programs(1) + i_c) * BINS + tl.arange(0, BINS), histogram)


@triton.jit
def narrow_kernel(budgets, forced, state, counts, num_chunks, KNOWN: tl.constexpr, SHIFT: tl.constexpr):
    """Of the keys that agree with what is known, the left-th greatest: its next bits, and which it is of those that
    agree in them too. state int32 [S, 2]: the bits known, and `left`."""
    i_s = tl.program_id(0).to(tl.int64)
    BINS: tl.constexpr = 1 << (KNOWN - SHIFT)
    o_h = tl.arange(0, BINS)
    if KNOWN == 32:
        # The forced places come first and are not among the keys.
        left = tl.maximum(tl.load(budgets + i_s) - tl.load(forced + i_s), 0)
        prefix = 0
    else:
        prefix = tl.load(state + i_s * 2)
        left = tl.load(state + i_s * 2 + 1)
    histogram = tl.zeros([BINS], tl.int32)
    for i_c in range(num_chunks):
        histogram += tl.load(counts + (i_s * num_chunks + i_c) * BINS + o_h)
    above = tl.sum(histogram, 0) - tl.cumsum(histogram, 0)
    found = tl.max(tl.where(above + histogram >= left, o_h, 0), 0)
    tl.store(state + i_s * 2, (prefix << (KNOWN - SHIFT)) | found)
    tl.store(state + i_s * 2 + 1, left - tl.sum(tl.where(o_h == found, above, 0), 0))


@triton.jit
def _kept(scores, budgets, forced, state, i_s, o, size):
    """Which of the places `o` are kept whatever else is, and which are equal to the smallest that is kept."""
    begin = tl.load(forced + i_s)
    budget = tl.load(budgets + i_s)
    smallest = tl.load(state + i_s * 2).to(tl.uint32, bitcast=True)
    key = tl.load(scores + i_s * size + o, mask=o < size, other=0.0).to(tl.uint32, bitcast=True)
    free = (o >= begin) & (o < size)
    surely = (free & (key > smallest)) | ((o < begin) & (o < budget) & (o < size))
    return surely.to(tl.int32), (free & (key == smallest)).to(tl.int32)


@triton.jit
def tally_kernel(scores, budgets, forced, state, tallies, size, chunk, BLOCK: tl.constexpr):
    """How many places of a chunk are surely kept, and how many are equal to the smallest: int32 [S, chunks, 2]."""
    i_s = tl.program_id(0).to(tl.int64)
    i_c = tl.program_id(1)
    num_surely = 0
    num_equal = 0
    for b0 in range(i_c * chunk, tl.minimum((i_c + 1) * chunk, size), BLOCK):
        surely, equal = _kept(scores, budgets, forced, state, i_s, b0 + tl.arange(0, BLOCK), size)
        num_surely += tl.sum(surely, 0)
        num_equal += tl.sum(equal, 0)
    p_tally = tallies + (i_s * tl.num_programs(1) + i_c) * 2
    tl.store(p_tally, num_surely)
    tl.store(p_tally + 1, num_equal)


@triton.jit
def places_kernel(
    scores, budgets, forced, state, tallies, places, size, chunk, most, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the places that a chunk keeps behind those of the chunks before."""
    i_s = tl.program_id(0).to(tl.int64)
    i_c = tl.program_id(1)
    left = tl.load(state + i_s * 2 + 1)
    o_c = tl.arange(0, CHUNKS)
    p_tally = tallies + (i_s * tl.num_programs(1) + o_c) * 2
    num_surely = tl.sum(tl.load(p_tally, mask=o_c < i_c, other=0), 0)
    num_equal = tl.sum(tl.load(p_tally + 1, mask=o_c < i_c, other=0), 0)
    for b0 in range(i_c * chunk, tl.minimum((i_c + 1) * chunk, size), BLOCK):
        o = b0 + tl.arange(0, BLOCK)
        surely, equal = _kept(scores, budgets, forced, state, i_s, o, size)
        # Of equal ones the first `left` are kept.
        rank = num_equal + tl.cumsum(equal, 0)
        kept = (surely > 0) | ((equal > 0) & (rank <= left))
        place = num_surely + tl.cumsum(surely, 0) + tl.minimum(rank, left) - 1
        tl.store(places + i_s * most + place, o, mask=kept)
        num_surely += tl.sum(surely, 0)
        num_equal += tl.sum(equal, 0)


@triton.jit
def joined_kernel(places, starts, stops, counts, stride, most, width, GAP: tl.constexpr, BLOCK: tl.constexpr):
    """The ranges of one row of places; padding is one last place, far behind, that begins none."""
    i_s = tl.program_id(0).to(tl.int64)
    places += i_s * stride
    num_ranges = 0
    for b0 in range(0, most, BLOCK):
        o = b0 + tl.arange(0, BLOCK)
        place = tl.load(places + o, mask=o < most, other=2147483647)
        before = tl.load(places + o - 1, mask=(o > 0) & (o < most), other=-GAP - 1)
        after = tl.load(places + o + 1, mask=o + 1 < most, other=2147483647)
        used = place != 2147483647
        begins = used & (place - before > GAP)
        number = num_ranges + tl.cumsum(begins.to(tl.int32), 0) - 1
        tl.store(starts + i_s * width + number, place, mask=begins)
        tl.store(stops + i_s * width + number, place, mask=used & (after - place > GAP))
        num_ranges += tl.sum(begins.to(tl.int32), 0)
    tl.store(counts + i_s, num_ranges)


def top_places(scores: Tensor, budgets: Tensor, forced: Tensor, most: int) -> Tensor:
    """Launch: int32 [S, most]. scores float32 [S, N], contiguous, none negative; budgets, forced int32 [S], budgets at
    most `most` and N, forced at most N."""
    assert scores.is_contiguous()
    num_rows, size = scores.shape
    chunk = triton.cdiv(triton.cdiv(size, MOST_CHUNKS), BLOCK) * BLOCK
    num_chunks = triton.cdiv(size, chunk)
    block = min(BLOCK, max(128, triton.next_power_of_2(size)))
    state = torch.empty(num_rows, 2, dtype=torch.int32, device=scores.device)
    counts = torch.empty(num_rows, num_chunks, 2048, dtype=torch.int32, device=scores.device)
    places = torch.full((num_rows, most), NOWHERE, dtype=torch.int32, device=scores.device)
    grid = (num_rows, num_chunks)
    for known, shift in ((32, 21), (21, 10), (10, 0)):
        histogram_kernel[grid](
            scores, forced, state, counts, size, chunk, KNOWN=known, SHIFT=shift, BLOCK=block, num_warps=8
        )
        narrow_kernel[(num_rows,)](budgets, forced, state, counts, num_chunks, KNOWN=known, SHIFT=shift, num_warps=8)
    tally_kernel[grid](scores, budgets, forced, state, counts, size, chunk, BLOCK=block, num_warps=8)
    places_kernel[grid](
        scores, budgets, forced, state, counts, places, size, chunk, most, CHUNKS=MOST_CHUNKS, BLOCK=block, num_warps=8
    )
    return places


def joined(places: Tensor, size: int, *, gap: int) -> tuple[Tensor, Tensor, Tensor]:
    """Launch: (starts, stops) int32 [S, R] and counts int32 [S]. places int32 [S, M] below `size`, as `top_places`
    gives them."""
    num_rows, most = places.shape
    assert places.stride(1) == 1
    starts = torch.ones(num_rows, most_ranges(size, gap), dtype=torch.int32, device=places.device)
    stops = torch.zeros_like(starts)
    counts = torch.empty(num_rows, dtype=torch.int32, device=places.device)
    joined_kernel[(num_rows,)](
        places,
        starts,
        stops,
        counts,
        places.stride(0),
        most,
        starts.shape[1],
        GAP=gap,
        BLOCK=min(BLOCK, max(128, triton.next_power_of_2(most))),
        num_warps=8,
    )
    return starts, stops, counts
