"""Rows of a wave, read again by their places and turned into prompts; and what the run adds to their results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from longbatch.core import Fault, Location, Prompt, Request, Result, RowKey
from longbatch.errors import RowError
from longbatch.run.job import Job


class Wanted(NamedTuple):
    """One entry of a wave. content: the row's fingerprint when it was counted. attempt: number of its result."""

    entry: int
    row: int
    sample: int
    location: Location
    content: bytes
    attempt: int


class Loaded(NamedTuple):
    """What the run knows of a row that the engine works on. load and tokenize: seconds for reading it and for its
    prompt."""

    entry: int
    wave: int
    attempt: int
    load: float
    tokenize: float


class WaveRows(NamedTuple):
    """A wave ready to run. failures: results of rows that could not be read again."""

    rows: list[tuple[Request, Prompt]]
    loaded: dict[RowKey, Loaded]
    failures: list[Result]


class Feed:
    """Reads rows for one engine. `read` may run in a thread of its own, one call at a time."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.loaded: dict[RowKey, Loaded] = {}

    def read(self, wave: int, wanted: Iterable[Wanted]) -> WaveRows:
        """The prompts of a wave. A row that cannot be read, or changed since it was counted, becomes a failure."""
        ready = WaveRows([], {}, [])
        for item in wanted:
            begin = time.monotonic()
            source = read_entry(self.job, item.location, item.row, item.sample)
            read = time.monotonic()
            try:
                if isinstance(source, Fault):
                    raise source.error
                if source.fingerprint != item.content:
                    raise RowError("unreadable_input", "the row changed while the run was under way; run it again")
                prompt = self.job.builder.build(source)
                ready.rows.append((source, prompt))
            except RowError as error:
                ready.failures.append(Result.failed(source, error))
            tokenized = time.monotonic() - read
            ready.loaded[source.key] = Loaded(item.entry, wave, item.attempt, read - begin, tokenized)
        for result in ready.failures:
            complete(result, ready.loaded[result.key])
        return ready

    def completed(self, results: Iterable[Result]) -> Iterator[tuple[Result, Loaded]]:
        """Results with what only the run knows filled in."""
        for result in results:
            loaded = self.loaded.pop(result.key)
            if result.attention_mode is None:
                result.attention_mode, result.attention_density = "dense", 1.0
            complete(result, loaded)
            yield result, loaded


def complete(result: Result, loaded: Loaded) -> None:
    """Where and when a result came from."""
    result.attempt, result.wave, result.width = loaded.attempt, loaded.wave, 1
    result.timing.load, result.timing.tokenize = loaded.load, loaded.tokenize


def read_entry(job: Job, location: Location, row: int, sample: int) -> Request | Fault:
    """One sample of a row, read again."""
    answers = job.manifest.read(location, row)
    return answers[sample] if sample < len(answers) else answers[0]
