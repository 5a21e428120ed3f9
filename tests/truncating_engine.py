"""An engine that cuts its model's file short once it has answered a row; run by test_streaming_files.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from longbatch.core import Result
from longbatch.engine import Engine
from longbatch.run.job import Job, WorkerSetup
from longbatch.run.worker import load_engine


def load(job: Job, setup: WorkerSetup) -> Engine:
    """The engine of a run."""
    engine = load_engine(job, setup)
    answer: Callable[..., Iterator[Result]] = engine.run

    def answer_one(*arguments: Any) -> Iterator[Result]:
        for result in answer(*arguments):
            yield result
            os.truncate(job.model_dir / "model.safetensors", 5000)

    engine.run = answer_one  # type: ignore[method-assign, assignment]
    return engine
