"""The benchmarks' registry and the report that all of them write."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from longbatch.bench import BENCHES, Measurement, find, report
from longbatch.errors import DiskError, UsageError

ROW = Measurement("case", "throughput", 12.5, "tokens/s", "rival", 1.5, True)
# The command with a benchmark that gives two rows and then takes its time.
ENDLESS = """
import sys, time, types
from longbatch.bench import BENCHES, Measurement
from longbatch.cli import main

def measure():
    for number in range(2):
        yield Measurement(f"case {number}", "speed", 3.0, "rows/s", None, None, True)
    time.sleep(600)

module = types.ModuleType("endless_bench")
module.measure = measure
sys.modules["endless_bench"] = module
BENCHES["endless"] = "endless_bench"
sys.exit(main(["bench", "endless", "--json", sys.argv[1]]))
"""


def test_every_registered_benchmark_is_there() -> None:
    for name in BENCHES:
        assert callable(find(name))
    with pytest.raises(UsageError, match="there is no benchmark 'jobs'") as caught:
        find("jobs")
    assert caught.value.hint == f"one of: {', '.join(BENCHES)}"


def test_the_report_has_the_documented_form(tmp_path: Path) -> None:
    report.write_json("job", [ROW], tmp_path / "job.json", complete=True)
    written = json.loads((tmp_path / "job.json").read_text())
    assert list(written) == ["bench", "date", "commit", "hardware", "versions", "complete", "rows"]
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
        report.write_json("job", [ROW], tmp_path / "none" / "job.json", complete=True)


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_stopped_benchmark_leaves_its_rows(root: Path, tmp_path: Path, how: signal.Signals, code: int) -> None:
    file = tmp_path / "result.json"
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(file)], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        limit = time.monotonic() + 60
        while not file.exists() or len(json.loads(file.read_text())["rows"]) < 2:
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < limit
            time.sleep(0.05)
        process.send_signal(how)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code
    written = json.loads(file.read_text())
    assert written["complete"] is False
    assert [row["case"] for row in written["rows"]] == ["case 0", "case 1"]
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    # A terminal that interrupts still gets the table.
    assert ("case 1" in out) == (how == signal.SIGINT)


def test_rows_are_in_the_file_before_the_next_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"

    def found() -> Iterator[Measurement]:
        for number in range(3):
            written = json.loads(file.read_text())
            assert (len(written["rows"]), written["complete"]) == (number, False)
            yield ROW

    assert report.recorded("job", found(), file) == [ROW] * 3
    assert json.loads(file.read_text())["complete"] is True
    assert capsys.readouterr().out.count("throughput") == 3


def test_no_measuring_for_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    def found() -> Iterator[Measurement]:
        pytest.fail("measured")
        yield ROW

    with pytest.raises(DiskError, match="cannot write"):
        report.recorded("job", found(), tmp_path / "none" / "job.json")


def test_a_pipe_gets_one_text(tmp_path: Path) -> None:
    script = "import sys; from longbatch.bench import report; report.recorded('job', [], report.Path('/dev/fd/1'))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert json.loads(done.stdout)["complete"] is True


def test_an_unchecked_row_shows(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_table([Measurement("case", "throughput", 12.5, "tokens/s", None, None, False)])
    assert capsys.readouterr().out.split()[-1] == "NO"
