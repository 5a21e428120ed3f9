"""What makes one candidate of a search better than another, and which to try next: two rules.

`Limited` takes the least time of those whose errors stay under a limit. `Traded` weighs errors against time, so that
a head spends time where it takes much off its error, and saves it where it takes off little. As all heads trade at one
rate, no other choice has a smaller sum of squared errors in the same total time (Lagrange).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from longbatch.plan.candidates import budget
from longbatch.plan.sparse_cost import causal_pairs
from longbatch.sparsity import PatternSpec

# A candidate that can save less than this share of the best one's cost is not worth a trial.
LEAST_SAVING = 0.05
# Of a trade: what each trial adds to the share that the next one must promise. Where costs are flat, hundreds of
# candidates are all but the best one, and proving that none is better would take a trial of most.
SAVING_PER_TRIAL = 0.004
# How much less dense than predicted a selection may be that the data decide, while none of its kind was tried: the
# share of keys that hold most of the mass is a tenth in one head and nearly all in another.
UNSEEN = 1 / 8


@dataclass(frozen=True, slots=True)
class Trial:
    """What a candidate did. errors: of each query head that uses the selection, the worst document's. shares: density
    on each document tried; a candidate that fails on one is not tried on those after it. seconds: predicted with these
    densities, for these documents. cost: by the rule; infinite where the candidate may not be chosen."""

    spec: PatternSpec
    errors: tuple[float, ...]
    shares: tuple[float, ...]
    seconds: float
    cost: float

    @property
    def error(self) -> float:
        """The worst query head's."""
        return max(self.errors)

    @property
    def passed(self) -> bool:
        """Whether it may be chosen."""
        return self.cost < math.inf

    def density(self, lengths: Sequence[int]) -> float:
        """Selected over causal pairs of the documents tried; lengths: of all documents."""
        pairs = [causal_pairs(length) for length in lengths[: len(self.shares)]]
        return sum(share * count for share, count in zip(self.shares, pairs, strict=True)) / sum(pairs)


@dataclass(frozen=True, slots=True)
class Limited:
    """The least time among those within a limit. limits: the largest error allowed of each query head."""

    limits: tuple[float, ...]

    def of(self, heads: slice) -> Limited:
        """The rule for some of the query heads."""
        return Limited(self.limits[heads])

    @property
    def num_heads(self) -> int:
        return len(self.limits)

    def cost(self, errors: Sequence[float], seconds: float) -> float:
        """Seconds, infinite where an error is too large. It never falls when an error or the time grows."""
        return seconds if all(error <= limit for error, limit in zip(errors, self.limits, strict=True)) else math.inf

    def largest(self, best: float) -> tuple[float, ...]:
        """The errors above which a candidate cannot come to a cost below `best`."""
        return self.limits

    def least_saving(self, num_trials: int) -> float:
        """The share of the best one's cost that a candidate must be able to save after so many trials."""
        return LEAST_SAVING

    def kind(self, spec: PatternSpec) -> str:
        """What a candidate has in common with those that differ from their predicted density as it does."""
        return spec.name

    def unseen(self, spec: PatternSpec) -> float:
        """The share of its predicted density that a candidate may have while none of its kind was tried."""
        return 1.0

    def pick(self, worth: Sequence[PatternSpec], trials: Sequence[Trial]) -> PatternSpec:
        """The next trial, of candidates in the order of their prices: the middle one, for one that fails takes all that
        it covers with it, and one that passes all that cover it."""
        middle = worth[len(worth) // 2]
        tried = [trial for trial in trials if trial.spec.name == middle.name]
        if not tried or any(trial.passed for trial in tried):
            return middle
        # All that was tried of this pattern failed: its largest budget tells whether the others are worth a trial.
        return [spec for spec in worth if spec.name == middle.name][-1]


@dataclass(frozen=True, slots=True)
class Traded:
    """The least sum of squared errors and time. weights: of each query head, what its error is multiplied by. unit:
    seconds of one head that count as much as a weighted error of 1."""

    weights: tuple[float, ...]
    unit: float

    def of(self, heads: slice) -> Traded:
        """The rule for some of the query heads."""
        return replace(self, weights=self.weights[heads])

    @property
    def num_heads(self) -> int:
        return len(self.weights)

    def cost(self, errors: Sequence[float], seconds: float) -> float:
        """The sum over query heads; infinite where the root mean square of the weighted errors is above 1. It never
        falls when an error or the time grows."""
        weighted = [error * weight for error, weight in zip(errors, self.weights, strict=True)]
        squares = sum(one * one for one in weighted)
        return squares + seconds / self.unit if squares <= self.num_heads else math.inf

    def largest(self, best: float) -> tuple[float, ...]:
        """The errors above which a candidate cannot come to a cost below `best`, whatever its time."""
        most = math.sqrt(min(best, self.num_heads))
        return tuple(most / weight for weight in self.weights)

    def least_saving(self, num_trials: int) -> float:
        """The share of the best one's cost that a candidate must be able to save after so many trials."""
        return max(LEAST_SAVING, SAVING_PER_TRIAL * num_trials)

    def kind(self, spec: PatternSpec) -> str:
        """What a candidate has in common with those that differ from their predicted density as it does."""
        return spec.name if budget(spec) else f"{spec.name}, by the data"

    def unseen(self, spec: PatternSpec) -> float:
        """The share of its predicted density that a candidate may have while none of its kind was tried."""
        return 1.0 if budget(spec) else UNSEEN

    def pick(self, worth: Sequence[PatternSpec], trials: Sequence[Trial]) -> PatternSpec:
        """The next trial, of candidates in the order of their prices. Kinds take turns, for the best of one rules out
        most of the others. An expensive one first: its small errors are a good cost already, and bound all it covers.
        """
        tried = Counter(self.kind(trial.spec) for trial in trials)
        turn = min({self.kind(spec) for spec in worth}, key=lambda kind: (tried[kind], kind))
        own = [spec for spec in worth if self.kind(spec) == turn]
        return own[len(own) * 3 // 4]


Rule = Limited | Traded
