"""Rows that ran sparse, run once more: as they ran, and densely. How far are their log-probabilities apart?

What is compared: each token that a row scores; each token of an answer, given the tokens before it; the sum of each
label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from longbatch.core import TASKS, Prompt, Request, Result, RowKey
from longbatch.engine.engine import Engine, Row
from longbatch.engine.limits import Counters


class VerifyingEngine:
    """Takes the place of an engine and gives results without answers, with `attention_gap` (None where the row has
    nothing to compare).

    Each row runs as it would alone: what it shares with others in the sample would depend on the sample, and a shared
    beginning selects from its own last queries.
    """

    # No row keeps its state on the disk: a row is measured whole.
    spill = None
    # Both runs of a wave are over before the next one is drawn.
    num_decoding = 0

    def __init__(self, engine: Engine) -> None:
        engine.share = False
        self._engine = engine
        self._sparse = engine.attention

    @property
    def counters(self) -> Counters:
        """Those of the engine: both runs."""
        return self._engine.counters

    def run(self, waves: Iterable[list[Row]], should_stop: Callable[[], bool] = lambda: False) -> Iterator[Result]:
        """One result for each row, none for those under way when `should_stop` says so. Raises DeviceError."""
        for wave in waves:
            sparse = self._run([(_with_logprobs(request), prompt) for request, prompt in wave], True, should_stop)
            rows = {request.key: (request, prompt) for request, prompt in wave}
            yield from (_bare(result) for result in sparse.values() if result.error is not None)
            given = {key: result for key, result in sparse.items() if result.error is None}
            dense = self._run([self._repeated(*rows[key], result) for key, result in given.items()], False, should_stop)
            for key, result in dense.items():
                yield _compared(given[key], result)

    def _run(self, wave: list[Row], sparse: bool, should_stop: Callable[[], bool]) -> dict[RowKey, Result]:
        self._engine.attention = self._sparse if sparse else None
        return {result.key: result for result in self._engine.run([wave] if wave else [], should_stop)}

    def _repeated(self, request: Request, prompt: Prompt, result: Result) -> Row:
        """The row again; one that generated now scores its answer."""
        if not request.task.decodes:
            return _with_logprobs(request), prompt
        answer = np.array([entry.id for entry in result.logprobs or ()], dtype=np.int32)
        limit = request.sampling.max_tokens
        limit = self._engine.limits.max_tokens if limit is None else limit
        start, stop = len(prompt.ids), len(prompt.ids) + len(answer)
        ids = np.concatenate([prompt.ids, answer])
        scored = replace(request, task=TASKS["score"], sampling=replace(request.sampling, logprobs=0))
        return scored, replace(prompt, ids=ids, scored=(start, stop), reserved=limit - len(answer))


def _with_logprobs(request: Request) -> Request:
    """The row with the log-probability of each token and no alternatives."""
    return replace(request, sampling=replace(request.sampling, logprobs=0))


def _bare(result: Result) -> Result:
    """What is kept of a result: no text and no number of the answer."""
    return replace(result, text=None, reasoning=None, label=None, embedding=None, logprobs=None, carried={})


def _compared(sparse: Result, dense: Result) -> Result:
    """How the row ran sparse, and its gap; or why it did not run dense."""
    usage, timing = sparse.usage, sparse.timing
    usage.gpu_seconds += dense.usage.gpu_seconds
    timing.total = (timing.total or 0.0) + (dense.timing.total or 0.0)
    if dense.error is not None:
        return replace(_bare(dense), usage=usage, timing=timing)
    given = np.array([entry.logprob for entry in sparse.logprobs or ()], dtype=np.float64)
    again = np.array([entry.logprob for entry in dense.logprobs or ()], dtype=np.float64)
    gap = float(np.abs(given - again).mean()) if len(given) else None
    return replace(_bare(sparse), attention_gap=gap)
