"""Waves of prompts for the engine, made one ahead in a thread, so that the device does not wait for the tokenizer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from longbatch.core import Fault, Prompt, Request, Result, RowKey
from longbatch.errors import RowError
from longbatch.plan import Wave
from longbatch.run.job import Job
from longbatch.run.planning import Remaining


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the run knows of a row that the engine works on. load and tokenize: seconds for reading it again from the
    manifest, and for its prompt."""

    entry: int
    wave: int
    load: float
    tokenize: float


class Feed:
    """Reads the rows of a plan wave by wave. Rows that turn out unreadable are in `failures`."""

    def __init__(self, job: Job, left: Remaining) -> None:
        self._job = job
        self._left = left
        self.loaded: dict[RowKey, Loaded] = {}
        self.failures: list[Result] = []

    def waves(self) -> Iterator[list[tuple[Request, Prompt]]]:
        """Each wave's rows with their prompts; the next wave is being read while one is worked on."""
        waves = self._left.plan.waves
        with ThreadPoolExecutor(1, thread_name_prefix="prompts") as pool:
            ahead = pool.submit(self._read, waves[0]) if len(waves) else None
            for following in range(1, len(waves) + 1):
                assert ahead is not None
                rows, loaded, failures = ahead.result()
                ahead = pool.submit(self._read, waves[following]) if following < len(waves) else None
                self.loaded.update(loaded)
                self.failures += failures
                yield rows

    def error_rows(self) -> Iterator[Result]:
        """Results for the entries that the index refuses, each read again for what it carries along."""
        index = self._left.index
        for entry in self._left.failed:
            source = self._source(entry)
            error = index.errors[entry]
            if error.type == "duplicate_id":
                # Reading one row alone does not show that its id was taken; the refused row keeps none.
                location = index.location(entry)
                source = Fault(source.row, None, location, error, source.carried, index.fingerprint(entry))
            result = Result.failed(source, error)
            result.attempt = int(self._left.attempts[entry]) + 1
            yield result

    def _source(self, entry: int) -> Request | Fault:
        index = self._left.index
        row, sample = int(index.keys.rows[entry]), int(index.keys.samples[entry])
        answers = self._job.manifest.read(index.location(entry), row)
        return answers[sample] if sample < len(answers) else answers[0]

    def _read(self, wave: Wave) -> tuple[list[tuple[Request, Prompt]], dict[RowKey, Loaded], list[Result]]:
        rows: list[tuple[Request, Prompt]] = []
        loaded: dict[RowKey, Loaded] = {}
        failures: list[Result] = []
        for size in wave.rows:
            entry = self._left.index.entry(size.row, size.sample)
            begin = time.monotonic()
            source = self._source(entry)
            read = time.monotonic()
            try:
                if isinstance(source, Fault):
                    raise source.error
                if source.fingerprint != self._left.index.fingerprint(entry):
                    raise RowError("unreadable_input", "the row changed while the run was under way; run it again")
                prompt = self._job.builder.build(source)
            except RowError as error:
                failures.append(Result.failed(source, error))
                continue
            rows.append((source, prompt))
            loaded[source.key] = Loaded(entry, wave.index, read - begin, time.monotonic() - read)
        return rows, loaded, failures
