"""Packing rows into waves, longest first, and the plan that results.

A million rows stay small: they are kept as columns, and a wave's `RowSize`s are made when the wave is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from longbatch.core import RowSize
from longbatch.errors import RowError
from longbatch.models.spec import ModelSpec
from longbatch.plan.cost import CostModel
from longbatch.plan.memory import GIB, Budget
from longbatch.plan.peak import PAGE_TOKENS

ROW_DTYPE = np.dtype(
    [
        ("row", np.int64),
        ("sample", np.int32),
        ("prompt", np.int64),
        ("generated", np.int64),
        ("branch_tokens", np.int64),
    ]
)


@dataclass(frozen=True, slots=True)
class Wave:
    """Rows that go through the model together. tokens: read, not sampled. width: GPUs. seconds: predicted prefill."""

    index: int
    rows: tuple[RowSize, ...]
    tokens: int
    width: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows whose prompt has low to high tokens, both included."""

    low: int
    high: int
    num_rows: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the rows that will run. generated_tokens: the most that may be sampled. Seconds are predictions;
    decode_seconds holds if every row samples all it may."""

    num_rows: int
    num_waves: int
    num_refused: int
    prompt_tokens: int
    longest_prompt: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def seconds(self) -> float:
        """Predicted time of the whole run on one device."""
        return self.prefill_seconds + self.decode_seconds


@dataclass(frozen=True)
class Plan:
    """Ordered waves, and the rows that cannot run with the reason.

    table: the rows in running order, ROW_DTYPE [rows]. bounds: int64 [waves + 1], where each wave starts in it.
    wave_seconds: float64 [waves].
    """

    table: np.ndarray
    bounds: np.ndarray
    wave_seconds: np.ndarray
    refused: list[tuple[RowSize, RowError]]
    budget: Budget
    totals: Totals

    @property
    def waves(self) -> Sequence[Wave]:
        """The waves in running order."""
        return _Waves(self)

    @property
    def histogram(self) -> tuple[Bucket, ...]:
        """Prompt lengths by powers of two, without gaps."""
        return _histogram(self.table["prompt"])


class _Waves(Sequence[Wave]):
    """The waves of a plan, made one at a time."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __len__(self) -> int:
        return len(self._plan.bounds) - 1

    @overload
    def __getitem__(self, index: int) -> Wave: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Wave]: ...
    def __getitem__(self, index: int | slice) -> Wave | Sequence[Wave]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        start, stop = self._plan.bounds[index : index + 2]
        rows = self._plan.table[start:stop]
        tokens = int(rows["prompt"].sum() + rows["branch_tokens"].sum())
        seconds = float(self._plan.wave_seconds[index])
        return Wave(index, tuple(map(RowSize._make, rows.tolist())), tokens, 1, seconds)

    def __iter__(self) -> Iterator[Wave]:
        return (self[i] for i in range(len(self)))


def make_plan(
    sizes: Iterable[RowSize],
    spec: ModelSpec,
    budget: Budget,
    cost: CostModel,
    *,
    max_wave_seconds: float = 300.0,
) -> Plan:
    """Sort rows by length and cut them into waves of at most budget.wave_tokens tokens and max_wave_seconds.

    A row that exceeds either is a wave by itself; its prefill runs in chunks. A row whose prompt and answer exceed
    budget.kv_tokens is refused with `does_not_fit`. Rows of one length keep the order of the manifest.
    """
    table = np.fromiter(sizes, dtype=ROW_DTYPE)
    needed = _cache_tokens(table, min(budget.wave_tokens, budget.chunk_tokens or budget.wave_tokens))
    fits = needed <= budget.kv_tokens
    refused = [
        (size, _does_not_fit(size, budget, spec, cost.kv_bytes)) for size in map(RowSize._make, table[~fits].tolist())
    ]
    table = table[fits]
    table = table[np.argsort(-table["prompt"], kind="stable")]
    tokens = np.cumsum(table["prompt"] + table["branch_tokens"])
    seconds = np.cumsum(cost.prefill(table["prompt"], table["branch_tokens"]))
    bounds = _cut(tokens, seconds, budget.wave_tokens, max_wave_seconds)
    step_tokens = min(budget.wave_tokens, budget.chunk_tokens or budget.wave_tokens)
    num_steps = np.ceil(np.diff(np.concatenate(([0], tokens))[bounds]) / step_tokens)
    wave_seconds = cost.waves(np.diff(np.concatenate(([0.0], seconds))[bounds]), num_steps)
    totals = Totals(
        num_rows=len(table),
        num_waves=len(bounds) - 1,
        num_refused=len(refused),
        prompt_tokens=int(table["prompt"].sum()),
        longest_prompt=int(table["prompt"].max(initial=0)),
        generated_tokens=int(table["generated"].sum()),
        prefill_seconds=float(wave_seconds.sum()),
        decode_seconds=cost.decode(table["prompt"], table["generated"], budget.kv_tokens),
    )
    return Plan(table, bounds, wave_seconds, refused, budget, totals)


def _cache_tokens(table: np.ndarray, step_tokens: int) -> np.ndarray:
    """Tokens of K/V pages that each row holds: int64 [rows]. Rows that neither decode nor branch nor run in chunks
    need none."""
    whole: np.ndarray = table["prompt"] + table["generated"] + table["branch_tokens"]
    needs_pages = (table["generated"] > 0) | (table["branch_tokens"] > 0) | (table["prompt"] > step_tokens)
    pages = -(-whole // PAGE_TOKENS)
    tokens: np.ndarray = np.where(needs_pages, pages * PAGE_TOKENS, 0)
    return tokens


def _does_not_fit(size: RowSize, budget: Budget, spec: ModelSpec, kv_bytes: float) -> RowError:
    """The refusal of a row, with what would let it run."""
    needed = size.prompt + size.generated + size.branch_tokens
    spare = budget.kv_tokens - size.prompt - size.branch_tokens
    missing = (needed - budget.kv_tokens) * spec.kv_entries_per_token * kv_bytes / GIB
    mends = [f"use a device with {missing:.1f} GiB more memory", "shorten the prompt"]
    if 0 < spare < size.generated:
        mends.insert(0, f"lower max_tokens to {spare:,}")
    message = (
        f"prompt and answer need {needed:,} tokens of K/V cache and the device holds {budget.kv_tokens:,}: "
        + ", or ".join(mends)
    )
    return RowError("does_not_fit", message, field="max_tokens" if 0 < spare < size.generated else None)


def _cut(tokens: np.ndarray, seconds: np.ndarray, wave_tokens: int, max_seconds: float) -> np.ndarray:
    """Where waves start, for running sums over sorted rows: int64 [waves + 1]."""
    bounds = [0]
    while bounds[-1] < len(tokens):
        start = bounds[-1]
        tokens_before = tokens[start - 1] if start else 0
        seconds_before = seconds[start - 1] if start else 0.0
        stop = min(
            int(np.searchsorted(tokens, tokens_before + wave_tokens, side="right")),
            int(np.searchsorted(seconds, seconds_before + max_seconds, side="right")),
        )
        bounds.append(max(stop, start + 1))
    return np.array(bounds, dtype=np.int64)


def _histogram(prompt: np.ndarray) -> tuple[Bucket, ...]:
    if not len(prompt):
        return ()
    # The bucket of a length is its number of binary digits: 1, 2-3, 4-7, 8-15 and so on.
    digits = np.frexp(prompt.astype(np.float64))[1]
    first, last = int(digits.min()), int(digits.max())
    counts = np.bincount(digits - first)
    sums = np.bincount(digits - first, weights=prompt)
    return tuple(
        Bucket(2 ** (digit - 1), 2**digit - 1, int(counts[digit - first]), int(sums[digit - first]))
        for digit in range(first, last + 1)
    )
