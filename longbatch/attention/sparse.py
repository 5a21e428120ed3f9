"""Sparse attention of one layer: its patterns select, and exactly what they selected is computed.

On a GPU kernels do that. Elsewhere, and in float32, each selection becomes a mask, a bounded number of rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longbatch.attention.selection import Blocks, Ranges, Runs
from longbatch.attention.state import State, masked

if TYPE_CHECKING:
    from longbatch.sparsity import LayerPatterns

# What patterns selected for a tile, with the layer's numbers of these selections.
_TileParts = list[tuple[Sequence[int], Blocks | Runs]]

# A mask holds at most this many entries, and rows: keys after its last row are left out.
MASK_ENTRIES, MASK_ROWS = 1 << 24, 1024
# Bytes of the keys and values that are gathered for the runs of a tile at once.
GATHERED_BYTES = 1 << 29


@dataclass(slots=True)
class LayerSelection:
    """What one layer selected for rows rows[0]..rows[1]-1 of one sequence.

    ranges: of the heads whose patterns give ranges, in disjoint intervals of rows that cover them, each with what the
    kernel wants beside it; empty where no head has such a pattern. summaries: what the other patterns want to know of
    the keys. pairs_each: pairs of query and key that are computed for each selection, float64 [S]; those of blocks and
    runs are added tile by tile. heads_each: query heads that use a selection.
    """

    rows: tuple[int, int]
    ranges: list[tuple[Ranges, Any]]
    summaries: tuple[Tensor | None, ...]
    pairs_each: Tensor
    heads_each: int

    @property
    def pairs(self) -> Tensor:
        """Pairs computed so far over all query heads: float64, one number."""
        return self.pairs_each.sum() * self.heads_each


class SparseLayer:
    """The patterns of one layer. Selections are numbered like its query heads, or like its key/value heads where the
    heads of a group share one."""

    def __init__(self, patterns: LayerPatterns, num_heads: int, num_kv_heads: int, scale: float) -> None:
        from longbatch.attention.patterns import last_queries

        self.patterns = patterns
        self.scale = scale
        self._num_heads, self._num_kv = num_heads, num_kv_heads
        self._heads_each = num_heads // len(patterns.heads)
        places = range(len(patterns.heads))
        self._ranges = [place for place in places if patterns.heads[place].kind == "ranges"]
        self._by_tile = [place for place in places if patterns.heads[place].kind != "ranges"]
        # Queries that `select` looks at.
        self.last_queries = last_queries(patterns.heads)
        self._device_lists = cache(self._make_lists)

    def select(
        self,
        q_last: Tensor | None,
        k: Tensor,
        v: Tensor,
        *,
        q_offset: int,
        rows: tuple[int, int],
        counted: tuple[int, int] | None = None,
    ) -> LayerSelection:
        """Select for rows rows[0]..rows[1]-1.

        q_last: the last queries [m, H, D], which stand at q_offset..q_offset+m-1, or None where none are looked at.
        k, v: [N, Hkv, D], keys and values of positions 0..N-1; the last row and the last query are at N-1. counted: the
        rows that will be attended, where these are not all.
        """
        from longbatch.attention.patterns import summarize_keys
        from longbatch.attention.patterns.base import on_device

        heads = self.patterns.heads
        pairs = torch.zeros(len(heads), dtype=torch.float64, device=k.device)
        found: tuple[Ranges, ...] = ()
        if self._ranges:
            found = self.select_ranges(q_last, k, q_offset=q_offset, rows=rows)
            start, stop = counted or rows
            places = on_device(self._ranges, k.device)
            for ranges in found:
                low, high = max(start, ranges.rows[0]), min(stop, ranges.rows[1])
                if low < high:
                    pairs.index_add_(0, places, ranges.pairs(low, high, k.shape[0]))
        prepared = [(ranges, self._prepared(ranges, k, v) if _has_kernels(k) else None) for ranges in found]
        summaries = summarize_keys(k, [heads[place] for place in self._by_tile])
        return LayerSelection(rows, prepared, summaries, pairs, self._heads_each)

    def select_ranges(
        self, q_last: Tensor | None, k: Tensor, *, q_offset: int, rows: tuple[int, int]
    ) -> tuple[Ranges, ...]:
        """What the patterns that give ranges select; the arguments are those of `select`."""
        from longbatch.attention.patterns import select_ranges

        return select_ranges(
            k.new_empty((0, self._num_heads, k.shape[2])) if q_last is None else q_last,
            k,
            [self.patterns.heads[place] for place in self._ranges],
            shared=self.patterns.shared,
            scale=self.scale,
            q_offset=q_offset,
            rows=rows,
            selections=self._ranges,
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: LayerSelection, *, q_offset: int) -> State:
        """Attention of queries [n, H, D] at positions q_offset..q_offset+n-1, which are among the selection's rows,
        over the k and v that it was made of. A query that sees no key gives 0 and a log-sum-exp of -inf."""
        tile = self._selected_tile(q, k, selection, q_offset)
        stop = q_offset + q.shape[0]
        cuts = {q_offset, stop}
        for ranges, _ in selection.ranges:
            cuts |= {row for row in ranges.rows if q_offset < row < stop}
        bounds = sorted(cuts)
        attend = self._with_kernels if _has_kernels(q) else self._with_masks
        states = [
            attend(q[low - q_offset : high - q_offset], k, v, _at(selection, low), tile, low)
            for low, high in pairwise(bounds)
        ]
        if len(states) == 1:
            return states[0]
        return State(torch.cat([state.out for state in states]), torch.cat([state.lse for state in states], dim=1))

    def _selected_tile(self, q: Tensor, k: Tensor, selection: LayerSelection, q_offset: int) -> _TileParts:
        """The tile's own selections, with their numbers; they are counted here."""
        from longbatch.attention.patterns import select_tile
        from longbatch.attention.patterns.base import on_device

        found = select_tile(
            q,
            k,
            [self.patterns.heads[place] for place in self._by_tile],
            shared=self.patterns.shared,
            scale=self.scale,
            q_offset=q_offset,
            selections=self._by_tile,
            summaries=selection.summaries,
        )
        for part in found:
            pairs = part.selected.pairs(q_offset, q_offset + q.shape[0], k.shape[0])
            selection.pairs_each.index_add_(0, on_device(part.selections, k.device), pairs)
        return [(part.selections, part.selected) for part in found]

    # ------------------------------------------------------------------------------------- by masks

    def _with_masks(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ranges: tuple[Ranges, Any] | None,
        tile: _TileParts,
        q_offset: int,
    ) -> State:
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        parts: list[tuple[Sequence[int], Ranges | Blocks | Runs]] = [*tile]
        if ranges is not None:
            parts.append((self._ranges, ranges[0]))
        for places, selected in parts:
            for number, place in enumerate(places):
                heads = slice(place * self._heads_each, (place + 1) * self._heads_each)
                kv = place * self._heads_each * self._num_kv // self._num_heads
                own = slice(kv, kv + 1)
                state = _masked_rows(q[:, heads], k[:, own], v[:, own], selected, number, q_offset, self.scale)
                out[:, heads], lse[heads] = state
        return State(out, lse)

    # ------------------------------------------------------------------------------------- by kernels

    def _prepared(self, ranges: Ranges, k: Tensor, v: Tensor) -> Any:
        from longbatch_kernels.range_attention import prepare
        from longbatch_kernels.range_index import PackedPrompt

        start, stop = ranges.rows
        prompt = PackedPrompt(0, stop - start, start, 0, k.shape[0])
        return prepare(ranges, k, v, selections=[self._rows_of(self._ranges, 0)], prompts=[prompt])

    def _rows_of(self, places: Sequence[int], first: int) -> list[int]:
        """For each query head its selection's row in lists that hold these from row `first` on, or -1."""
        rows = [-1] * self._num_heads
        for number, place in enumerate(places):
            for head in range(place * self._heads_each, (place + 1) * self._heads_each):
                rows[head] = first + number
        return rows

    def _attend_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, places: Sequence[int], blocks: Blocks, q_offset: int, state: State
    ) -> None:
        """Into the state."""
        from longbatch_kernels.block_attention import block_attention

        heads, numbers = self._device_lists(tuple(places), q.device)
        block_attention(
            q,
            k,
            v,
            blocks.indices,
            blocks.counts,
            block_rows=blocks.block_rows,
            block_keys=blocks.block_keys,
            first_row=blocks.first_row,
            heads=heads,
            selections=numbers,
            q_offset=q_offset,
            scale=self.scale,
            share=self._heads_each,
            out=state.out,
            lse=state.lse,
        )

    def _attend_runs(
        self, q: Tensor, k: Tensor, v: Tensor, places: Sequence[int], runs: Runs, q_offset: int, state: State
    ) -> None:
        """Into the state: each run is a prompt of its own over the same keys."""
        from longbatch_kernels.range_attention import prepare, range_attention
        from longbatch_kernels.range_index import PackedPrompt

        stop = q_offset + q.shape[0]
        here = [run for run, (low, high) in enumerate(pairwise(runs.bounds)) if max(low, q_offset) < min(high, stop)]
        each = 2 * runs.columns[0].numel() * k.shape[2] * k.element_size()
        step = max(1, GATHERED_BYTES // max(each, 1))
        for first in range(here[0], here[-1] + 1, step):
            last = min(first + step, here[-1] + 1)
            prompts, selections = [], []
            for run in range(first, last):
                low, high = max(runs.bounds[run], q_offset), min(runs.bounds[run + 1], stop)
                prompts.append(PackedPrompt(low - q_offset, high - low, low, 0, k.shape[0]))
                selections.append(self._rows_of(places, (run - first) * len(places)))
            prepared = prepare(runs.ranges(first, last), k, v, selections=selections, prompts=prompts)
            range_attention(q, k, v, prepared, scale=self.scale, out=state.out, lse=state.lse)

    def _with_kernels(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ranges: tuple[Ranges, Any] | None,
        tile: _TileParts,
        q_offset: int,
    ) -> State:
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        if ranges is not None:
            from longbatch_kernels.range_attention import range_attention

            range_attention(q, k, v, ranges[1], scale=self.scale, q_offset=q_offset, out=out, lse=lse)
        state = State(out, lse)
        for places, selected in tile:
            if isinstance(selected, Blocks):
                self._attend_blocks(q, k, v, places, selected, q_offset, state)
            else:
                self._attend_runs(q, k, v, places, selected, q_offset, state)
        return state

    def _make_lists(self, places: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """The query heads of some selections, and for each of them the selection's place among those."""
        each = self._heads_each
        heads = [head for place in places for head in range(place * each, (place + 1) * each)]
        numbers = [number for number in range(len(places)) for _ in range(each)]
        return (
            torch.tensor(heads, dtype=torch.int32, device=device),
            torch.tensor(numbers, dtype=torch.int32, device=device),
        )


def _has_kernels(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype != torch.float32


def _at(selection: LayerSelection, row: int) -> tuple[Ranges, Any] | None:
    """The ranges that hold for a row."""
    return next((found for found in selection.ranges if found[0].rows[0] <= row < found[0].rows[1]), None)


def _masked_rows(
    q: Tensor, k: Tensor, v: Tensor, selected: Ranges | Blocks | Runs, number: int, q_offset: int, scale: float
) -> State:
    """Queries [n, h, D] of one selection over its one key head [N, 1, D], a bounded number of rows at a time. Keys that
    none of the rows sees are left out."""
    states = []
    rows = max(1, min(MASK_ROWS, MASK_ENTRIES // min(k.shape[0], q_offset + q.shape[0])))
    for low in range(0, q.shape[0], rows):
        part = q[low : low + rows]
        start = q_offset + low
        num_keys = min(k.shape[0], start + part.shape[0])
        seen = selected.mask(number, start, start + part.shape[0], num_keys)
        keys, values = k[:num_keys], v[:num_keys]
        wanted = seen.any(0).nonzero()[:, 0]
        if wanted.shape[0] < num_keys:
            keys, values, seen = keys[wanted], values[wanted], seen[:, wanted]
        if not wanted.shape[0]:
            states.append(State(torch.zeros_like(part), part.new_full(part.shape[1::-1], float("-inf")).float()))
            continue
        blind = ~seen.any(1)
        some_blind = bool(blind.any())
        if some_blind:
            seen = seen | blind[:, None]
        bias = torch.where(seen, 0.0, float("-inf")).to(q.dtype)
        out, lse = masked(part, keys, values, bias, scale=scale)
        if some_blind:
            out = out.masked_fill(blind[:, None, None], 0.0)
            lse = lse.masked_fill(blind, float("-inf"))
        states.append(State(out, lse))
    if len(states) == 1:
        return states[0]
    return State(torch.cat([state.out for state in states]), torch.cat([state.lse for state in states], dim=1))
