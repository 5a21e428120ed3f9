"""The benchmarks' registry and the report that all of them write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longbatch.bench import BENCHES, Measurement, find, report
from longbatch.errors import DiskError, UsageError


def test_every_registered_benchmark_is_there() -> None:
    for name in BENCHES:
        assert callable(find(name))
    with pytest.raises(UsageError, match="there is no benchmark 'jobs'") as caught:
        find("jobs")
    assert caught.value.hint == f"one of: {', '.join(BENCHES)}"


def test_the_report_has_the_documented_form(tmp_path: Path) -> None:
    rows = [Measurement("case", "throughput", 12.5, "tokens/s", "rival", 1.5, True)]
    report.write_json("job", rows, tmp_path / "job.json")
    written = json.loads((tmp_path / "job.json").read_text())
    assert list(written) == ["bench", "date", "commit", "hardware", "versions", "rows"]
    assert written["rows"] == [
        {
            "case": "case",
            "metric": "throughput",
            "value": 12.5,
            "unit": "tokens/s",
            "against": "rival",
            "ratio": 1.5,
            "checked": True,
        }
    ]
    assert {"longbatch", "torch"} <= set(written["versions"])
    assert {"cpu", "memory_gib", "gpus"} == set(written["hardware"])
    with pytest.raises(DiskError):
        report.write_json("job", rows, tmp_path / "none" / "job.json")


def test_an_unchecked_row_shows(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_table([Measurement("case", "throughput", 12.5, "tokens/s", None, None, False)])
    assert capsys.readouterr().out.split()[-1] == "NO"
