"""Tri-shape: A-shape, and every key for the last `last` queries.

The last queries are those of the rows at hand, so a prompt that runs in chunks has some at the end of each.
Source: Li et al., SCBench, 2024 (arXiv 2412.10319).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from longbatch.attention.selection import NOWHERE, Ranges, window_ranges
from longbatch.sparsity import PatternSpec


class TriShape:
    """See `RangesPattern`; positions alone decide."""

    LAST_QUERIES = 0

    def select(
        self,
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
        start, stop = rows
        sinks = [spec.count("sinks") for spec in specs]
        dense_from = [max(start, stop - spec.count("last")) for spec in specs]
        cuts = sorted({start, stop, *dense_from})
        intervals = []
        for low, high in pairwise(cuts):
            windows = [
                NOWHERE if first <= low else spec.count("window") for spec, first in zip(specs, dense_from, strict=True)
            ]
            intervals.append(window_ranges(windows, sinks, (low, high), k.device))
        return tuple(intervals)
