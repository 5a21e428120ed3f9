"""`longbatch bench resume`: what stands around the engine, by itself.

A million short rows go through supervisor, worker, journal and parts with an engine that answers at once, on a disk
that takes 20 ms longer for every fsync. Then a fresh process finds out what is left of the finished folder, which is
nothing. The limits are those that the design sets: 5,000 rows a second; 20 seconds and 1 GB.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from longbatch.bench.process import in_child, peak_bytes, say
from longbatch.bench.report import Measurement
from longbatch.config import Settings

NUM_ROWS = 1_000_000
LEAST_ROWS_PER_SECOND = 5000.0
MOST_SECONDS = 20.0
MOST_BYTES = 1e9


@dataclass(frozen=True, slots=True)
class Observed:
    """What a process did. checked: whether it found what it should."""

    seconds: float
    peak_bytes: int
    checked: bool


def measure(num_rows: int = NUM_ROWS) -> list[Measurement]:
    """Both, on one folder, which needs some 1 GB for a million rows."""
    from longbatch.models.bundled import sample_weights

    model_dir = sample_weights(say)
    with tempfile.TemporaryDirectory(prefix="longbatch-bench-") as name:
        folder = Path(name)
        write_rows(folder, num_rows)
        say(f"running {num_rows:,} rows without a model")
        ran = in_child(run_rows, folder, model_dir, num_rows)
        say("finding out what is left of them")
        decided = in_child(decide, folder, model_dir, num_rows)
    rate, case = num_rows / ran.seconds, f"{num_rows:,} finished rows"
    share = decided.seconds / MOST_SECONDS
    memory = decided.peak_bytes / MOST_BYTES
    return [
        Measurement(
            "fsync of 20 ms", "speed", rate, "rows/s", "5,000 rows/s", rate / LEAST_ROWS_PER_SECOND, ran.checked
        ),
        Measurement(case, "deciding what is left", decided.seconds, "s", "20 s", share, decided.checked),
        Measurement(case, "peak memory", decided.peak_bytes / 1e6, "MB", "1,000 MB", memory, decided.checked),
    ]


def write_rows(folder: Path, num_rows: int) -> None:
    """The manifest."""
    with (folder / "manifest.jsonl").open("w", encoding="utf-8") as file:
        for row in range(num_rows):
            file.write(json.dumps({"id": f"row-{row}", "prompt": f"Is {row} an even number?"}) + "\n")


def run_rows(folder: Path, model_dir: Path, num_rows: int) -> Observed:
    """A whole run. Its seconds are those from the first wave on until the last row was journaled and published."""
    import pyarrow.parquet as pq

    from longbatch.bench.null_engine import slow_disk
    from longbatch.run.execute import execute

    slow_disk()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        engine = "longbatch.bench.null_engine:load_on_slow_disk"
        execute(replace(_settings(folder, model_dir), json=True), _sources(folder), engine=engine)
    table = pq.read_table(folder / "out" / "results", columns=["id", "text"])
    expected = [f"row-{row}" for row in range(num_rows)]
    answers = [f"answer to {name}" for name in expected]
    checked = table["id"].to_pylist() == expected and table["text"].to_pylist() == answers
    return Observed(json.loads(said.getvalue())["run"]["seconds"], peak_bytes(), checked)


def decide(folder: Path, model_dir: Path, num_rows: int) -> Observed:
    """What a run does before it starts a worker."""
    from longbatch.output import RunFolder, scan
    from longbatch.run.control import RetryMarks
    from longbatch.run.job import Job
    from longbatch.run.planning import get_index, remaining

    begin = time.monotonic()
    job = Job.open(_settings(folder, model_dir), _sources(folder), say)
    out = RunFolder.create_or_open(folder / "out", job.identity(), job.info())
    left = remaining(job, get_index(job, out), scan(out), RetryMarks.load(out.work), None)
    seconds = time.monotonic() - begin
    return Observed(seconds, peak_bytes(), left.num_finished == num_rows and not left.plan.totals.num_rows)


def _settings(folder: Path, model_dir: Path) -> Settings:
    return Settings(
        model=str(model_dir),
        out=folder / "out",
        gpus="0",
        prompt_format="raw",
        max_tokens=16,
        progress="none",
        quiet=True,
    )


def _sources(folder: Path) -> list[str]:
    return [str(folder / "manifest.jsonl")]
