"""Streamed layers on a GPU: page-locked memory, streams that overlap, and no layer that is overwritten too early."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import gptq, quantize_folder
from reference_driver import forward
from tiny_models import save

from longbatch import device, models
from longbatch.models.fp8 import Weight
from longbatch.models.layout import layer_layouts
from longbatch.models.pinned import HostMemory
from longbatch.models.spec import ModelSpec
from longbatch.models.streaming import DiskWeights, HostWeights, StreamedLayers, weights_in

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
FAMILIES = ["llama", "qwen3", "gemma3", "qwen3_moe-mixed", "gpt_oss"]
# Cycles that a GPU spends in a few hundredths of a second.
LONG = 40_000_000


def large_spec(num_layers: int) -> ModelSpec:
    """Layers of about 100 MB in bfloat16."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
    }
    return models.describe(config)


def marked(kind: str, num_layers: int = 5) -> StreamedLayers:
    """Layers whose every number is their own number, from host memory or through the staging buffers of files."""
    spec = large_spec(num_layers)
    layouts = layer_layouts(spec, 2, "auto")

    def read(index: int, places: Mapping[str, Weight]) -> None:
        for place in places.values():
            assert isinstance(place, torch.Tensor)
            place.fill_(index)

    if kind == "disk":
        return StreamedLayers(spec, layouts, torch.bfloat16, GPU, DiskWeights(layouts, torch.bfloat16, GPU, read))
    kept = HostWeights(layouts, GPU)
    for index, layout in enumerate(layouts):
        read(index, weights_in(kept.buffers[index], layout, torch.bfloat16))
    return StreamedLayers(spec, layouts, torch.bfloat16, GPU, kept)


def ends(layer: Any) -> torch.Tensor:
    """The least and the most number of a layer's largest matrices, seen only after a long wait on the device."""
    torch.cuda._sleep(LONG)
    matrices = (layer._attention._qkv, layer._mlp._gate_up, layer._mlp._down)
    return torch.stack([end for matrix in matrices for end in matrix.aminmax()])


# ------------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("weights_dtype", ["auto", "fp8"])
def test_every_family_gives_the_same_bits(case: str, weights_dtype: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    ids = torch.arange(3, 120, device=GPU)
    wanted = forward(models.load(tmp_path, torch.bfloat16, GPU, weights_dtype), ids)
    for weights in ("host", "disk"):
        found = models.load(tmp_path, torch.bfloat16, GPU, weights_dtype, weights=weights)
        for _ in range(3):
            assert torch.equal(forward(found, ids), wanted)


def test_a_quantized_checkpoint(tmp_path: Path) -> None:
    source = tmp_path / "model"
    save("llama", source)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    quantize_folder(source, tmp_path / "twin", config, gptq(4, 32, symmetric=True))
    ids = torch.arange(3, 120, device=GPU)
    wanted = forward(models.load(source, torch.bfloat16, GPU), ids)
    for weights in ("host", "disk"):
        assert torch.equal(forward(models.load(source, torch.bfloat16, GPU, weights=weights), ids), wanted)


def test_random_weights() -> None:
    ids = torch.arange(3, 60, device=GPU)
    wanted, found = (
        models.random_weights(large_spec(3), torch.bfloat16, GPU, 1, weights=weights)
        for weights in ("resident", "host")
    )
    assert torch.equal(forward(found, ids), forward(wanted, ids))


# ------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_no_layer_is_overwritten_while_it_computes(kind: str) -> None:
    """The host runs far ahead of the device, through loops that end, loops that are left, and layers by number."""
    layers, seen, wanted = marked(kind), [], []

    def look(index: int, layer: Any) -> None:
        seen.append(ends(layer))
        wanted.append(index)

    for stop in (4, 2, 0, 4):
        for index, layer in enumerate(layers):
            look(index, layer)
            if index == stop:
                break
    for index in (3, 1, 1, 4, 0):
        look(index, layers[index])
    torch.cuda.synchronize()
    for found, index in zip(seen, wanted, strict=True):
        assert found.tolist() == [index] * 6


def test_copies_end_while_the_layer_before_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = functools.partial(torch.cuda.Event, enable_timing=True)
    monkeypatch.setattr(torch.cuda, "Event", timed)
    layers = marked("host")
    list(layers)
    torch.cuda.synchronize()
    for layer in layers:
        start, end = timed(), timed()
        start.record()
        torch.cuda._sleep(LONG)
        end.record()
        torch.cuda.synchronize()
        other = next(slot for slot in layers.slots if slot.buffer.data_ptr() != _buffer(layer))
        assert start.elapsed_time(end) > 5
        assert other._arrived.elapsed_time(end) > 0
        assert other._used.elapsed_time(other._arrived) > 0.5


def _buffer(layer: Any) -> int:
    return int(layer._input_norm.untyped_storage().data_ptr())


def test_the_host_does_not_wait_for_copies() -> None:
    layers = marked("host")
    list(layers)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in layers:
        torch.cuda._sleep(LONG)
    given = time.perf_counter() - begin
    torch.cuda.synchronize()
    assert given < (time.perf_counter() - begin) / 3


# ------------------------------------------------------------------------------------- memory


def test_host_memory_is_page_locked_and_let_go() -> None:
    memory = HostMemory(GPU)
    buffers = [memory.empty(size) for size in (1, 5000, 1 << 20)]
    assert all(buffer.is_pinned() for buffer in buffers)
    del memory
    assert not any(buffer.is_pinned() for buffer in buffers)


@pytest.mark.parametrize("weights", ["host", "disk"])
def test_the_device_holds_two_layers(weights: str, tmp_path: Path) -> None:
    save("llama", tmp_path)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    decoder = models.load(tmp_path, torch.bfloat16, GPU, weights=weights)
    (layer, *_) = layer_layouts(decoder.spec, 2, "auto")
    held = torch.cuda.memory_allocated() - before
    # Besides, the frequencies of the rotation; and everything is rounded up to 512 bytes.
    assert 0 <= held - decoder.num_bytes - 2 * layer.num_bytes < 8192


def test_the_rate_of_copies_is_measured(tmp_path: Path) -> None:
    info = device.detect("1")[0]
    rates = device.rates(info, device.default_dtype(info), tmp_path)
    assert rates.host_to_device is not None
    assert 1e9 < rates.host_to_device < rates.bandwidth
