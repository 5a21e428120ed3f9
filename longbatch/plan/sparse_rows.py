"""What the attention of rows that are prefilled sparse costs, for many rows at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from longbatch.models.spec import LayerSpec
from longbatch.plan.sparse_cost import dense_seconds, selection_seconds
from longbatch.plan.sparse_rates import SparseRates
from longbatch.sparsity import LayerPatterns, PatternSpec

# Lengths at which the cost is worked out, so many to each doubling; between them it is interpolated.
STEPS = 4
LONGEST = 1 << 26


@dataclass(frozen=True)
class SparseRows:
    """layers: those without a window, with their patterns. min_length: tokens from which a prompt is sparse."""

    layers: tuple[tuple[LayerSpec, LayerPatterns], ...]
    min_length: int
    rates: SparseRates

    def seconds(self, length: np.ndarray) -> np.ndarray:
        """Seconds of attention in these layers for each prompt: float64 [rows]."""
        lengths, seconds = self._table
        found: np.ndarray = np.exp(np.interp(np.log(np.maximum(length, 1.0)), lengths, seconds))
        return found * (length > 0)

    @cached_property
    def _table(self) -> tuple[np.ndarray, np.ndarray]:
        """Logarithms of lengths and of the seconds there."""
        lengths = np.unique(np.round(np.exp2(np.arange(0, np.log2(LONGEST), 1 / STEPS))).astype(np.int64))
        return np.log(lengths), np.log([self._at(int(length)) for length in lengths])

    def _at(self, length: int) -> float:
        total = 0.0
        for layer, patterns in self.layers:
            if patterns.is_dense:
                total += dense_seconds(length, layer, self.rates)
        for (spec, dim, heads, shared), number in self._selections.items():
            # Equal selections cost alike, so that each kind is worked out once.
            total += number * selection_seconds(spec, length, dim, self.rates, heads=heads, shared=shared)
        return total + self._num_sparse * self.rates.layer_seconds

    @cached_property
    def _num_sparse(self) -> int:
        return sum(not patterns.is_dense for _, patterns in self.layers)

    @cached_property
    def _selections(self) -> Counter[tuple[PatternSpec, int, int, bool]]:
        """How many selections of each kind: pattern, head dimension, query heads, whether these run together."""
        found: Counter[tuple[PatternSpec, int, int, bool]] = Counter()
        for layer, patterns in self.layers:
            if not patterns.is_dense:
                heads = layer.num_heads // len(patterns.heads)
                found.update((head, layer.head_dim, heads, patterns.shared) for head in patterns.heads)
        return found
