"""From ranges and columns to tiles of keys: what `range_attention` walks through.

A slash range [a, c] selects, for the 64 rows that end at position e, the keys e - off with a < off <= c + 64: the same
offsets for every block of rows. So a selection is cut once into runs of 16 keys, named by the offset of their first
key, and every block of rows walks the same list from the near end until it leaves the prompt.

    single  a tile of queries holds one block of rows (of one head, or of two heads with one selection). One class of
            whole runs.
    paired  a tile holds two adjacent blocks, whose first ends at e. Offsets in (c, c + 64] belong to the first block
            alone, (a, c] to both, (a - 64, a] to the second alone: keys are loaded once and no block computes more
            than its own. Three classes of whole runs.

Runs that need a mask (cut short, near the diagonal, at a window's edge) form a class of their own, and so do the runs
that a class has over after its last whole tile of 8. Columns are gathered once per selection; a bit for every block of
rows and column says whether a range holds the column already.

A window is the range [0, window - 1] whose far edge is masked row by row. Dense attention is a window without end.
Nothing here waits for the device: sizes are bounds that the host knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longbatch_kernels.range_columns import Columns, RangeLists, gathered

ROWS = 64
RUN = 16
RECORD = 24
RANGES_PER_PROGRAM = 32


class PackedPrompt(NamedTuple):
    """Where a prompt's tokens lie in packed tensors. first_query: row of its first query, which stands at position
    q_offset. first_key: row of its key 0."""

    first_query: int
    num_queries: int
    q_offset: int
    first_key: int
    num_keys: int


@dataclass(frozen=True, slots=True)
class RangeIndex:
    """What the kernels read; made by `build_index`.

    runs int32 [S, T, 2]: offset of a run's first key; 16 bits for the keys that the first block (or head) takes, and
    above them 16 for the second. classes int32 [S, 5]: where in `runs` the masked runs, those of both, of the first and
    of the second block begin, class by class, near ones first, and where they end.
    windows int32 [S].
    places int32 [S, 6]: row of key 0, keys, K/V head, first row in the column bits, the block of rows which that is
    for, and how many blocks there are.
    """

    paired: bool
    runs: Tensor
    classes: Tensor
    columns: Columns
    windows: Tensor
    places: Tensor


def build_index(
    lists: RangeLists,
    k: Tensor,
    v: Tensor,
    prompts: list[PackedPrompt],
    owners: list[tuple[int, int]],
    *,
    paired: bool,
) -> RangeIndex:
    """The index of S selections over k, v [Tk, Hkv, D]. owners: the prompt and the K/V head of each."""
    device, num_selections = k.device, lists.starts.shape[0]
    table, base = [], 0
    for p, head in owners:
        prompt = prompts[p]
        # Pairs of blocks are counted from the prompt's start.
        first = prompt.q_offset // ROWS // 2 * 2
        count = (prompt.q_offset + max(prompt.num_queries, 1) - 1) // ROWS // 2 * 2 + 2 - first
        table.append((prompt.first_key, prompt.num_keys, head, base, first, count))
        base += count
    places = on_device(tuple(table), device)
    longest, most = max(prompt.num_keys for prompt in prompts), max(row[5] for row in table)
    num_ranges = lists.starts.shape[1]
    capacity = longest // RUN + 11 * num_ranges + 64
    runs = torch.empty(num_selections, capacity, 2, dtype=torch.int32, device=device)
    classes = torch.empty(num_selections, 5, dtype=torch.int32, device=device)
    cut_kernel[(num_selections, num_ranges // RANGES_PER_PROGRAM + 1)](
        lists.starts.contiguous(),
        lists.stops.contiguous(),
        lists.counts,
        lists.windows,
        places,
        runs,
        classes,
        num_ranges,
        capacity,
        PAIRED=paired,
        PER_PROGRAM=RANGES_PER_PROGRAM,
        num_warps=4,
    )
    columns = gathered(lists, k, v, places, base, most)
    return RangeIndex(
        paired=paired,
        runs=runs,
        classes=classes,
        columns=columns,
        windows=lists.windows,
        places=places,
    )


# Those of a prompt in many runs are large, and other ones for each tile.
MOST_KEPT_ROWS = 512
_tables: dict[tuple[tuple[tuple[int, ...], ...], torch.device], Tensor] = {}


def on_device(table: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """A table of numbers as int32 on the device. The same ones return layer after layer, so small ones are kept."""
    if len(table) > MOST_KEPT_ROWS:
        return torch.tensor(table, dtype=torch.int32).to(device)
    key = (table, device)
    if key not in _tables:
        if len(_tables) >= 1024:
            _tables.clear()
        _tables[key] = torch.tensor(table, dtype=torch.int32).to(device)
    return _tables[key]


@triton.jit
def _part(first, count, near, far):
    """Of runs at offsets first, first + 16, ...: the first whole one and how many are whole; those below `near` or
    above `far` need a mask."""
    low = tl.minimum(tl.maximum((near - first + 15) >> 4, 0), count)
    high = tl.minimum(tl.maximum(((far - first) >> 4) + 1, low), count)
    return low, high - low


@triton.jit
def _parts(a, c, valid, reach, PAIRED: tl.constexpr):
    """The three parts of ranges: for each its first offset, runs, first whole run and whole runs; and the keys over."""
    if PAIRED:
        width = tl.where(valid, c - a, 0)
        top = c
        edge = tl.where(valid, 4, 0)
        far = reach - 64
    else:
        width = tl.where(valid, c - a + 64, 0)
        top = c + 64
        edge = width * 0
        far = reach
    middle = width >> 4
    rest = width & 15
    b_first = top - 16 * (middle - 1)
    b_low, b_whole = _part(b_first, middle, 80, far)
    f_low, f_whole = _part(c + 16, edge, 80, reach)
    s_low, s_whole = _part(a - 48, edge, 16, far)
    masked = middle - b_whole + 2 * edge - f_whole - s_whole + (rest > 0).to(tl.int32)
    return b_first, middle, b_low, b_whole, edge, f_low, f_whole, s_low, s_whole, rest, masked


@triton.jit
def cut_kernel(
    starts,
    stops,
    counts,
    windows,
    places,
    runs,
    classes,
    num_ranges,
    capacity,
    PAIRED: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
):
    """Runs of PER_PROGRAM ranges of one selection. Its window is one more range, after the others."""
    i_s = tl.program_id(0).to(tl.int64)
    i_g = tl.program_id(1)
    num_keys = tl.load(places + i_s * 6 + 1)
    window = tl.load(windows + i_s)
    n_own = tl.load(counts + i_s)
    n_all = n_own + (window > 0).to(tl.int32)
    if (i_g > 0) & (i_g * PER_PROGRAM >= n_all):
        return
    # Offsets are below 2^30, so a reach of 2^30 never masks.
    reach = tl.where(window > 0, tl.minimum(window, 1 << 30), 1 << 30)
    o_r = tl.arange(0, 128)
    # What comes before this program's ranges, and what there is in all, of each class.
    p_both = 0
    p_first = 0
    p_second = 0
    p_masked = 0
    t_both = 0
    t_first = 0
    t_second = 0
    t_masked = 0
    for r0 in range(0, n_all, 128):
        r = r0 + o_r
        a = tl.load(starts + i_s * num_ranges + r, mask=r < n_own, other=0)
        c = tl.load(stops + i_s * num_ranges + r, mask=r < n_own, other=0)
        c = tl.minimum(tl.where(r == n_own, window - 1, c), num_keys - 1)
        valid = (r < n_all) & (a <= c)
        _, _, _, b_whole, _, _, f_whole, _, s_whole, _, masked = _parts(a, c, valid, reach, PAIRED)
        t_both += tl.sum(b_whole, 0)
        t_first += tl.sum(f_whole, 0)
        t_second += tl.sum(s_whole, 0)
        t_masked += tl.sum(masked, 0)
        before = r < i_g * PER_PROGRAM
        p_both += tl.sum(tl.where(before, b_whole, 0), 0)
        p_first += tl.sum(tl.where(before, f_whole, 0), 0)
        p_second += tl.sum(tl.where(before, s_whole, 0), 0)
        p_masked += tl.sum(tl.where(before, masked, 0), 0)
    # Whole tiles of each class; what is over is masked.
    k_both = t_both // 8 * 8
    k_first = t_first // 8 * 8
    k_second = t_second // 8 * 8
    over_first = t_masked + t_both - k_both
    over_second = over_first + t_first - k_first
    n_masked = over_second + t_second - k_second
    # Every block of rows has at least one tile, if only of masked keys, so that no kernel needs a case for none.
    c_both = tl.maximum((n_masked + 7) // 8, 1) * 8
    c_first = c_both + k_both
    c_second = c_first + k_first
    runs += i_s * capacity * 2
    o_8 = tl.arange(0, 8)
    if i_g == 0:
        p_class = classes + i_s * 5
        tl.store(p_class, 0)
        tl.store(p_class + 1, c_both)
        tl.store(p_class + 2, c_first)
        tl.store(p_class + 3, c_second)
        tl.store(p_class + 4, c_second + k_second)
        # No bit set: never seen. The offset may be any.
        o_pad = n_masked + o_8
        tl.store(runs + o_pad * 2, 0, mask=o_pad < c_both)
        tl.store(runs + o_pad * 2 + 1, 0, mask=o_pad < c_both)
    # The keys a run holds, for the first and for the second block.
    for_first: tl.constexpr = 65535
    for_second: tl.constexpr = -65536
    o_t = tl.arange(0, 128)
    for i in range(tl.minimum(PER_PROGRAM, n_all - i_g * PER_PROGRAM)):
        r = i_g * PER_PROGRAM + i
        is_own = r < n_own
        a = tl.load(starts + i_s * num_ranges + r, mask=is_own, other=0)
        c = tl.load(stops + i_s * num_ranges + r, mask=is_own, other=0)
        c = tl.minimum(tl.where(is_own, c, window - 1), num_keys - 1)
        b_first, middle, b_low, b_whole, edge, f_low, f_whole, s_low, s_whole, rest, masked = _parts(
            a, c, a <= c, reach, PAIRED
        )
        for t0 in range(0, middle, 128):
            t = t0 + o_t
            whole = (t >= b_low) & (t < b_low + b_whole)
            g = p_both + t - b_low
            target = tl.where(g < k_both, c_both + g, t_masked + g - k_both)
            hidden = p_masked + tl.where(t < b_low, t, t - b_whole)
            p_run = runs + tl.where(whole, target, hidden) * 2
            tl.store(p_run, b_first + 16 * t, mask=t < middle)
            tl.store(p_run + 1, for_first | for_second, mask=t < middle)
        p_masked += middle - b_whole
        p_both += b_whole
        if rest > 0:
            short = (1 << rest) - 1
            tl.store(runs + p_masked * 2, b_first - 16)
            tl.store(runs + p_masked * 2 + 1, short | (short << 16))
            p_masked += 1
        if edge > 0:
            t = o_8
            whole = (t >= f_low) & (t < f_low + f_whole)
            g = p_first + t - f_low
            target = tl.where(g < k_first, c_first + g, over_first + g - k_first)
            hidden = p_masked + tl.where(t < f_low, t, t - f_whole)
            p_run = runs + tl.where(whole, target, hidden) * 2
            tl.store(p_run, c + 16 + 16 * t, mask=t < 4)
            tl.store(p_run + 1, for_first, mask=t < 4)
            p_masked += 4 - f_whole
            p_first += f_whole
            # A negative offset is a key after the first block's end.
            whole = (t >= s_low) & (t < s_low + s_whole)
            g = p_second + t - s_low
            target = tl.where(g < k_second, c_second + g, over_second + g - k_second)
            hidden = p_masked + tl.where(t < s_low, t, t - s_whole)
            p_run = runs + tl.where(whole, target, hidden) * 2
            tl.store(p_run, a - 48 + 16 * t, mask=t < 4)
            tl.store(p_run + 1, for_second, mask=t < 4)
            p_masked += 4 - s_whole
            p_second += s_whole


@triton.jit
def _count_runs(runs, base, size, bound):
    """How many of a class's runs have an offset below `bound` [BLOCK], by halving."""
    low = bound * 0
    high = low + size
    span = size
    while span > 0:
        middle = (low + high) >> 1
        offset = tl.load(runs + (base + middle) * 2, mask=low < high, other=0)
        below = (low < high) & (offset < bound)
        low = tl.where(below, middle + 1, low)
        high = tl.where((low <= middle) & (below == 0), middle, high)
        span = span >> 1
    return low


@triton.jit
def records_kernel(
    jobs,
    bounds,
    runs,
    classes,
    columns,
    places,
    windows,
    items,
    width,
    capacity,
    PAIRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Records of BLOCK tiles of queries of one job: see `records`."""
    i_j = tl.program_id(0).to(tl.int64)
    o_u = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p_bound = bounds + i_j * 7
    m_u = o_u < tl.load(p_bound)
    i_s = tl.load(jobs + i_j * 3 + 2).to(tl.int64)
    per: tl.constexpr = 128 if PAIRED else 64
    # The last rows of a prompt first: they have the most keys.
    unit = tl.load(p_bound + 1) - o_u
    end = unit * per + 64
    p_item = items + (tl.load(p_bound + 2) + o_u * tl.load(p_bound + 6)).to(tl.int64) * 24
    tl.store(p_item, tl.load(jobs + i_j * 3), mask=m_u)
    tl.store(p_item + 1, tl.load(jobs + i_j * 3 + 1), mask=m_u)
    tl.store(p_item + 2, end, mask=m_u)
    tl.store(p_item + 3, tl.load(places + i_s * 6 + 2), mask=m_u)
    tl.store(p_item + 4, tl.load(p_bound + 3), mask=m_u)
    tl.store(p_item + 5, tl.load(p_bound + 4), mask=m_u)
    tl.store(p_item + 6, tl.load(p_bound + 5), mask=m_u)
    tl.store(p_item + 7, tl.load(places + i_s * 6), mask=m_u)
    tl.store(p_item + 8, tl.load(places + i_s * 6 + 1), mask=m_u)
    tl.store(p_item + 9, i_s.to(tl.int32), mask=m_u)
    runs += i_s * capacity * 2
    start = tl.load(classes + i_s * 5 + 1)
    tl.store(p_item + 10, 0, mask=m_u)
    tl.store(p_item + 14, start // 8, mask=m_u)
    crossing = end * 0
    for kind in tl.static_range(1, 4):
        stop = tl.load(classes + i_s * 5 + kind + 1)
        # A run is inside the prompt while end - offset + 16 > 0.
        count = (_count_runs(runs, start, stop - start, end + 16) + 7) // 8
        tl.store(p_item + 10 + kind, start, mask=m_u)
        tl.store(p_item + 14 + kind, count, mask=m_u)
        last = tl.load(runs + (start + count * 8 - 1) * 2, mask=m_u & (count > 0), other=0)
        crossing |= (last > end).to(tl.int32) << kind
        start = stop
    # Columns before the end of the last block.
    bound = end + (per - 64)
    low = end * 0
    high = low + width
    span = width
    while span > 0:
        middle = (low + high) >> 1
        column = tl.load(columns + i_s * width + middle, mask=low < high, other=0)
        below = (low < high) & (column < bound)
        low = tl.where(below, middle + 1, low)
        high = tl.where((low <= middle) & (below == 0), middle, high)
        span = span >> 1
    tl.store(p_item + 18, (low + 127) // 128, mask=m_u)
    block = end // 64 - 1
    row = tl.load(places + i_s * 6 + 3) + block - tl.load(places + i_s * 6 + 4)
    tl.store(p_item + 19, row, mask=m_u)
    tl.store(p_item + 20, tl.load(windows + i_s), mask=m_u)
    tl.store(p_item + 21, crossing, mask=m_u)


def records(index: RangeIndex, jobs: Tensor, bounds: tuple[tuple[int, ...], ...]) -> Tensor:
    """A record for each tile of queries, int32 [W, RECORD]: all that a kernel needs to know of it, in one place.

    0, 1: query heads. 2: end of the (first) block. 3: K/V head. 4: row of q minus position. 5, 6: first position, and
    the one after the last. 7: row of key 0. 8: keys. 9: selection. 10 to 13: first run of each class. 14 to 18: tiles
    of each class, and of columns. 19: row of the (first) block in the column bits. 20: window. 21: bit c set where the
    last tile of class c begins before the prompt. The rest is unused.

    jobs int32 [J, 3]: two heads and their selection. bounds: for each job its number of records, the last block (or
    pair) of rows, its first record, numbers 4 to 6, and how many records lie between two of its own.
    """
    total, most = sum(row[0] for row in bounds), max(row[0] for row in bounds)
    items = torch.empty(total, RECORD, dtype=torch.int32, device=jobs.device)
    if total:
        records_kernel[(len(bounds), triton.cdiv(most, 128))](
            jobs,
            on_device(bounds, jobs.device),
            index.runs,
            index.classes,
            index.columns.places,
            index.places,
            index.windows,
            items,
            index.columns.places.shape[1],
            index.runs.shape[1],
            PAIRED=index.paired,
            BLOCK=128,
            num_warps=4,
        )
    return items
