"""An engine without a model: every row is answered at once, so that what is measured is all that stands around it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from longbatch.core import Prompt, Request, Result
from longbatch.run.job import Job, WorkerSetup

FSYNC_SECONDS = 0.02


@dataclass(slots=True)
class NullCounters:
    """As the engine's."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class NullEngine:
    """Answers each row with its id."""

    num_decoding = 0
    spill = None

    def __init__(self) -> None:
        self.counters = NullCounters()

    def run(self, waves: Iterable[list[tuple[Request, Prompt]]], should_stop: Callable[[], bool]) -> Iterator[Result]:
        """Results in the order of the rows."""
        for wave in waves:
            for request, prompt in wave:
                result = Result(request.key, request.row, text=f"answer to {request.id}", finish_reason="stop")
                result.carried, result.fingerprint = request.carried, request.fingerprint
                result.usage.prompt_tokens = len(prompt.ids)
                self.counters.prefill_tokens += len(prompt.ids)
                yield result
            if should_stop():
                return


def load(job: Job, setup: WorkerSetup) -> NullEngine:
    """For `execute(..., engine=...)`."""
    return NullEngine()


def load_on_slow_disk(job: Job, setup: WorkerSetup) -> NullEngine:
    """The same in a worker whose disk takes 20 ms for every fsync."""
    slow_disk()
    return NullEngine()


def slow_disk() -> None:
    """Make every fsync of this process take 20 ms longer than the disk does."""
    fsync = os.fsync

    def slow(descriptor: Any) -> None:
        time.sleep(FSYNC_SECONDS)
        fsync(descriptor)

    os.fsync = slow  # type: ignore[assignment]
