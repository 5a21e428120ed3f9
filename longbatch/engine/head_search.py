"""The search for one head, or for a kv group that shares a selection: which candidate is tried next, and which wins.

It knows prices and errors and computes neither attention nor tensors. Candidates lie on a grid of budgets: one that a
failed one covers is taken to fail too, and one that covers a good one costs at least as much. So each trial is the
middle of what is left, by price, and takes many others with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longbatch.models.spec import LayerSpec
from longbatch.plan.candidates import covers
from longbatch.plan.sparse_cost import causal_pairs, density, selection_seconds
from longbatch.plan.sparse_rates import SparseRates
from longbatch.sparsity import PatternSpec

DENSE = PatternSpec.make("dense")
# A candidate that is predicted to save less than this share of the best one's time is not worth a trial.
LEAST_SAVING = 0.05


@dataclass(frozen=True, slots=True)
class Pricing:
    """Seconds of one selection of a layer over the documents of a search. lengths: of the documents, in the order in
    which they are tried. shared: one selection for each kv group."""

    lengths: tuple[int, ...]
    layer: LayerSpec
    rates: SparseRates
    shared: bool

    def seconds(self, spec: PatternSpec, shares: Sequence[float]) -> float:
        """Over the first len(shares) documents, with the density on each of them."""
        heads = self.layer.num_heads // self.layer.num_kv_heads if self.shared else 1
        return sum(
            selection_seconds(
                spec, length, self.layer.head_dim, self.rates, heads=heads, shared=self.shared, share=share
            )
            for length, share in zip(self.lengths, shares, strict=False)
        )

    def expected(self, spec: PatternSpec, num_documents: int | None = None) -> float:
        """Over the first documents, or all of them, with densities that are predicted."""
        return self.seconds(spec, [density(spec, length) for length in self.lengths[:num_documents]])


@dataclass(frozen=True, slots=True)
class Trial:
    """What a candidate did. errors: of each query head that uses the selection, the worst document's. shares: density
    on each document tried; a candidate that fails on one is not tried on those after it. seconds: predicted with these
    densities, for these documents."""

    spec: PatternSpec
    errors: tuple[float, ...]
    shares: tuple[float, ...]
    seconds: float

    @property
    def error(self) -> float:
        """The worst query head's."""
        return max(self.errors)

    def density(self, lengths: Sequence[int]) -> float:
        """Selected over causal pairs of the documents tried; lengths: of all documents."""
        pairs = [causal_pairs(length) for length in lengths[: len(self.shares)]]
        return sum(share * count for share, count in zip(self.shares, pairs, strict=True)) / sum(pairs)


class HeadSearch:
    """The candidates of one selection. limits: the largest error allowed of each query head that uses it."""

    def __init__(self, candidates: Sequence[PatternSpec], pricing: Pricing, limits: Sequence[float]) -> None:
        self._pricing = pricing
        self._limits = limits
        shares = (1.0,) * len(pricing.lengths)
        self.best = Trial(DENSE, (0.0,) * len(limits), shares, pricing.seconds(DENSE, shares))
        self._trials = [self.best]
        self._expected = {spec: pricing.expected(spec) for spec in candidates}
        self._left = list(candidates)
        # By pattern, how much more its latest trial cost than predicted: how keys cluster is the head's own.
        self._factors: dict[str, float] = {}
        # Patterns that failed with every budget tried.
        self._doubtful: set[str] = set()

    def next(self) -> PatternSpec | None:
        """The candidate to try now, the same until `record` is called; None when the search is over."""
        prices = {spec: self._expected[spec] * self._factors.get(spec.name, 1.0) for spec in self._left}
        # The text breaks ties, so that the order of the grid decides nothing.
        order = sorted(self._left, key=lambda spec: (prices[spec], str(spec)))
        worth = [spec for spec in order if prices[spec] < self.best.seconds * (1 - LEAST_SAVING)]
        if not worth:
            return None
        middle = worth[len(worth) // 2]
        if middle.name not in self._doubtful:
            return middle
        # All that was tried of this pattern failed: its largest budget tells whether the others are worth a trial.
        return [spec for spec in worth if spec.name == middle.name][-1]

    def record(self, spec: PatternSpec, errors: Sequence[float], shares: Sequence[float]) -> None:
        """The outcome of a trial over the first len(shares) documents. errors: of each query head; infinite where its
        output was no number."""
        trial = Trial(spec, tuple(errors), tuple(shares), self._pricing.seconds(spec, shares))
        self._factors[spec.name] = trial.seconds / self._pricing.expected(spec, len(shares))
        self._trials.append(trial)
        passed = self.passes(trial)
        if passed:
            self._doubtful.discard(spec.name)
        elif not any(other.spec.name == spec.name and self.passes(other) for other in self._trials):
            self._doubtful.add(spec.name)
        self._left = [
            other
            for other in self._left
            if other != spec and not (covers(other, spec) if passed else covers(spec, other))
        ]
        if passed and trial.seconds < self.best.seconds:
            self.best = trial

    def passes(self, trial: Trial) -> bool:
        """Whether the errors are small enough on every document."""
        small = all(error <= limit for error, limit in zip(trial.errors, self._limits, strict=True))
        return small and len(trial.shares) == len(self._pricing.lengths)

    @property
    def runner_up(self) -> Trial | None:
        """The second cheapest trial that passed, dense included; if dense won, the trial with the smallest error; None
        where nothing else was tried."""
        others = [trial for trial in self._trials if trial is not self.best]
        passed = [trial for trial in others if self.passes(trial)]
        if passed:
            return min(passed, key=lambda trial: (trial.seconds, str(trial.spec)))
        return min(others, key=lambda trial: (trial.error, str(trial.spec)), default=None)
