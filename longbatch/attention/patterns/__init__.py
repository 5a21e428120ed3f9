"""Sparse patterns: one file each, named by `longbatch.sparsity.PATTERNS` and loaded when a layer first uses it.

A pattern never computes attention; it selects. The functions here serve layers whose heads have different patterns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

from longbatch.attention.patterns.base import RangesPattern, TilePattern
from longbatch.attention.selection import Blocks, Ranges, Runs, stacked
from longbatch.sparsity import PATTERNS, PatternSpec

__all__ = [
    "RangesPattern",
    "SelectedTile",
    "TilePattern",
    "last_queries",
    "ranges_pattern",
    "select_ranges",
    "select_tile",
    "summarize_keys",
    "tile_pattern",
]


def ranges_pattern(name: str) -> RangesPattern:
    """The pattern of that name, of the kind `ranges`."""
    pattern: RangesPattern = _pattern(name)
    return pattern


def tile_pattern(name: str) -> TilePattern:
    """The pattern of that name, of the kind `blocks` or `runs`."""
    pattern: TilePattern = _pattern(name)
    return pattern


@cache
def _pattern(name: str) -> Any:
    """An instance of the class that the pattern's module defines: a_shape -> AShape."""
    return getattr(import_module(PATTERNS[name].module), "".join(part.title() for part in name.split("_")))()


def last_queries(specs: Sequence[PatternSpec]) -> int:
    """How many of the last queries the ranges among these patterns ask for."""
    return max((ranges_pattern(spec.name).LAST_QUERIES for spec in specs if spec.kind == "ranges"), default=0)


@dataclass(frozen=True, slots=True)
class SelectedTile:
    """What a pattern selected for a tile: selection i of `selected` is the layer's selections[i]."""

    selections: tuple[int, ...]
    selected: Blocks | Runs


def select_ranges(
    q_last: Tensor,
    k: Tensor,
    specs: Sequence[PatternSpec],
    *,
    shared: bool,
    scale: float,
    q_offset: int,
    rows: tuple[int, int],
    selections: Sequence[int] | None = None,
) -> tuple[Ranges, ...]:
    """What patterns of the kind `ranges` select, whatever their names: the arguments and the answer are those of
    `RangesPattern.select`, entry i of the answer belongs to specs[i]."""
    chosen = range(len(specs)) if selections is None else selections
    parts = []
    for places in _batches(specs, ()):
        own = [specs[place] for place in places]
        found = ranges_pattern(own[0].name).select(
            q_last,
            k,
            own,
            shared=shared,
            scale=scale,
            q_offset=q_offset,
            rows=rows,
            selections=[chosen[place] for place in places],
        )
        parts.append((places, found))
    return parts[0][1] if len(parts) == 1 else stacked(parts, rows)


def summarize_keys(k: Tensor, specs: Sequence[PatternSpec]) -> tuple[Tensor | None, ...]:
    """What `select_tile` wants to know of the keys, for all tiles of queries that use them."""
    return tuple(
        tile_pattern(specs[places[0]].name).summarize(k, [specs[place] for place in places])
        for places in _uniform_batches(specs)
    )


def select_tile(
    q: Tensor,
    k: Tensor,
    specs: Sequence[PatternSpec],
    *,
    shared: bool,
    scale: float,
    q_offset: int,
    selections: Sequence[int] | None = None,
    summaries: Sequence[Tensor | None] | None = None,
) -> tuple[SelectedTile, ...]:
    """What patterns of the kinds `blocks` and `runs` select for a tile of queries: the arguments are those of
    `TilePattern.select`; summaries: what `summarize_keys` gave. One answer for each kind and size of blocks or runs."""
    chosen = range(len(specs)) if selections is None else selections
    batches = _uniform_batches(specs)
    answers = []
    for places, summary in zip(batches, summaries or [None] * len(batches), strict=True):
        own = [specs[place] for place in places]
        own_selections = [chosen[place] for place in places]
        selected = tile_pattern(own[0].name).select(
            q,
            k,
            own,
            shared=shared,
            scale=scale,
            q_offset=q_offset,
            selections=own_selections,
            summary=summary,
        )
        answers.append(SelectedTile(tuple(own_selections), selected))
    return tuple(answers)


def _uniform_batches(specs: Sequence[PatternSpec]) -> list[list[int]]:
    """Places of the specs that one call can serve."""
    batches = []
    for places in _batches(specs, ()):
        uniform = tile_pattern(specs[places[0]].name).UNIFORM
        batches += [[places[i] for i in part] for part in _batches([specs[place] for place in places], uniform)]
    return batches


def _batches(specs: Sequence[PatternSpec], uniform: Sequence[str]) -> list[list[int]]:
    """Places of the specs that agree in their name and in these parameters, in order of their first place."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for place, spec in enumerate(specs):
        found.setdefault((spec.name, *(spec[key] for key in uniform)), []).append(place)
    return list(found.values())
