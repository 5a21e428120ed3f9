"""Devices and their remembered rates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from longbatch import device
from longbatch.device import DeviceInfo, Rates
from longbatch.errors import DeviceError

A_GPU = DeviceInfo("cuda", 0, "Some GPU", 80 << 30, (9, 0), 79 << 30)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = [A_GPU, DeviceInfo("cuda", 1, "Some GPU", 80 << 30, (9, 0), 79 << 30)]
    monkeypatch.setattr(device, "gpu_infos", lambda: pair)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_infos", list)


def test_the_cpu_is_described() -> None:
    (info,) = device.detect("0")
    assert (info.kind, info.torch_name, info.on_gpu, info.capability) == ("cpu", "cpu", False, (0, 0))
    assert 0 < info.free_bytes <= info.memory_bytes
    assert info.name.endswith(f"x {device.usable_cores()}")


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("asked", "names"), [("auto", 2), ("all", 2), ("1", 1), ("2", 2)])
def test_gpus_are_taken_in_order(asked: str, names: int) -> None:
    assert [info.torch_name for info in device.detect(asked)] == ["cuda:0", "cuda:1"][:names]


@pytest.mark.usefixtures("gpus")
def test_zero_is_the_cpu_even_beside_gpus() -> None:
    assert [info.kind for info in device.detect("0")] == ["cpu"]


@pytest.mark.usefixtures("no_gpu")
def test_auto_falls_back_to_the_cpu() -> None:
    assert [info.kind for info in device.detect("auto")] == ["cpu"]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("asked", ["all", "1", "8"])
def test_a_gpu_that_is_not_there_is_an_error(asked: str) -> None:
    with pytest.raises(DeviceError, match="0 can be used") as caught:
        device.detect(asked)
    assert "--gpus 0" in str(caught.value.hint)


@pytest.mark.usefixtures("gpus")
def test_more_gpus_than_there_are_is_an_error() -> None:
    with pytest.raises(DeviceError, match="3 GPUs were asked for, and 2 can be used") as caught:
        device.detect("3")
    assert "--gpus 2" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("kind", "capability", "dtype"),
    [
        ("cpu", (0, 0), "float32"),
        ("cuda", (7, 5), "float16"),
        ("cuda", (8, 0), "bfloat16"),
        ("cuda", (9, 0), "bfloat16"),
    ],
)
def test_default_dtype(kind: str, capability: tuple[int, int], dtype: str) -> None:
    assert device.default_dtype(DeviceInfo(kind, 0, "x", 1, capability)) == dtype


def test_measured_rates_are_plausible() -> None:
    """Against one product timed here: the best of several is no slower than half of it, nor absurdly faster."""
    info = device.cpu_info()
    measured = device.measure(info, "float32")
    assert 1e9 < measured.gemm_flops < 1e15
    assert 1e8 < measured.attention_flops < 1e15
    assert 1e8 < measured.bandwidth < 1e14
    assert measured.host_to_device is None


def test_rates_are_remembered_per_device_and_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, str]] = []

    def measure(info: DeviceInfo, dtype: str) -> Rates:
        measured.append((info.kind, dtype))
        return Rates(float(len(measured)), 2.0, 3.0)

    monkeypatch.setattr(device, "measure", measure)
    folder, cpu = tmp_path / "not" / "yet", device.cpu_info()
    first = device.rates(cpu, "float32", folder)
    assert device.rates(cpu, "float32", folder) == first
    device.rates(cpu, "bfloat16", folder)
    device.rates(A_GPU, "bfloat16", folder)
    assert measured == [("cpu", "float32"), ("cpu", "bfloat16"), ("cuda", "bfloat16")]
    anew = device.rates(cpu, "float32", folder, refresh=True)
    assert anew.gemm_flops == 4.0
    assert device.rates(cpu, "float32", folder) == anew
    assert len(json.loads((folder / device.RATES_FILE).read_text())) == 3
    assert [path.name for path in folder.iterdir()] == [device.RATES_FILE]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "5", '{"a": 5}', '{"a": {"gemm_flops": 1}}', "\x00\xff", "KEY:nan", "KEY:-1", "KEY:text"],
)
def test_a_damaged_memory_is_measured_again(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info, fresh = device.cpu_info(), Rates(1.0, 2.0, 3.0)
    monkeypatch.setattr(device, "measure", lambda info, dtype: fresh)
    path = tmp_path / device.RATES_FILE
    if text.startswith("KEY:"):
        device.rates(info, "float32", tmp_path)
        (key,) = json.loads(path.read_text())
        value = {"nan": float("nan"), "-1": -1.0, "text": "fast"}[text[4:]]
        text = json.dumps({key: {"gemm_flops": value, "attention_flops": 9.0, "bandwidth": 9.0}})
    path.write_text(text)
    assert device.rates(info, "float32", tmp_path) == fresh


def test_a_gpu_without_a_rate_of_copies_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As rates were remembered before there was one."""
    found = [Rates(1.0, 2.0, 3.0), Rates(1.0, 2.0, 3.0, 4.0)]
    monkeypatch.setattr(device, "measure", lambda info, dtype: found.pop(0))
    assert device.rates(A_GPU, "bfloat16", tmp_path).host_to_device is None
    path = tmp_path / device.RATES_FILE
    ((key, values),) = json.loads(path.read_text()).items()
    path.write_text(json.dumps({key: {name: rate for name, rate in values.items() if name != "host_to_device"}}))
    assert device.rates(A_GPU, "bfloat16", tmp_path).host_to_device == 4.0
    assert device.rates(A_GPU, "bfloat16", tmp_path).host_to_device == 4.0


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "measure", lambda info, dtype: Rates(1.0, 2.0, 3.0))
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert device.rates(device.cpu_info(), "float32", blocked / "below") == Rates(1.0, 2.0, 3.0)


@pytest.mark.gpu
def test_the_gpu_is_described_and_measured(tmp_path: Path) -> None:
    info = device.detect("1")[0]
    assert info.name == torch.cuda.get_device_name(0)
    measured = device.rates(info, device.default_dtype(info), tmp_path)
    assert measured.gemm_flops > measured.attention_flops > 1e11
    assert measured.bandwidth > 1e11
