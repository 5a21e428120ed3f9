"""`longbatch bench decode` at small size: every figure is there, and what is wrong is not counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from longbatch.bench import decode
from longbatch.bench.llama import LlamaShape
from longbatch.bench.prefill import Model
from longbatch.errors import DeviceError, UsageError

SHAPE = LlamaShape(
    hidden=64, intermediate=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, vocab=97, max_length=4096
)
MODEL = Model(SHAPE, torch.float32)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "STEPS", 3)
    monkeypatch.setattr(decode, "WARM_STEPS", 2)
    monkeypatch.setattr(decode, "PROFILED_STEPS", 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_needs_a_gpu() -> None:
    with pytest.raises(DeviceError, match="CUDA"):
        list(decode.measure())


def test_cases() -> None:
    assert decode.parse_cases("1x1M:fp8, 32x8K") == [decode.Case(1, 1 << 20, "fp8"), decode.Case(32, 8192, "auto")]
    assert len(decode.parse_cases(decode.CASES)) == 4


@pytest.mark.parametrize("text", ["", "32", "0x8K", "8x5", "1x8K:fp99", "x8K", "1x8K:auto,"])
def test_cases_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--cases"):
        decode.parse_cases(text)


@pytest.mark.parametrize("text", ["3x200:auto", "2x129:fp8,1x64:fp8"])
def test_every_figure_is_there(text: str, tmp_path: Path) -> None:
    cases = decode.parse_cases(text)
    rows = list(decode.compare(MODEL, cases, CPU, tmp_path / "trace.json"))
    assert all(row.checked for row in rows)
    bandwidth = rows[0].value
    for case in cases:
        own = {row.metric: row for row in rows if row.case == case.name}
        assert own.keys() == {"attention", "step", "rate"}
        assert own["attention"].value < 1e-5
        assert own["rate"].value == pytest.approx(case.rows / own["step"].value)
        (bound,) = (row for row in rows if row.case == f"{decode.BOUND}, {case.name}")
        assert own["step"].ratio == pytest.approx(bound.value / own["step"].value)
        kv_bytes = case.rows * (case.context - 4.5) * SHAPE.num_kv_per_token * (4 if case.kv == "auto" else 1)
        assert bound.value * bandwidth == pytest.approx(4 * SHAPE.num_read_in_decode + kv_bytes, rel=0.01)
    assert len(list(tmp_path.glob("trace*.json"))) == len(cases)
    for path in tmp_path.glob("trace*.json"):
        assert json.loads(path.read_text())["traceEvents"]


def test_a_wrong_result_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MOST_ERROR", -1.0)
    rows = list(decode.compare(MODEL, decode.parse_cases("2x100"), CPU))
    assert {row.metric: row.checked for row in rows if row.case.startswith("2 x")} == {
        "attention": False,
        "step": False,
        "rate": False,
    }


def test_gaps() -> None:
    assert decode.gaps([(0, 4), (1, 2), (6, 8), (8, 10)]) == (0.2, 2.0)
    assert decode.gaps([(3, 5)]) == (0.0, 0.0)
