"""The search for one head, or for a kv group that shares a selection: which candidate is tried next, and which wins.

It knows prices and errors and computes neither attention nor tensors. Candidates lie on a grid of budgets: one that
another one covers is taken to err at least as much, and one that covers another to cost at least as much. So each trial
bounds many others, and what cannot be better than the best one by its bounds is not tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from longbatch.engine.head_rule import Rule, Trial
from longbatch.models.spec import LayerSpec
from longbatch.plan.candidates import covers
from longbatch.plan.sparse_cost import causal_pairs, density, selection_seconds
from longbatch.plan.sparse_rates import SparseRates
from longbatch.sparsity import PatternSpec

DENSE = PatternSpec.make("dense")


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

    def expected(self, spec: PatternSpec, factor: float = 1.0) -> float:
        """Over all documents, with densities that are predicted, times a factor."""
        return self.seconds(spec, [min(1.0, factor * density(spec, length)) for length in self.lengths])

    def factor(self, spec: PatternSpec, shares: Sequence[float]) -> float:
        """How much denser than predicted a selection was on the first len(shares) documents, by pairs."""
        pairs = [causal_pairs(length) for length in self.lengths[: len(shares)]]
        predicted = sum(density(spec, length) * count for length, count in zip(self.lengths, pairs, strict=False))
        return sum(share * count for share, count in zip(shares, pairs, strict=True)) / predicted


@dataclass(slots=True)
class _Bound:
    """What trials tell of a candidate that is left: the least errors, and the least seconds, that it can come to."""

    errors: list[float]
    seconds: float = 0.0


class HeadSearch:
    """The candidates of one selection. rule: what makes one better than another; dense is one that it lets pass."""

    def __init__(self, candidates: Sequence[PatternSpec], pricing: Pricing, rule: Rule) -> None:
        self._pricing, self._rule = pricing, rule
        self._trials: list[Trial] = []
        self.best = self._tried(DENSE, (0.0,) * rule.num_heads, (1.0,) * len(pricing.lengths))
        self._left = {spec: _Bound([0.0] * rule.num_heads) for spec in candidates}
        # By kind, how much denser its latest trial was than predicted: how keys cluster is the head's own.
        self._factors: dict[str, float] = {}

    @property
    def limits(self) -> tuple[float, ...]:
        """Of each query head, the error above which a trial need not go on."""
        return self._rule.largest(self.best.cost)

    def next(self) -> PatternSpec | None:
        """The candidate to try now, the same until `record` is called; None when the search is over."""
        prices = {spec: self._price(spec) for spec in self._left}
        enough = self.best.cost * (1 - self._rule.least_saving(len(self._trials) - 1))
        worth = [spec for spec, bound in self._left.items() if self._rule.cost(bound.errors, prices[spec]) < enough]
        # The text breaks ties, so that the order of the grid decides nothing.
        worth.sort(key=lambda spec: (prices[spec], str(spec)))
        return self._rule.pick(worth, self._trials) if worth else None

    def _price(self, spec: PatternSpec) -> float:
        """Seconds that a candidate is taken to cost."""
        factor = self._factors.get(self._rule.kind(spec), self._rule.unseen(spec))
        return max(self._pricing.expected(spec, factor), self._left[spec].seconds)

    def record(self, spec: PatternSpec, errors: Sequence[float], shares: Sequence[float]) -> None:
        """The outcome of a trial over the first len(shares) documents. errors: of each query head; infinite where its
        output was no number."""
        trial = self._tried(spec, tuple(errors), tuple(shares))
        self._factors[self._rule.kind(spec)] = self._pricing.factor(spec, shares)
        del self._left[spec]
        for other, bound in self._left.items():
            if covers(spec, other):
                bound.errors = [max(pair) for pair in zip(bound.errors, errors, strict=True)]
            if trial.passed and covers(other, spec):
                bound.seconds = max(bound.seconds, trial.seconds)
        if trial.cost < self.best.cost:
            self.best = trial

    def _tried(self, spec: PatternSpec, errors: tuple[float, ...], shares: tuple[float, ...]) -> Trial:
        """Keep the outcome of a trial. What did not go through all documents may not be chosen."""
        seconds = self._pricing.seconds(spec, shares)
        whole = len(shares) == len(self._pricing.lengths)
        trial = Trial(spec, errors, shares, seconds, self._rule.cost(errors, seconds) if whole else math.inf)
        self._trials.append(trial)
        return trial

    @property
    def runner_up(self) -> Trial | None:
        """The second best trial that passed, dense included; if dense won, the trial with the smallest error; None
        where nothing else was tried."""
        others = [trial for trial in self._trials if trial is not self.best]
        passed = [trial for trial in others if trial.passed]
        if passed:
            return min(passed, key=lambda trial: (trial.cost, str(trial.spec)))
        return min(others, key=lambda trial: (trial.error, str(trial.spec)), default=None)
