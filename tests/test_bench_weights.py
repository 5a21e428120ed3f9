"""`longbatch bench weights` at small size: every row is there, from host memory and from files; copies and kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from longbatch import models
from longbatch.bench import prefill, timeline, weights
from longbatch.bench.llama import SHAPES, LlamaShape
from longbatch.bench.report import Measurement
from longbatch.bench.weights import GIB, Model, Run
from longbatch.errors import DeviceError, UsageError
from longbatch.models.streaming import StreamedLayers

CPU = torch.device("cpu")
SHAPE = LlamaShape(64, 96, 5, 4, 2, 16, vocab=97, max_length=4096, family="qwen2")
MODEL = Model(SHAPE, torch.float32, CPU)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "WARM_TOKENS", 64)
    monkeypatch.setattr(weights, "UNIT", 32)
    monkeypatch.setattr(weights, "DISK_RESERVE", 0)


def rows_of(folder: Path) -> list[Measurement]:
    """Both places."""
    return list(weights.compare(MODEL, (64, 128, 256), folder, trace=folder / "t.json", from_disk=True, repeats=2))


def test_every_figure_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_layer_seconds", lambda model, lengths: iter([1.0, 2.0, 4.0]))
    monkeypatch.setattr(weights, "arrival_seconds", lambda decoder: 5 * 1.5)
    rows = rows_of(tmp_path)
    assert all(row.checked and row.value > 0 for row in rows)
    assert [row.value for row in rows if row.metric == "one layer"] == [1e3, 2e3, 4e3]
    for place in ("host", "disk"):
        own = {row.metric: row for row in rows if row.case == place}
        assert own["one layer arrives"].value == 1500
        assert own["rate"].value == pytest.approx(MODEL.layer_bytes / 1.5e9)
        assert own["break-even"].value == pytest.approx(96, abs=3)
        runs = [row for row in rows if row.case.endswith(f"break-even of {place}")]
        assert [row.case.split(",")[0] for row in runs] == ["resident", place] * 2
        assert [row.case.split(",")[2] for row in runs] == [" 96 tokens"] * 2 + [" 192 tokens"] * 2
        assert [row.against for row in runs] == [None, "resident"] * 2
        assert runs[1].ratio == runs[1].value / runs[0].value
    # Without a GPU there are no copies to hide, but a timeline all the same.
    assert not any("copies" in row.metric for row in rows)
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_what_is_measured_is_measured(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    assert all(row.checked for row in rows)
    assert [row.value > 0 for row in rows if row.metric == "one layer"] == [True] * 3


def test_a_break_even_beyond_all_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_layer_seconds", lambda model, lengths: iter([1.0, 2.0, 4.0]))
    monkeypatch.setattr(weights, "arrival_seconds", lambda decoder: 5 * 4.5)
    rows = rows_of(tmp_path)
    assert [row.value for row in rows if row.metric == "break-even lies above"] == [256, 256]
    assert not any(row.metric == "prefill" for row in rows)


def test_other_bits_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_layer_seconds", lambda model, lengths: iter([1.0, 2.0, 4.0]))
    monkeypatch.setattr(weights, "arrival_seconds", lambda decoder: 5 * 1.5)
    monkeypatch.setattr(weights, "SEED", 21)
    monkeypatch.setattr(Model, "random", lambda self, kind: model_of(self, 3 if kind == "host" else 4))
    rows = list(weights.compare(MODEL, (64, 128, 256), tmp_path, trace=None, from_disk=False, repeats=1))
    assert [row.checked for row in rows if row.case.startswith("host,")] == [False, False]


def model_of(model: Model, seed: int) -> models.decoder.Decoder:
    return models.random_weights(models.describe(model.shape.config()), torch.float32, CPU, seed)


def test_layers_from_files_arrive_one_by_one(tmp_path: Path) -> None:
    weights.llama.write_model(tmp_path / "model", SHAPE, "cpu", 1)
    disk = models.load(tmp_path / "model", torch.float32, CPU, weights="disk")
    assert isinstance(disk.layers, StreamedLayers)
    drawn: list[int] = []
    bring = disk.layers._source.bring
    disk.layers._source.bring = lambda index, slot: drawn.append(index) or bring(index, slot)  # type: ignore[method-assign]
    assert weights.arrival_seconds(disk) > 0
    # The one that was there at first comes again.
    assert drawn == [0, 1, 2, 3, 4, 0]
    before = [path.read_bytes() for path in sorted((tmp_path / "model").iterdir())]
    weights.drop_cache(tmp_path / "model")
    assert [path.read_bytes() for path in sorted((tmp_path / "model").iterdir())] == before


def test_all_runs_must_agree() -> None:
    one, same, other = Run(), Run(), Run()
    for _ in range(2):
        one.add(2.0, (torch.ones(3), torch.zeros(2)))
        same.add(1.0, (torch.ones(3), torch.zeros(2)))
    other.add(1.0, (torch.ones(3), torch.zeros(2)))
    assert one.outputs_equal(same)
    assert one.outputs_equal(other)
    other.add(0.5, (torch.ones(3), torch.tensor([0.0, 1e-30])))
    assert not one.outputs_equal(other)
    assert other.seconds == 0.5


def test_as_many_layers_as_fit() -> None:
    model = Model(SHAPES["qwen2.5-32b"], torch.bfloat16, CPU)
    assert model.layer_bytes == pytest.approx(0.975e9, rel=0.01)
    assert weights.num_fitting(model, 140 * GIB, 128 * GIB) >= 64
    assert 30 < weights.num_fitting(model, 141 * GIB, 48 * GIB) < 64
    assert 30 < weights.num_fitting(model, 80 * GIB, 256 * GIB) < 64
    with pytest.raises(DeviceError, match="fewer than 4 layers"):
        weights.num_fitting(model, 24 * GIB, 256 * GIB)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_needs_a_gpu() -> None:
    with pytest.raises(DeviceError, match="CUDA"):
        list(weights.measure())


def test_shapes_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match="--shape") as caught:
        list(weights.measure(shape="qwen"))
    assert "qwen2.5-32b" in str(caught.value.hint)


# ------------------------------------------------------------------------------------- timelines


def event(cat: str, name: str, ts: float, dur: float) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


def test_copies_beside_kernels() -> None:
    events = [
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0, 100),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 200, 50),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 0, 1000),
        event("kernel", "gemm", 40, 30),
        event("kernel", "gemm", 60, 30),
        event("kernel", "gemm", 95, 110),
        event("cpu_op", "aten::mm", 0, 1000),
        {"ph": "M", "name": "process_name"},
    ]
    found = timeline.overlap(events)
    assert found is not None
    # 40 to 90 and 95 to 100 of the first, 200 to 205 of the second.
    assert found == timeline.Overlap(150, 60)
    assert found.share == pytest.approx(0.4)
    assert timeline.overlap(events[3:]) is None


def test_spans_that_touch_are_one() -> None:
    assert timeline.merged([(3, 4), (0, 1), (1, 2), (5, 9), (6, 7)]) == [(0, 2), (3, 4), (5, 9)]


@pytest.mark.gpu
def test_a_gpu_shows_its_copies(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    host = torch.zeros(1 << 26, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=device)
    square = torch.ones(4096, 4096, device=device)

    def work() -> None:
        side = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            target.copy_(host, non_blocking=True)
        for _ in range(20):
            square @ square
        torch.cuda.synchronize()

    work()
    found = timeline.traced(work, tmp_path / "trace.json")
    assert found is not None
    assert 0 < found.hidden <= found.copies
