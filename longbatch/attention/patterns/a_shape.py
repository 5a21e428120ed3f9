"""A-shape: the first `sinks` keys, and the `window` keys up to the query, itself included.

Source: Xiao et al., StreamingLLM, 2023 (arXiv 2309.17453); named A-shape in MInference 1.0, 2024 (arXiv 2407.02490).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longbatch.attention.selection import Ranges, window_ranges
from longbatch.sparsity import PatternSpec


class AShape:
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
        windows = [spec.count("window") for spec in specs]
        sinks = [spec.count("sinks") for spec in specs]
        return (window_ranges(windows, sinks, rows, k.device),)
