"""Where weights are kept: what it takes on the device and on the host, what is chosen, and what it costs."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from run_folders import settings_of, tiny_model, words, write_manifest

from longbatch.config.kv_formats import plain_format
from longbatch.device import DeviceInfo, Rates
from longbatch.errors import DeviceError
from longbatch.models import describe, read_spec
from longbatch.models.layout import layer_layouts
from longbatch.models.parameters import weight_bytes
from longbatch.plan import Budget, CostModel, make_plan
from longbatch.plan import weights as plan_weights
from longbatch.plan.packing import RowSize
from longbatch.plan.weights import budget_with_weights, check_host, weights_place
from longbatch.report.plan_view import print_plan
from longbatch.run import make_plan as plan_of
from longbatch.run.job import Job

__all__ = ["tiny_model"]

GIB = 1 << 30
QWEN_32B = describe(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 152_064,
        "hidden_size": 5120,
        "intermediate_size": 27_648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    }
)
H200_RATES = Rates(gemm_flops=7e14, attention_flops=6e14, bandwidth=4e12, host_to_device=5e10)


def gpu(memory: int) -> DeviceInfo:
    return DeviceInfo("cuda", 0, "Some GPU", memory * GIB, (9, 0), memory * GIB)


def host_has(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    info = DeviceInfo("cpu", 0, "Some CPU", memory * GIB, free_bytes=memory * GIB)
    monkeypatch.setattr(plan_weights, "cpu_info", lambda: info)


def chosen(memory: int, asked: str = "auto", num_devices: int = 1) -> Budget:
    return budget_with_weights(asked, QWEN_32B, [gpu(memory)] * num_devices, 2, "auto", plain_format("bfloat16"))


# ------------------------------------------------------------------------------------- places


@pytest.mark.parametrize("weights_dtype", ["auto", "fp8"])
def test_bytes_of_each_place_on_a_gpu(weights_dtype: str) -> None:
    resident, host, disk = (
        weights_place(place, QWEN_32B, 2, weights_dtype, True) for place in ("resident", "host", "disk")
    )
    layer = layer_layouts(QWEN_32B, 2, weights_dtype)[0].num_bytes
    assert resident.device_bytes == weight_bytes(QWEN_32B, 2, weights_dtype)
    assert (resident.slot_bytes, resident.host_bytes, resident.layer_bytes) == (0, 0, 0)
    assert host.device_bytes == disk.device_bytes == 2 * 2 * 152_064 * 5120
    assert host.slot_bytes == disk.slot_bytes == 2 * layer
    assert (host.host_bytes, disk.host_bytes) == (64 * layer, 2 * layer)
    assert host.layer_bytes == disk.layer_bytes == 64 * layer
    # The same weights: a plan counts matrices only, a buffer also norms, biases and gaps.
    assert resident.device_bytes < host.device_bytes + host.host_bytes < 1.001 * resident.device_bytes


def test_a_cpu_computes_with_what_is_in_host_memory() -> None:
    resident, host, disk = (weights_place(place, QWEN_32B, 4, "auto", False) for place in ("resident", "host", "disk"))
    assert host == replace(resident, place="host")
    assert (disk.host_bytes, disk.layer_bytes) == (0, 0)
    assert disk.slot_bytes == 2 * layer_layouts(QWEN_32B, 4, "auto")[0].num_bytes


# ------------------------------------------------------------------------------------- choices


@pytest.mark.parametrize(
    ("memory", "host", "place"),
    [(141, 8, "resident"), (141, 256, "resident"), (40, 256, "host"), (24, 256, "host"), (40, 60, "disk")],
)
def test_auto_is_the_first_place_that_fits(memory: int, host: int, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host_has(host, monkeypatch)
    made = chosen(memory)
    assert made.weights == place
    assert made.used_bytes <= memory * GIB
    parts = dict(made.parts)
    if place == "resident":
        assert "two layers" not in parts
        assert made.host_bytes == 0
    else:
        assert parts["two layers"] == 2 * layer_layouts(QWEN_32B, 2, "auto")[0].num_bytes
        assert (made.host_bytes > 50 * GIB) == (place == "host")


def test_what_is_asked_for_is_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    host_has(256, monkeypatch)
    assert [chosen(141, asked).weights for asked in ("resident", "host", "disk")] == ["resident", "host", "disk"]
    assert chosen(141, "host").kv_tokens > 1.7 * chosen(141, "resident").kv_tokens


def test_every_gpu_has_host_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    host_has(100, monkeypatch)
    assert chosen(40).weights == "host"
    assert chosen(40, num_devices=2).weights == "disk"
    with pytest.raises(DeviceError, match=r"--weights host needs 2 x 58\.\d GiB .* and 100\.0 GiB are free") as caught:
        chosen(40, "host", num_devices=2)
    assert "--weights disk" in str(caught.value.hint)


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    host_has(256, monkeypatch)
    with pytest.raises(DeviceError, match=r"the device has 40\.0 GiB") as caught:
        chosen(40, "resident")
    assert "--weights host" in str(caught.value.hint)
    with pytest.raises(DeviceError, match=r"the device has 6\.0 GiB") as caught:
        chosen(6)
    assert "--weights host" not in str(caught.value.hint)
    host_has(4, monkeypatch)
    with pytest.raises(DeviceError, match=r"--weights disk needs 1\.\d GiB of host memory"):
        chosen(40)


def test_host_memory_is_only_looked_at_where_it_is_used() -> None:
    check_host(weights_place("resident", QWEN_32B, 2, "auto", True), 8, GIB, 0)


# ------------------------------------------------------------------------------------- times


def streamed_cost() -> CostModel:
    place = weights_place("host", QWEN_32B, 2, "auto", True)
    return CostModel(QWEN_32B, H200_RATES, stream_seconds=place.layer_bytes / 5e10)


def test_the_break_even_is_where_a_layer_computes_as_long_as_the_next_one_comes() -> None:
    cost = streamed_cost()
    found = cost.break_even_tokens
    assert found is not None
    layer_parameters = QWEN_32B.matmul_flops_per_token / 2 / 64
    layer_bytes = layer_layouts(QWEN_32B, 2, "auto")[0].num_bytes
    assert found == pytest.approx(layer_bytes / 5e10 * 7e14 / (2 * layer_parameters), abs=1)
    assert 13_000 < found < 15_000
    # Products that are twice as fast need twice as many tokens.
    assert replace(cost, products_speed=2.0).break_even_tokens == pytest.approx(2 * found, abs=1)
    assert replace(cost, stream_seconds=0.0).break_even_tokens is None


def test_short_waves_and_tokens_wait_for_the_weights() -> None:
    cost, still = streamed_cost(), CostModel(QWEN_32B, H200_RATES)
    memory = Budget(wave_tokens=100_000, kv_tokens=200_000, tile_tokens=8192)

    def seconds(length: int, model: CostModel, generated: int = 0) -> tuple[float, float]:
        totals = make_plan([RowSize(0, 0, length, generated)], QWEN_32B, memory, model).totals
        return totals.prefill_seconds, totals.decode_seconds

    assert seconds(100, cost)[0] == pytest.approx(cost.stream_seconds)
    assert seconds(100, still)[0] < cost.stream_seconds / 50
    assert seconds(60_000, cost)[0] == seconds(60_000, still)[0]
    # A row of two steps waits twice.
    slow = replace(cost, stream_seconds=1e3)
    assert seconds(120_000, slow)[0] == pytest.approx(2e3)
    assert seconds(100, cost, 10)[1] == pytest.approx(10 * cost.stream_seconds, rel=0.01)
    assert seconds(100, still, 10)[1] < seconds(100, cost, 10)[1] / 20


def test_waves_are_summed() -> None:
    cost = streamed_cost()
    memory = Budget(wave_tokens=1000, kv_tokens=10_000, tile_tokens=512)
    plan = make_plan([RowSize(row, 0, 600, 0) for row in range(5)], QWEN_32B, memory, cost)
    assert plan.wave_seconds == pytest.approx(np.full(5, cost.stream_seconds))
    assert plan.totals.prefill_seconds == pytest.approx(5 * cost.stream_seconds)


# ------------------------------------------------------------------------------------- plans


def test_the_plan_says_where_weights_are(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = write_manifest(tmp_path / "rows.jsonl", [{"id": "a", "prompt": words(20)}])
    views = {
        weights: plan_of(settings_of(tiny_model, tmp_path / weights, weights=weights), [str(manifest)])
        for weights in ("auto", "host", "disk")
    }
    assert {weights: view.as_dict()["weights"] for weights, view in views.items()} == {
        "auto": "resident",
        "host": "host",
        "disk": "disk",
    }
    parts = {weights: dict(view.plan.budget.parts) for weights, view in views.items()}
    layouts = layer_layouts(read_spec(tiny_model), 4, "auto")
    assert parts["disk"]["two layers"] == 2 * layouts[0].num_bytes
    assert parts["disk"]["weights"] < parts["host"]["weights"] == parts["auto"]["weights"]
    # A CPU has no copies to hide.
    assert views["disk"].break_even_tokens is None
    print_plan(views["auto"])
    assert "\nweights  " not in capsys.readouterr().out.partition("memory")[0]
    print_plan(views["disk"])
    assert "on disk, read for every wave and every token" in capsys.readouterr().out
    moved = replace(views["host"].plan.budget, host_bytes=58 * GIB)
    print_plan(replace(views["host"], plan=replace(views["host"].plan, budget=moved), break_even_tokens=14_000))
    printed = " ".join(capsys.readouterr().out.split())
    assert "in host memory, 58.0 GiB; waves of 14,000 tokens or more hide their copies" in printed


def test_a_job_on_a_gpu_prices_what_is_streamed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_manifest(tmp_path / "rows.jsonl", [{"id": "a", "prompt": words(20)}])
    devices = [replace(gpu(80), index=index) for index in range(2)]
    # By the module: the package of its name is also the function `longbatch.run`.
    module = importlib.import_module("longbatch.run.job")
    monkeypatch.setattr(module, "survey", lambda *args: (devices, "bfloat16", H200_RATES))
    host_has(256, monkeypatch)
    for weights in ("resident", "host", "disk"):
        settings = settings_of(tiny_model, tmp_path / weights, weights=weights, attention="dense")
        job = Job.open(settings, [str(manifest)], print)
        place = weights_place(weights, job.spec, 2, "auto", True)
        assert job.cost().stream_seconds == place.layer_bytes / 5e10
        assert (job.cost().break_even_tokens is None) == (weights == "resident")
        assert (job.budget().weights, job.budget().host_bytes) == (weights, place.host_bytes)
