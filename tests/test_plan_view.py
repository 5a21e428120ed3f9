"""How a plan is printed: its numbers, and what becomes of it in a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from longbatch.device import DeviceInfo
from longbatch.errors import RowError
from longbatch.plan import Budget, Plan, Totals
from longbatch.plan.packing import ROW_DTYPE
from longbatch.report.plan_view import NUM_EXAMPLES, NUM_WAVES, PlanView, Refusals, print_plan

CPU = DeviceInfo("cpu", 0, "Some CPU x 8", 64 << 30)


def make_plan(lengths: list[int], rows_per_wave: int = 2) -> Plan:
    """A plan of rows of these prompt lengths, longest first, 10 tokens generated each."""
    table = np.zeros(len(lengths), dtype=ROW_DTYPE)
    table["row"] = np.arange(len(lengths))
    table["prompt"] = sorted(lengths, reverse=True)
    table["generated"] = 10
    bounds = np.array([*range(0, len(lengths), rows_per_wave), len(lengths)])
    num_waves = len(bounds) - 1
    parts = (("weights", 3 << 30), ("K/V pages", 1 << 30))
    budget = Budget(wave_tokens=16_384, kv_tokens=65_536, tile_tokens=1024, parts=parts, memory_bytes=64 << 30)
    totals = Totals(len(lengths), num_waves, 0, sum(lengths), max(lengths, default=0), 10 * len(lengths), 90.0, 30.0)
    return Plan(table, bounds, np.full(num_waves, 5.0), [], budget, totals)


def printed(view: PlanView, capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_plan(view)
    captured = capsys.readouterr()
    assert captured.err == ""
    return [" ".join(line.split()) for line in captured.out.splitlines()]


def test_all_parts_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    refusals = Refusals()
    for row in range(7):
        refusals.add(f"row {row}", RowError("prompt_too_long", "9 tokens too many"))
    refusals.add("", RowError("missing_field", "m.jsonl:3: [x] has no prompt"))
    view = PlanView(make_plan([100, 200, 300, 5000, 90]), "a model", "float32", CPU, 15, 2, refusals, Path("out"))
    lines = printed(view, capsys)
    for line in (
        "model a model, float32",
        "K/V float32",
        "device Some CPU x 8",
        "rows 15 rows: 5 run in 3 waves, 2 are finished, 8 cannot run",
        "tokens 5,690 to read, at most 5,000 in a row; at most 50 to generate",
        "time about 2m00s: prefill 1m30s, decode at most 30s",
        "weights 3.0 GiB",
        "K/V pages 1.0 GiB 65,536 tokens",
        "together 4.0 GiB of 64.0 GiB",
        "1 2 5,300 5,000 5.0s",
        "3 1 90 90 5.0s",
        "prompt_too_long: 7",
        "row 0: 9 tokens too many",
        "... and 2 more",
        "missing_field: 1",
        "m.jsonl:3: [x] has no prompt",
        "stored in out; `longbatch run` with the same -o uses it",
    ):
        assert line in lines
    assert sum(line.endswith("tokens too many") for line in lines) == NUM_EXAMPLES
    bars = {line.split()[0]: line.count("█") for line in lines if "█" in line}
    assert bars == {"64": 2, "128": 2, "256": 2, "4,096": 30}


def test_many_waves_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(PlanView(make_plan([100] * 50, 1), "m", "float32", CPU, 50), capsys)
    assert f"... {50 - NUM_WAVES} more" in lines
    assert "rows 50 rows: 50 run in 50 waves" in lines


def test_the_price(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlanView(make_plan([100]), "m", "float32", CPU, 1, price_per_gpu_hour=3.0)
    assert "price about 0.10, at 3.00 an hour" in printed(view, capsys)
    assert view.as_dict()["price"] == 0.1
    free = PlanView(make_plan([100]), "m", "float32", CPU, 1, price_per_gpu_hour=0.0)
    assert "price about 0.00, at 0.00 an hour" in printed(free, capsys)
    unknown = PlanView(make_plan([100]), "m", "float32", CPU, 1)
    assert not any(line.startswith("price") for line in printed(unknown, capsys))


def test_the_format_of_keys_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlanView(make_plan([100]), "m", "bfloat16", CPU, 1, kv_dtype="fp8")
    assert "K/V fp8" in printed(view, capsys)
    assert view.as_dict()["kv_dtype"] == "fp8"


def test_nothing_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(PlanView(make_plan([]), "m", "float32", CPU, 3, 3), capsys)
    assert "rows 3 rows: 0 run in 0 waves, 3 are finished" in lines
    assert "waves" not in lines


def test_a_file_gets_whole_lines_without_escapes(root: Path) -> None:
    """Whatever COLUMNS and FORCE_COLOR say, and in ASCII where that is all the encoding has."""
    program = (
        "import sys; sys.path[:0] = ['.', 'kernels', 'tests']\n"
        "from test_plan_view import *\n"
        "refusals = Refusals()\n"
        "refusals.add('row 1', RowError('invalid_value', 'x' * 150))\n"
        "print_plan(PlanView(make_plan([100, 900]), 'm' * 60, 'float32', CPU, 2, 0, refusals))\n"
    )
    environment = {**os.environ, "COLUMNS": "40", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "x" * 150 in done.stdout
    assert f"{'m' * 60}, float32" in done.stdout
    assert "#" * 30 in done.stdout


def test_the_view_as_json() -> None:
    refusals = Refusals()
    refusals.add("row 1", RowError("does_not_fit", "too long"))
    view = PlanView(make_plan([100, 200, 300]), "m", "bfloat16", CPU, 4, refusals=refusals)
    table = json.loads(json.dumps(view.as_dict()))
    assert table["totals"]["prompt_tokens"] == 600
    assert table["kv_dtype"] == "bfloat16"
    assert table["totals"]["seconds"] == 120.0
    assert [wave["rows"] for wave in table["waves"]] == [2, 1]
    assert table["refused"] == {"does_not_fit": {"count": 1, "examples": ["row 1: too long"]}}
    assert table["memory"]["parts"] == {"weights": 3 << 30, "K/V pages": 1 << 30}
    assert sum(bucket["num_rows"] for bucket in table["histogram"]) == 3
