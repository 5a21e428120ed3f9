"""Doctor: what it finds is true, and what is missing says what mends it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from longbatch import device, doctor
from longbatch.config import Settings
from longbatch.device import DeviceInfo, Rates
from longbatch.doctor import Finding, Findings, examine
from longbatch.errors import ExitCode


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LONGBATCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(device, "measure", lambda info, dtype: Rates(2e12, 1e12, 5e10))


def found(findings: Findings, section: str, name: str) -> Finding:
    (item,) = [item for item in findings.items if (item.section, item.name) == (section, name)]
    return item


def test_this_machine() -> None:
    import torch

    findings = examine(Settings(gpus="0"))
    assert findings.exit_code == ExitCode.OK
    assert found(findings, "versions", "torch").value == torch.__version__
    assert sys.executable in found(findings, "versions", "python").value
    assert "GiB free" in found(findings, "devices", "cpu").value
    rates = "float32: products 2 TFLOP/s, attention 1 TFLOP/s, memory 50 GB/s"
    assert found(findings, "devices", "cpu rates").value == rates
    sections = list(dict.fromkeys(item.section for item in findings.items))
    assert sections == ["versions", "devices", "optional parts", "disk", "limits", "slurm", "caches"]
    lines = findings.lines()
    for section in sections:
        assert section in lines
    assert json.loads(json.dumps(findings.as_dict()))["ok"] is True


def test_rates_are_measured_anew_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(gpus="0")
    examine(settings)
    monkeypatch.setattr(device, "measure", lambda info, dtype: Rates(3e12, 1e12, 5e10))
    assert "2 TFLOP/s" in found(examine(settings), "devices", "cpu rates").value
    assert "3 TFLOP/s" in found(examine(settings, measure_anew=True), "devices", "cpu rates").value


def test_a_missing_gpu_fails_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_infos", list)
    findings = examine(Settings(gpus="2"))
    item = found(findings, "devices", "GPU")
    assert item.status == "fail"
    assert "--gpus 0" in item.hint
    assert findings.exit_code == ExitCode.DEVICE
    (line,) = [line for line in findings.lines() if line.startswith("!")]
    assert item.value in line


@pytest.mark.parametrize(
    ("info", "status"),
    [
        (DeviceInfo("cuda", 0, "New", 80 << 30, (9, 0), 79 << 30), "ok"),
        (DeviceInfo("cuda", 0, "Busy", 80 << 30, (9, 0), 10 << 30), "warn"),
        (DeviceInfo("cuda", 0, "Old", 12 << 30, (6, 1), 11 << 30), "fail"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_gpus_are_judged(info: DeviceInfo, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_infos", lambda: [info])
    item = found(examine(Settings(gpus="1")), "devices", "cuda:0")
    assert item.status == status
    assert bool(item.hint) == (status != "ok")


def test_the_kernels_of_dense_attention_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from longbatch.attention.choice import OWN, TORCH, DenseChoice, choices_key, remember_choices

    info = DeviceInfo("cuda", 0, "New", 80 << 30, (9, 0), 79 << 30)
    monkeypatch.setattr(device, "gpu_infos", lambda: [info])
    assert not [item for item in examine(Settings(gpus="1")).items if "dense attention" in item.value]
    choice = DenseChoice(((128, 128), (8192, 8192)), {TORCH: (2.0, 1.0), OWN: (1.0, 2.0)})
    remember_choices(tmp_path / "cache", choices_key(info, "bfloat16"), {"32/8 heads of 128": choice})
    item = found(examine(Settings(gpus="1")), "devices", "cuda:0 32/8 heads of 128")
    assert item.value == "dense attention: longbatch for 128; torch for 8,192"


def test_a_missing_part_is_a_warning_with_its_install(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (("reading minds", "no_such_module_anywhere", "pip install minds"), ("sums", "numpy", ""))
    monkeypatch.setattr(doctor, "PARTS", parts)
    findings = examine(Settings(gpus="0"))
    missing = found(findings, "optional parts", "reading minds")
    assert (missing.status, missing.value, missing.hint) == ("warn", "missing", "pip install minds")
    assert found(findings, "optional parts", "sums").status == "ok"
    assert findings.exit_code == ExitCode.OK


def test_a_full_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    item = found(examine(Settings(gpus="0")), "disk", "working folder")
    assert (item.status, item.value.split(" free")[0]) == ("warn", "1.0 GiB")


def test_slurm_and_offline_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_PROCID", "2")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    findings = examine(Settings(gpus="0"))
    assert found(findings, "slurm", "job").value == "4711, task 2 of 8"
    assert "HF_HUB_OFFLINE" in found(findings, "caches", "hub access").value


def test_the_cache_is_measured(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "models"
    folder.mkdir(parents=True)
    with open(folder / "weights", "wb") as file:
        file.truncate(3 << 30)  # sparse
    (folder / "broken").symlink_to("nowhere")
    assert found(examine(Settings(gpus="0")), "caches", "longbatch").value.startswith("3.00 GiB")
