"""Dense: every key up to the query. A dense head in a layer whose other heads are sparse is this selection."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longbatch.attention.selection import NOWHERE, Ranges, window_ranges
from longbatch.sparsity import PatternSpec


class Dense:
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
        return (window_ranges([NOWHERE] * len(specs), [0] * len(specs), rows, k.device),)
