"""`longbatch bench soak` on a few rows: the real run, the errors that are to be, and memory that stays where it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from longbatch.bench import soak, soak_engine
from longbatch.bench.soak import Growth, Observed

NUM_ROWS = 1500
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("soak")


@pytest.fixture(scope="module")
def observed(folder: Path) -> Observed:
    return soak.run(folder, None, NUM_ROWS)


def test_every_kind_of_row_runs_and_fails_as_it_should(observed: Observed, folder: Path) -> None:
    assert observed.checked
    rows = pq.read_table(folder / "out" / "results", columns=["text", "embedding", "label", "logprobs", "error"])
    results = rows.to_pylist()
    assert len(results) == observed.num_results > NUM_ROWS
    for column in ("text", "embedding", "label", "logprobs"):
        assert sum(result[column] is not None for result in results) > 30
    errors = Counter(result["error"]["type"] for result in results if result["error"])
    assert errors.keys() >= {"invalid_value", "nonfinite_logits", "internal", "prompt_too_long", "invalid_type"}
    assert sum(errors.values()) == observed.num_errors


def test_a_worker_does_not_grow(observed: Observed) -> None:
    """With more slack than 10,000 rows need, because a heap grows in steps."""
    numbers = np.array([sample["rows"] for sample in observed.samples])
    assert numbers.tolist() == [*range(100, observed.samples[-1]["rows"] + 1, 100)]
    held = np.array([sample[soak_engine.WORKER] for sample in observed.samples], dtype=float)
    growth = Growth.of(numbers, held)
    assert growth.start > 50 * MIB
    assert growth.rise < 6 * MIB
    assert growth.most < 1.05 * growth.start


def test_what_grows_is_seen() -> None:
    numbers = np.arange(100, 2100, 100)
    held = np.full(len(numbers), 400e6)
    # The start may be as wild as it likes.
    held[:3] = 1e6, 9e9, 2e8
    steady = Growth.of(numbers, held)
    assert (steady.start, steady.most) == (400e6, 400e6)
    assert abs(steady.slope) < 1
    assert steady.holds
    leaking = Growth.of(numbers, held + 10e3 * numbers)
    assert leaking.slope == pytest.approx(10e6)
    assert leaking.rise == pytest.approx(15e6)
    assert not leaking.holds
    once = held.copy()
    once[10] *= 1.1
    assert not Growth.of(numbers, once).holds


def test_the_table_says_what_grows(observed: Observed) -> None:
    samples = [{"rows": n, "steady": 1000 * MIB, "leaking": 1000 * MIB + 50_000 * n} for n in range(100, 2000, 100)]
    rows = soak.compare(Observed(2.0, samples, 1900, 7, True))
    assert {row.case for row in rows if not row.checked} == {"leaking"}
    by_metric = {row.metric: row for row in rows if row.case == "leaking"}
    assert by_metric["growth per 1,000"].value == pytest.approx(50_000)
    assert by_metric["most after"].against == "at 500 results"
    assert not any(row.checked for row in soak.compare(replace(observed, checked=False)))
