"""What a sparse pattern answers: which keys each query sees, in a form that kernels execute as it stands.

Positions count from the prompt's start. Axis S holds selections: one per query head, or one per group of heads that
share a key head. Everything is on the keys' device, and building one never waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

# Rows of a block of `Ranges`: block b holds positions 64b..64b+63.
ROWS = 64
# No such position; also a window that no prompt outgrows, which makes a selection dense.
NOWHERE = 2**31 - 1
# Numbers that `pairs` holds at once per temporary.
_ENTRIES = 1 << 24


@dataclass(frozen=True, slots=True)
class Ranges:
    """Distance ranges, columns and windows for queries at positions rows[0]..rows[1]-1.

    Row q of the block that ends at e = 64 * (q // 64 + 1) sees key k <= q if and only if

        some range has  e - stop - 64 <= k < e - start,   or   q - k < window,   or   k is a column.

    A key that several of these name counts once.

    starts, stops: int32 [S, R], distances with starts <= stops, ascending; the next start is more than 64 past the
    stop before it (so the ranges of keys are disjoint). counts: int32 [S], ranges in use.
    columns: int32 [S, C], ascending and distinct; places not in use hold `NOWHERE`. column_counts: int32 [S].
    windows: int32 [S], keys seen next to the query, itself included; 0 for none, `NOWHERE` for all. A selection that
    has a window has no ranges.
    """

    starts: Tensor
    stops: Tensor
    counts: Tensor
    columns: Tensor
    column_counts: Tensor
    windows: Tensor
    rows: tuple[int, int]

    @property
    def num_selections(self) -> int:
        return self.counts.shape[0]

    def mask(self, selection: int, start: int, stop: int, num_keys: int) -> Tensor:
        """Whether rows start..stop-1 see keys 0..num_keys-1: bool [stop - start, num_keys], causality included."""
        device = self.counts.device
        rows = torch.arange(start, stop, device=device)[:, None]
        keys = torch.arange(num_keys, device=device)[None]
        ends = torch.arange(start // ROWS, -(-stop // ROWS), device=device)[:, None] * ROWS + ROWS
        size = max(num_keys, stop) + ROWS
        own = slice(selection, selection + 1)
        covered = _covered(self.starts[own], self.stops[own], self.counts[own], size)[0]
        seen = covered[(ends - keys).clamp_(min=0)].repeat_interleave(ROWS, dim=0)
        seen = seen[start % ROWS : start % ROWS + stop - start]
        columns = torch.zeros(size + 1, dtype=torch.bool, device=device)
        columns.index_fill_(0, self.columns[selection].long().clamp(max=size), True)
        seen |= columns[:num_keys]
        # Compared one by one, for a matrix of distances would be the largest of all.
        seen |= keys > rows - self.windows[selection]
        return seen.logical_and_(keys <= rows)

    def pairs(self, start: int, stop: int, num_keys: int) -> Tensor:
        """Pairs of a row in start..stop-1 and a key that it sees: float64 [S].

        Memory is linear in `stop`; no mask is made. Raises ValueError when rows stand after the last of num_keys keys.
        """
        _check_rows(stop, num_keys)
        width = max(1, _ENTRIES // (stop + ROWS + self.columns.shape[1]))
        parts = []
        for low in range(0, self.num_selections, width):
            which = slice(low, low + width)
            found = self._pairs_before(stop, which)
            parts.append(found - self._pairs_before(start, which) if start else found)
        return torch.cat(parts).double()

    def _pairs_before(self, stop: int, which: slice) -> Tensor:
        """Pairs with rows 0..stop-1 of the selections `which`: int64 [s].

        By distance u = e - k from a block's end: covered[u] says whether a range holds it, whatever the block.
        """
        device = self.counts.device
        whole, rest = divmod(stop, ROWS)
        size = (whole + 1) * ROWS + 1
        covered = _covered(self.starts[which], self.stops[which], self.counts[which], size)
        window = self.windows[which].long()
        columns = self.columns[which].long()
        # Ranges: a row r of its block sees the covered u of 64-r..e. The first 64 entries are the block's own keys.
        upto = covered.cumsum(1, dtype=torch.int32)
        ends = torch.arange(ROWS, size, ROWS, device=device)
        rows_of = torch.full((whole + 1,), ROWS, device=device)
        rows_of[whole:].fill_(rest)
        total = (upto[:, ends] * rows_of).sum(1)
        own = upto[:, :ROWS].flip(1).cumsum(1)
        total -= own[:, ROWS - 1] * whole
        if rest:
            total -= own[:, rest - 1]
        # Windows: row q sees min(q + 1, window) keys.
        short = window.clamp(max=stop)
        total += short * (short + 1) // 2 + (stop - short) * window.clamp(max=stop)
        # Columns beside a window: those that lie before it.
        beyond = (stop - columns - window[:, None]).clamp(min=0)
        # Columns beside ranges: rows of the own block, of whole later blocks, and of the last one, where not covered.
        # `passed` counts the covered u of one residue modulo 64 up to each u.
        passed = covered[:, 1:].reshape(len(covered), whole + 1, ROWS).cumsum(1, dtype=torch.int32).flatten(1)
        inside = columns < stop
        column = columns.where(inside, torch.zeros_like(columns))
        block = column // ROWS
        first = (block + 1) * ROWS - column
        last = (whole + 1) * ROWS - column
        free_first = 1 - covered.gather(1, first).long()
        free_last = 1 - covered.gather(1, last).long()
        later = (whole - 1 - block).clamp(min=0)
        before_last = passed.gather(1, (last - ROWS - 1).clamp(min=0))
        free_later = later - (before_last - passed.gather(1, first - 1)).where(later > 0, torch.zeros_like(later))
        alone = torch.where(
            block < whole, first * free_first + ROWS * free_later + rest * free_last, (stop - column) * free_first
        )
        seen = torch.where(window[:, None] > 0, beyond, alone)
        return total + seen.where(inside, torch.zeros_like(seen)).sum(1)


@dataclass(frozen=True, slots=True)
class Runs:
    """A window and columns for each run of rows.

    Row q of run b, which holds rows bounds[b]..bounds[b + 1] - 1, sees key k <= q if and only if q - k < window or k is
    one of the run's columns. A key that both name counts once.

    columns: int32 [B, S, C], ascending and distinct; places not in use hold `NOWHERE`. column_counts: int32 [B, S].
    bounds: B + 1 positions. window: at least 1.
    """

    columns: Tensor
    column_counts: Tensor
    bounds: tuple[int, ...]
    window: int

    @property
    def num_selections(self) -> int:
        return self.columns.shape[1]

    def ranges(self, first: int, last: int) -> Ranges:
        """Runs first..last-1 as lists of their own: entry (b - first) * S + s is selection s of run b."""
        columns, counts = self.columns[first:last].flatten(0, 1), self.column_counts[first:last].flatten()
        nothing = columns.new_empty((columns.shape[0], 0))
        return Ranges(
            starts=nothing,
            stops=nothing,
            counts=torch.zeros_like(counts),
            columns=columns,
            column_counts=counts,
            windows=torch.full_like(counts, self.window),
            rows=(self.bounds[first], self.bounds[last]),
        )

    def mask(self, selection: int, start: int, stop: int, num_keys: int) -> Tensor:
        """Whether rows start..stop-1 see keys 0..num_keys-1: bool [stop - start, num_keys], causality included."""
        device = self.columns.device
        rows, keys = torch.arange(start, stop, device=device)[:, None], torch.arange(num_keys, device=device)
        run = torch.bucketize(rows[:, 0], torch.tensor(self.bounds[1:]).to(device, non_blocking=True), right=True)
        # A place past the end takes what is no column.
        chosen = torch.zeros((self.columns.shape[0], num_keys + 1), dtype=torch.bool, device=device)
        chosen.scatter_(1, self.columns[:, selection].long().clamp(max=num_keys), True)
        seen = chosen[run, :num_keys]
        seen |= keys > rows - self.window
        return seen.logical_and_(keys <= rows)

    def pairs(self, start: int, stop: int, num_keys: int) -> Tensor:
        """Pairs of a row in start..stop-1 and a key that it sees: float64 [S].

        Raises ValueError when rows stand after the last of num_keys keys.
        """
        _check_rows(stop, num_keys)
        near, bounds = 0, []
        for low, high in pairwise(self.bounds):
            low, high = max(low, start), min(high, stop)
            if low < high:
                # Rows that see fewer keys than a window holds, then the others.
                whole = min(max(self.window, low), high)
                near += (whole * (whole + 1) - low * (low + 1)) // 2 + (high - whole) * self.window
            bounds.append((low, max(low, high)))
        rows = torch.tensor(bounds).to(self.columns.device, non_blocking=True)[:, :, None, None]
        first = torch.maximum(self.columns.long() + self.window, rows[:, 0])
        return (rows[:, 1] - first).clamp_(min=0).sum((0, 2)).double() + near


@dataclass(frozen=True, slots=True)
class Blocks:
    """Key blocks per query block. Row q sees key k <= q if and only if the list of q's block holds k // block_keys.

    indices: int32 [S, B, K], ascending; places not in use hold -1. counts: int32 [S, B]. Query block b holds the
    `block_rows` positions from first_row + b * block_rows on; first_row is a multiple of block_rows.
    """

    indices: Tensor
    counts: Tensor
    block_rows: int
    block_keys: int
    first_row: int

    @property
    def num_selections(self) -> int:
        return self.counts.shape[0]

    def mask(self, selection: int, start: int, stop: int, num_keys: int) -> Tensor:
        """Whether rows start..stop-1 see keys 0..num_keys-1: bool [stop - start, num_keys], causality included."""
        device = self.counts.device
        num_blocks = -(-num_keys // self.block_keys)
        listed = listed_blocks(self.indices[selection], self.counts[selection], num_blocks)
        rows = torch.arange(start, stop, device=device)
        keys = torch.arange(num_keys, device=device)
        seen = listed[(rows - self.first_row) // self.block_rows][:, keys // self.block_keys]
        return seen & (keys[None] <= rows[:, None])

    def pairs(self, start: int, stop: int, num_keys: int) -> Tensor:
        """Pairs of a row in start..stop-1 and a key that it sees: float64 [S].

        Raises ValueError when rows stand after the last of num_keys keys.
        """
        _check_rows(stop, num_keys)
        device = self.counts.device
        low = self.first_row + torch.arange(self.counts.shape[1], device=device)[:, None] * self.block_rows
        high = (low + self.block_rows).clamp(start, stop)
        low = low.clamp(start, stop)
        place = torch.arange(self.indices.shape[2], device=device)
        totals = []
        for indices, counts in zip(self.indices, self.counts, strict=True):
            key = indices.long() * self.block_keys
            found = self._triangle(high - key) - self._triangle(low - key)
            totals.append(found.where(place < counts[:, None], torch.zeros_like(found)).sum())
        return torch.stack(totals).double()

    def _triangle(self, rows: Tensor) -> Tensor:
        """Pairs of the first `rows` rows from a block's first key on, each of which sees one key more than the row
        before it until it sees all: int64."""
        rows = rows.clamp(min=0)
        short = rows.clamp(max=self.block_keys)
        return short * (short + 1) // 2 + (rows - short) * self.block_keys


def merged_ranges(distances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ranges of neighbouring distances: (starts int32 [S, M], stops int32 [S, M], counts int32 [S]).

    distances: int32 [S, M], each row ascending and then padded with `NOWHERE`. Distance t stands for 64 keys, so that
    distances at most 64 apart touch and become one range. Places not in use hold start 1 and stop 0.
    """
    num_selections, width = distances.shape
    used = distances != NOWHERE
    first = used.clone()
    last = used.clone()
    if width > 1:
        apart = distances[:, 1:] - distances[:, :-1] > ROWS
        first[:, 1:] &= apart
        last[:, :-1] &= apart | ~used[:, 1:]
    rank = first.cumsum(1) - 1
    # Distances inside a range are written to a place past the end, which is cut off.
    starts = torch.ones((num_selections, width + 1), dtype=torch.int32, device=distances.device)
    stops = torch.zeros_like(starts)
    starts.scatter_(1, rank.where(first, torch.full_like(rank, width)), distances)
    stops.scatter_(1, rank.where(last, torch.full_like(rank, width)), distances)
    return starts[:, :width], stops[:, :width], first.sum(1, dtype=torch.int32)


def block_lists(index: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Lists of the key blocks kept: (indices int32 [..., K] ascending, padded with -1; counts int32 [...]).

    index: [..., K], distinct key blocks in any order. keep: bool [..., K].
    """
    lists = index.int().masked_fill(~keep, NOWHERE).sort(-1).values
    return lists.masked_fill_(lists == NOWHERE, -1), keep.sum(-1, dtype=torch.int32)


def listed_blocks(indices: Tensor, counts: Tensor, num_blocks: int) -> Tensor:
    """Whether each key block is in a list: bool [..., num_blocks]."""
    place = torch.arange(indices.shape[-1], device=indices.device)
    inside = (place < counts[..., None]) & (indices >= 0) & (indices < num_blocks)
    chosen = torch.zeros((*indices.shape[:-1], num_blocks + 1), dtype=torch.bool, device=indices.device)
    chosen.scatter_(-1, indices.long().where(inside, torch.full_like(indices, num_blocks).long()), inside)
    return chosen[..., :num_blocks]


def window_ranges(windows: Sequence[int], sinks: Sequence[int], rows: tuple[int, int], device: torch.device) -> Ranges:
    """Selections of a window and the first `sinks` columns, for rows rows[0]..rows[1]-1; each list has S numbers."""
    num_selections = len(windows)
    counts = [min(number, rows[1]) for number in sinks]
    limit = torch.tensor(counts, dtype=torch.int32).to(device, non_blocking=True)
    columns = torch.arange(max(counts, default=0), dtype=torch.int32, device=device).expand(num_selections, -1)
    nothing = torch.zeros((num_selections, 0), dtype=torch.int32, device=device)
    return Ranges(
        starts=nothing,
        stops=nothing,
        counts=torch.zeros(num_selections, dtype=torch.int32, device=device),
        columns=columns.masked_fill(columns >= limit[:, None], NOWHERE),
        column_counts=limit,
        windows=torch.tensor(list(windows), dtype=torch.int32).to(device, non_blocking=True),
        rows=rows,
    )


def stacked(parts: Sequence[tuple[Sequence[int], Sequence[Ranges]]], rows: tuple[int, int]) -> tuple[Ranges, ...]:
    """One list of `Ranges` from several patterns', whose row intervals may differ.

    parts: the selections that a pattern served, and its answer, which covers `rows`. The selections of all parts
    are 0..S-1 in some order. The result covers `rows` in disjoint intervals, each with all S selections.
    """
    cuts = sorted({rows[0], rows[1], *(row for _, found in parts for one in found for row in one.rows)})
    cuts = [row for row in cuts if rows[0] <= row <= rows[1]]
    order = [selection for selections, _ in parts for selection in selections]
    inverse = sorted(range(len(order)), key=order.__getitem__)
    answer = []
    for low, high in pairwise(cuts):
        here = [next(one for one in found if one.rows[0] <= low and high <= one.rows[1]) for _, found in parts]
        answer.append(_joined(here, inverse, (low, high)))
    return tuple(answer)


def _joined(parts: Sequence[Ranges], inverse: Sequence[int], rows: tuple[int, int]) -> Ranges:
    num_ranges = max(part.starts.shape[1] for part in parts)
    num_columns = max(part.columns.shape[1] for part in parts)
    device = parts[0].counts.device
    order = torch.tensor(list(inverse)).to(device, non_blocking=True)
    pad = torch.nn.functional.pad

    def wide(tensors: list[Tensor], width: int, value: int) -> Tensor:
        return torch.cat([pad(one, (0, width - one.shape[1]), value=value) for one in tensors])[order]

    return Ranges(
        starts=wide([part.starts for part in parts], num_ranges, 1),
        stops=wide([part.stops for part in parts], num_ranges, 0),
        counts=torch.cat([part.counts for part in parts])[order],
        columns=wide([part.columns for part in parts], num_columns, NOWHERE),
        column_counts=torch.cat([part.column_counts for part in parts])[order],
        windows=torch.cat([part.windows for part in parts])[order],
        rows=rows,
    )


def _covered(starts: Tensor, stops: Tensor, counts: Tensor, size: int) -> Tensor:
    """Which distances u = e - k from a block's end the ranges hold, start < u <= stop + 64: bool [S, size]."""
    used = (torch.arange(starts.shape[1], device=starts.device) < counts[:, None]).int()
    steps = torch.zeros((starts.shape[0], size + 1), dtype=torch.int32, device=starts.device)
    steps.scatter_add_(1, (starts.long() + 1).clamp(max=size), used)
    steps.scatter_add_(1, (stops.long() + ROWS + 1).clamp(max=size), -used)
    return steps.cumsum(1, dtype=torch.int32)[:, :size] > 0


def _check_rows(stop: int, num_keys: int) -> None:
    if stop > num_keys:
        raise ValueError(f"rows up to {stop} stand after the last of {num_keys} keys")
