"""`validate`: every fault at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from manifest_files import write_lines

from longbatch.errors import ManifestError
from longbatch.manifest import Manifest, validate


def test_report(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "m.jsonl",
        {"id": "a", "prompt": "x", "n": 2},
        *[{"id": f"b{i}", "prompt": "x", "max_tokens": -1} for i in range(7)],
        b"{",
        {"id": "a", "prompt": "x", "max_token": 1},
    )
    report = validate(Manifest.open([str(path)]))
    assert (report.num_rows, report.num_ok, report.num_failed, report.num_answers) == (10, 1, 9, 2)
    assert report.counts == {"invalid_value": 7, "invalid_json": 1, "duplicate_id": 1}
    assert [fault.id for fault in report.examples["invalid_value"]] == [f"b{i}" for i in range(5)]
    lines = list(report.render())
    assert lines[0] == "10 rows: 1 ok, 9 with errors; tokens not counted"
    assert lines[1] == "invalid_value: 7"
    assert lines[2] == "  m.jsonl:2: must be from 1 to 2147483647 [max_tokens]"
    assert lines[7] == "  ... and 2 more"
    assert lines[-1].startswith("warning: ")
    stored = json.loads(json.dumps(report.as_dict()))
    assert stored["errors"]["invalid_value"]["count"] == 7
    assert stored["errors"]["invalid_value"]["examples"][0]["field"] == "max_tokens"


def test_nothing_wrong(tmp_path: Path) -> None:
    report = validate(Manifest.open([str(write_lines(tmp_path / "m.jsonl", {"prompt": "x"}))]))
    assert list(report.render()) == ["1 rows: 1 ok, 0 with errors; tokens not counted"]
    assert report.as_dict()["errors"] == {}


def test_no_rows(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no row"):
        validate(Manifest.open([str(write_lines(tmp_path / "m.jsonl", b""))]))
