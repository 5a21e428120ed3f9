"""`longbatch bench soak`: 10,000 small rows through one worker, whose memory must not grow once it is warm.

The real run: manifest, supervisor, worker, engine, journal, parts. Rows generate (greedy and drawn; stop strings,
penalties, log-probabilities, several samples), score, embed and classify; some cannot be read, and with the tiny model
some fail in the engine, alone or in the middle of a wave. The memory of both processes, and of the device, is noted
after every 100 results. What counts is the line fitted to it after the first 500, and the most that was seen from there
on.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longbatch import device
from longbatch.bench import soak_engine, soak_rows
from longbatch.bench.process import in_child, say, write_manifest
from longbatch.bench.report import Measurement
from longbatch.config import Settings

SEED = 20
NUM_ROWS = 10_000
SETTLED = 500
MAX_TOKENS = 8
# Of what was held at the start: how much the fitted line may rise until the end, and how much more may ever be held.
MOST_RISE, MOST_ABOVE = 0.01, 0.03
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Growth:
    """start: bytes at SETTLED results. slope: bytes for each 1,000 results after it, by a line fitted to all samples;
    rise: what that comes to by the end. most: bytes from there on."""

    start: float
    slope: float
    rise: float
    most: float

    @classmethod
    def of(cls, numbers: np.ndarray, held: np.ndarray) -> Growth:
        """numbers: results at each sample. held: bytes then. At least two are at SETTLED or after it."""
        numbers, held = numbers[numbers >= SETTLED], held[numbers >= SETTLED]
        slope = float(np.polyfit(numbers, held, 1)[0])
        return cls(float(held[0]), slope * 1000, slope * float(numbers[-1] - numbers[0]), float(held.max()))

    @property
    def holds(self) -> bool:
        """Whether nothing grows."""
        return self.rise <= MOST_RISE * self.start and self.most <= (1 + MOST_ABOVE) * self.start


@dataclass(frozen=True, slots=True)
class Observed:
    """What a run did. samples: one for each 100 results. num_errors: rows that failed; checked: whether these are the
    ones that should, and every row is there once."""

    seconds: float
    samples: list[dict[str, int]]
    num_results: int
    num_errors: int
    checked: bool


def measure(*, model: str | None = None, rows: int | None = None) -> Iterator[Measurement]:
    """The rows of the table. model: folder or id; a tiny random one if left out. rows: how many."""
    with tempfile.TemporaryDirectory(prefix="longbatch-bench-") as name:
        say(f"{rows or NUM_ROWS:,} rows")
        yield from compare(in_child(run, Path(name), model, rows or NUM_ROWS))


def run(folder: Path, model: str | None, num_rows: int) -> Observed:
    """A whole run, with this process as its supervisor."""
    import pyarrow.parquet as pq

    from longbatch.run.execute import execute

    if model is None:
        soak_rows.write_model(folder / "model", SEED)
        text = soak_rows.words(random.Random(SEED))
    else:
        text = soak_rows.prose(SEED)
    made = soak_rows.rows(num_rows, SEED, text, tiny=model is None)
    write_manifest([row for row, _ in made], folder / "manifest.jsonl")
    engine = soak_engine.load_faulty if model is None else soak_engine.load
    settings = Settings(
        model=model or str(folder / "model"),
        out=folder / "out",
        gpus="1" if device.gpu_infos() else "0",
        prompt_format="raw",
        max_tokens=MAX_TOKENS,
        wave_tokens=2048,
        # Few enough pages that all of them are used, and so resident, before it counts.
        kv_tokens=8192,
        decode_batch=32,
        abort_on_failures="off",
        allow_failures="100%",
        progress="none",
        quiet=True,
        json=True,
    )
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        execute(settings, [str(folder / "manifest.jsonl")], engine=f"{engine.__module__}:{engine.__name__}")
    table = pq.read_table(folder / "out" / "results", columns=["id", "status"])
    wanted = [row["id"] for row, _ in made for _ in range(row.get("n", 1))]
    found = dict(zip(table["id"].to_pylist(), table["status"].to_pylist(), strict=True))
    errors = {row["id"] for row, is_error in made if is_error}
    failed = {id for id, status in found.items() if status == "error"}
    samples = [json.loads(line) for line in (folder / soak_engine.SAMPLES_FILE).read_text().splitlines()]
    return Observed(
        json.loads(said.getvalue())["run"]["seconds"],
        samples,
        table.num_rows,
        len(failed),
        table["id"].to_pylist() == wanted and failed == errors,
    )


def compare(observed: Observed) -> list[Measurement]:
    """The rows of the table."""
    case, checked = f"{observed.num_results:,} results", observed.checked
    found = [
        Measurement(case, "errors, as they should be", observed.num_errors, "rows", None, None, checked),
        Measurement(case, "speed", observed.num_results / observed.seconds, "results/s", None, None, checked),
    ]
    numbers = np.array([sample["rows"] for sample in observed.samples])
    for what in observed.samples[0]:
        if what == "rows":
            continue
        growth = Growth.of(numbers, np.array([sample[what] for sample in observed.samples], dtype=float))
        start, limit = f"at {SETTLED} results", f"{MOST_RISE:.0%} by the end"
        share, holds = growth.rise / (MOST_RISE * growth.start), checked and growth.holds
        found += [
            Measurement(what, start, growth.start / MIB, "MiB", None, None, checked),
            Measurement(what, "most after", growth.most / MIB, "MiB", start, growth.most / growth.start, holds),
            Measurement(what, "growth per 1,000", growth.slope / 1e3, "KB", limit, share, holds),
        ]
    return found
