"""The engine of a worker that writes down, after every so many results, what memory its process and its supervisor
hold."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longbatch.bench import soak_rows
from longbatch.core import Prompt, Request, Result
from longbatch.run.job import Job, WorkerSetup

if TYPE_CHECKING:
    from longbatch.engine import Engine

SAMPLES_FILE = "samples.jsonl"
EVERY = 100
SUPERVISOR, WORKER = "supervisor, resident", "worker, resident"
ALLOCATED, RESERVED = "device, allocated", "device, reserved"


class SampledEngine:
    """An engine as a worker sees it. samples: file of what was seen, a JSON object for each time."""

    def __init__(self, engine: Engine, samples: Path) -> None:
        self._engine = engine
        self._samples = samples
        self.counters = engine.counters
        self.spill = engine.spill

    @property
    def num_decoding(self) -> int:
        """See `Engine`."""
        return self._engine.num_decoding

    def fail_on(self, token: int) -> None:
        """Let steps with a token fail from now on."""
        embed: Any = self._engine.model.embed

        def fails(ids: Any) -> Any:
            if (ids == token).any():
                raise RuntimeError("a step of the soak that is to fail")
            return embed(ids)

        self._engine.model.embed = fails  # type: ignore[method-assign]

    def run(self, waves: Iterable[list[tuple[Request, Prompt]]], should_stop: Callable[[], bool]) -> Iterator[Result]:
        """See `Engine`."""
        with self._samples.open("a", encoding="utf-8") as file:
            for number, result in enumerate(self._engine.run(waves, should_stop), 1):
                if number % EVERY == 0:
                    print(json.dumps({"rows": number, **held()}), file=file, flush=True)
                yield result


def load(job: Job, setup: WorkerSetup) -> SampledEngine:
    """For `execute(..., engine=...)`. Samples lie beside the run folder."""
    from longbatch.run.worker import load_engine

    return SampledEngine(load_engine(job, setup), setup.out.with_name(SAMPLES_FILE))


def load_faulty(job: Job, setup: WorkerSetup) -> SampledEngine:
    """The same on the tiny model, where steps with a certain word fail as a kernel would."""
    engine = load(job, setup)
    engine.fail_on(soak_rows.FAULTY)
    return engine


def held() -> dict[str, int]:
    """Bytes that this process and its parent have resident, and this one on its GPU."""
    import torch

    found = {WORKER: resident(os.getpid()), SUPERVISOR: resident(os.getppid())}
    if torch.cuda.is_available():
        found |= {ALLOCATED: torch.cuda.memory_allocated(), RESERVED: torch.cuda.memory_reserved()}
    return found


def resident(process: int) -> int:
    """Bytes that a process has resident, by Linux's book."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
