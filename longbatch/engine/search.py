"""The search behind a profile: layer by layer, which pattern each head can run with.

Each layer sees the hidden states that the layers before it leave when they already run with their patterns. A trial
runs one candidate for every head that still looks for one, each its own, in one pass over each document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from longbatch.engine.head_error import Trials
from longbatch.engine.head_rule import Limited, Rule, Traded, Trial
from longbatch.engine.head_search import DENSE, HeadSearch, Pricing
from longbatch.engine.layer_pass import Document, LayerPass
from longbatch.engine.search_state import SearchState
from longbatch.models.decoder import Decoder
from longbatch.models.spec import LayerSpec
from longbatch.plan.candidates import candidates
from longbatch.plan.sparse_cost import dense_seconds
from longbatch.plan.sparse_rates import SparseRates
from longbatch.sparsity import HeadChoice, LayerChoices
from longbatch.sparsity.profile import Fields, layer_as_json, layer_from_json

# Queries that run at once. On a CPU a mask of so many rows stays small beside the keys of a long document.
TILE_ROWS = {"cpu": 1024, "cuda": 16384}


@dataclass(frozen=True, slots=True)
class LayerFound:
    """The outcome for a layer. seconds, dense_seconds: predicted for all documents together, with these choices and on
    the dense path. num_trials: passes over the documents that it took, 0 where patterns cannot be used."""

    choices: LayerChoices
    seconds: float
    dense_seconds: float
    num_trials: int


# Told after every trial: layer, trials of it so far.
Watch = Callable[[int, int], None]


class Search:
    """A search over documents: ids, int [N] of each. tolerance: by `measure`. `output`: the largest error of a head's
    attention output. `stream`: the same, times the head's influence, of the hidden states. `model`: the error of the
    hidden states that is worth a dense head's time; errors are traded against time at this rate. rates: of the device
    that times are predicted for. watch: see `Watch`. Raises UsageError for a damaged layer in the state, before it
    computes."""

    def __init__(
        self,
        model: Decoder,
        ids: Sequence[np.ndarray],
        tolerance: float,
        rates: SparseRates,
        state: SearchState,
        watch: Watch = lambda layer, num_trials: None,
        *,
        measure: str = "output",
    ) -> None:
        self._model = model
        self._tolerance, self._rates, self._measure = tolerance, rates, measure
        self._state = state
        self._watch = watch
        # A candidate that the longest document fails need not be tried on the others.
        self._ids = sorted(ids, key=len, reverse=True)
        self._lengths = tuple(len(one) for one in self._ids)
        self._candidates, _ = candidates(self._lengths)
        self._tile_rows = TILE_ROWS[model.device.type]
        self._storage = _storage(model, sum(self._lengths))
        self._saved = {
            index: _from_json(saved, spec)
            for index, spec in enumerate(model.spec.layers)
            if spec.is_plain and (saved := state.layer(index)) is not None
        }

    @torch.inference_mode()
    def run(self) -> Iterator[LayerFound]:
        """The outcome of every layer, in order; those that an earlier process finished come without a search."""
        documents = [Document(self._embedded(ids)) for ids in self._ids]
        for index, spec in enumerate(self._model.spec.layers):
            if index in self._saved:
                found = self._saved[index]
            elif spec.is_plain:
                found = self._search(index, documents)
                self._state.save_layer(index, _as_json(found))
            else:
                found = self._dense(spec, None, 0)
            yield found
            if index + 1 < len(self._model.spec.layers):
                patterns = found.choices.patterns
                for document in documents:
                    run = LayerPass(self._model, index, document, self._tile_rows)
                    run.advance(None if patterns.is_dense else patterns)

    def _embedded(self, ids: np.ndarray) -> torch.Tensor:
        """Hidden states [N, hidden] before the first layer."""
        model = self._model
        hidden = torch.empty((len(ids), model.spec.hidden_size), dtype=model.dtype, device=self._storage)
        for start in range(0, len(ids), self._tile_rows):
            part = torch.from_numpy(ids[start : start + self._tile_rows].astype(np.int64)).to(model.device)
            hidden[start : start + self._tile_rows] = model.embed(part)
        return hidden

    def _search(self, index: int, documents: Sequence[Document]) -> LayerFound:
        spec = self._model.spec.layers[index]
        trials = Trials(self._model, index, documents, self._tile_rows, self._storage)
        rule = self._rule(spec, trials)
        num_trials = 0
        ways: list[list[HeadSearch]] = []
        groups = spec.num_kv_heads < spec.num_heads and self._rates.sharing_pays
        for shared in (False, True) if groups else (False,):
            searches = self._begun(spec, shared, rule)
            ways.append(searches)
            # Every selection tries a candidate of its own in the same pass.
            while wanted := {at: one for at, search in enumerate(searches) if (one := search.next()) is not None}:
                limits = [limit for search in searches for limit in search.limits]
                outcomes = trials.run(wanted, shared=shared, limits=limits)
                for at, outcome in outcomes.items():
                    searches[at].record(wanted[at], outcome.errors, outcome.shares)
                num_trials += 1
                self._watch(index, num_trials)
        totals = [sum(search.best.cost for search in searches) for searches in ways]
        best = totals.index(min(totals))
        dense_seconds = self._dense_seconds(spec)
        if totals[best] >= rule.cost((0.0,) * spec.num_heads, dense_seconds):
            # Among sparse heads a dense one runs in their kernel; where all are dense they have a faster one.
            return self._dense(spec, ways[0], num_trials)
        heads = tuple(self._choice(search.best, search.runner_up) for search in ways[best])
        seconds = sum(search.best.seconds for search in ways[best])
        return LayerFound(LayerChoices(heads, best == 1), seconds, dense_seconds, num_trials)

    def _rule(self, spec: LayerSpec, trials: Trials) -> Rule:
        """What the search goes by in a layer, all its heads together."""
        if self._measure == "output":
            return Limited((self._tolerance,) * spec.num_heads)
        # A head that adds nothing may err as it likes.
        influences = [max(influence, 1e-9) for influence in trials.influences()]
        if self._measure == "stream":
            return Limited(tuple(self._tolerance / influence for influence in influences))
        # The same unit for one selection per head and per kv group, so that their costs compare.
        unit = Pricing(self._lengths, spec, self._rates, shared=False).seconds(DENSE, (1.0,) * len(self._lengths))
        return Traded(tuple(influence / self._tolerance for influence in influences), unit)

    def _begun(self, spec: LayerSpec, shared: bool, rule: Rule) -> list[HeadSearch]:
        """A search for each selection of a layer. rule: of all its query heads."""
        pricing = Pricing(self._lengths, spec, self._rates, shared)
        each = spec.num_heads // spec.num_kv_heads if shared else 1
        return [
            HeadSearch(self._candidates, pricing, rule.of(slice(head, head + each)))
            for head in range(0, spec.num_heads, each)
        ]

    def _dense(self, spec: LayerSpec, searches: Sequence[HeadSearch] | None, num_trials: int) -> LayerFound:
        """A layer that stays dense. searches: of its heads, where there were any: the best pattern that each could
        have run with is its runner-up."""
        seconds = self._dense_seconds(spec)
        heads = []
        for head in range(spec.num_heads):
            search = None if searches is None else searches[head]
            other = None
            if search is not None:
                other = search.runner_up if search.best.spec.is_dense else search.best
            heads.append(HeadChoice(DENSE, 0.0, 1.0, None if other is None else self._choice(other)))
        return LayerFound(LayerChoices(tuple(heads)), seconds, seconds, num_trials)

    def _dense_seconds(self, spec: LayerSpec) -> float:
        return sum(dense_seconds(length, spec, self._rates) for length in self._lengths)

    def _choice(self, trial: Trial, runner_up: Trial | None = None) -> HeadChoice:
        # An error that is no number has no place in a JSON file.
        error = _rounded(trial.error) if math.isfinite(trial.error) else None
        density = _rounded(trial.density(self._lengths))
        other = None if runner_up is None else self._choice(runner_up)
        return HeadChoice(trial.spec, error, density, other)


def _storage(model: Decoder, num_tokens: int) -> torch.device:
    """Where hidden states and dense outputs of all documents lie: on the model's device where they take at most half of
    its free memory, else in host memory."""
    if model.device.type == "cpu":
        return model.device
    widest = max(layer.num_heads * layer.head_dim for layer in model.spec.layers)
    needed = num_tokens * (model.spec.hidden_size + widest) * model.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(model.device)
    return model.device if needed <= free // 2 else torch.device("cpu")


def _rounded(value: float) -> float:
    """Six digits."""
    return float(f"{value:.6g}")


def _as_json(found: LayerFound) -> dict[str, Any]:
    return {
        **layer_as_json(found.choices),
        "seconds": found.seconds,
        "dense_seconds": found.dense_seconds,
        "num_trials": found.num_trials,
    }


def _from_json(saved: Fields, spec: LayerSpec) -> LayerFound:
    """What `_as_json` described. Raises UsageError naming the file and the field."""
    choices = layer_from_json(saved)
    if wrong := choices.wrong_count(spec.num_heads, spec.num_kv_heads):
        raise saved.fault("heads", wrong)
    seconds, dense_seconds = saved.number("seconds"), saved.number("dense_seconds")
    if seconds is None or dense_seconds is None:
        raise saved.fault("seconds" if seconds is None else "dense_seconds", "must be a number")
    return LayerFound(choices, seconds, dense_seconds, saved.take("num_trials", int))
