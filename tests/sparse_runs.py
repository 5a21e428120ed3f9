"""Rows long enough to run sparse, and what a run over them says of its attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_folders import results, words, write_manifest

SINKS = "a_shape:sinks=4,window=40"
LENGTHS = (300, 10, 260, 220, 40, 180, 140)
SPARSE: dict[str, Any] = {"attention": SINKS, "min_sparse_length": 100}


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    rows: list[dict[str, Any]] = [{"id": f"r{i}", "prompt": words(n, i)} for i, n in enumerate(LENGTHS)]
    rows += [
        {"id": "score", "task": "score", "prompt": words(200, 20)},
        {"id": "embed", "task": "embed", "prompt": words(190, 21)},
        {"id": "label", "task": "classify", "prompt": words(240, 22), "labels": ["w5", "w6 w7"]},
        {"id": "bad", "prompt": words(120, 23), "temperature": -1},
    ]
    return write_manifest(tmp_path / "manifest.jsonl", rows)


def by_id(out: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in results(out)}


def measured(out: Path) -> dict[str, float]:
    return {id: row["attention"]["gap"] for id, row in by_id(out).items() if row["attention"]["gap"] is not None}
