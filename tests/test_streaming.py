"""Layers that are streamed from host memory or disk: the same numbers, in little memory, however they are drawn."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_rows import new_engine, random_ids, request, run_rows, word_tokenizer
from quantized_files import gptq, quantize_folder, scaled
from reference_driver import forward
from test_adapter import write_adapter
from tiny_models import CASES, make, save

from longbatch import models
from longbatch.core import Prompt
from longbatch.engine.layer_pass import Document, LayerPass
from longbatch.errors import DeviceError
from longbatch.models.decoder import Decoder, Layer
from longbatch.models.fp8 import Fp8Weight, Weight
from longbatch.models.layout import ALIGNMENT, layer_layouts
from longbatch.models.parameters import parameters
from longbatch.models.pinned import HostMemory
from longbatch.models.streaming import DiskWeights, HostWeights, StreamedLayers, weights_in

CPU = torch.device("cpu")
FAMILIES = ["llama-biases-tied", "mistral", "qwen2", "qwen3", "phi3", "gemma3", "qwen3_moe-mixed", "gpt_oss"]
IDS = torch.randint(3, 200, (90,), generator=torch.Generator().manual_seed(1))
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
FP8_ROWS = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}


def load(folder: Path, weights: str, dtype: torch.dtype = torch.float32, weights_dtype: str = "auto") -> Decoder:
    return models.load(folder, dtype, CPU, weights_dtype, weights=weights)


def streamed(decoder: Decoder) -> StreamedLayers:
    assert isinstance(decoder.layers, StreamedLayers)
    return decoder.layers


def answers(decoder: Decoder, folder: Path) -> list[tuple[Any, ...]]:
    """Tokens and log-probabilities of rows that the engine answers, some together."""
    engine = new_engine(decoder, word_tokenizer(folder))
    rows = [
        (request(row, max_tokens=6, logprobs=2), Prompt(random_ids(length, row)))
        for row, length in enumerate((5, 130, 64))
    ]
    found = run_rows(engine, rows[:2], rows[2:])
    return [(result.text, result.logprobs) for _, result in sorted(found.items(), key=lambda item: item[1].row)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers; not to be written to."""
    path = tmp_path_factory.mktemp("llama")
    save("llama", path)
    return path


def host_layers(folder: Path) -> tuple[Decoder, StreamedLayers]:
    """A resident decoder, and its layers copied through the slots, as on a GPU."""
    resident = load(folder, "resident")
    layouts = layer_layouts(resident.spec, 4, "auto")
    kept = HostWeights(layouts, CPU)
    on_disk = load(folder, "disk")
    for index, layout in enumerate(layouts):
        streamed(on_disk)[index]
        slot = next(slot for slot in streamed(on_disk).slots if slot.layer == index)
        kept.buffers[index].copy_(slot.buffer[: layout.num_bytes])
    return resident, StreamedLayers(resident.spec, layouts, torch.float32, CPU, kept)


# ------------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("weights_dtype", ["auto", "fp8"])
def test_every_family_gives_the_same_bits(case: str, weights_dtype: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    wanted = load(tmp_path, "resident", weights_dtype=weights_dtype)
    logits, rows = forward(wanted, IDS), answers(wanted, tmp_path)
    for weights in ("host", "disk"):
        found = load(tmp_path, weights, weights_dtype=weights_dtype)
        for _ in range(2):
            assert torch.equal(forward(found, IDS), logits)
        assert torch.equal(forward(found, IDS, tile=32), forward(wanted, IDS, tile=32))
        assert answers(found, tmp_path) == rows


def test_every_case_is_of_a_family_above() -> None:
    assert {case.partition("-")[0] for case in CASES} == {case.partition("-")[0] for case in FAMILIES}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_narrow_formats(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Also Gemma's norms, which stay in float32."""
    save(case, tmp_path)
    wanted = forward(load(tmp_path, "resident", dtype), IDS)
    for weights in ("host", "disk"):
        assert torch.equal(forward(load(tmp_path, weights, dtype), IDS), wanted)


@pytest.mark.parametrize("weights_dtype", ["auto", "fp8"])
@pytest.mark.parametrize(
    ("config", "write"), [(GPTQ, gptq(4, 32, symmetric=True)), (FP8_ROWS, scaled(1, None))], ids=["gptq", "fp8"]
)
def test_quantized_checkpoints(config: dict[str, Any], write: Any, weights_dtype: str, tmp_path: Path) -> None:
    source = tmp_path / "model"
    save("llama", source)
    quantize_folder(source, tmp_path / "twin", config, write)
    wanted = forward(load(source, "resident", weights_dtype=weights_dtype), IDS)
    for weights in ("host", "disk"):
        assert torch.equal(forward(load(source, weights, weights_dtype=weights_dtype), IDS), wanted)


def test_an_adapter(folder: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", folder)
    wanted, host, disk = (
        models.load(folder, torch.float32, CPU, adapter=tmp_path / "adapter", weights=weights)
        for weights in ("resident", "host", "disk")
    )
    assert torch.equal(forward(host, IDS), forward(wanted, IDS))
    assert torch.equal(forward(disk, IDS), forward(wanted, IDS))
    assert not torch.equal(forward(disk, IDS), forward(load(folder, "disk"), IDS))


def test_shards(tmp_path: Path) -> None:
    make("qwen3_moe").save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    wanted = forward(load(tmp_path, "resident"), IDS)
    for weights in ("host", "disk"):
        assert torch.equal(forward(load(tmp_path, weights), IDS), wanted)


def test_through_the_slots(folder: Path) -> None:
    resident, layers = host_layers(folder)
    own = [parameter for parameter in parameters(resident.spec) if parameter.layer is None]
    tensors = {"embed": resident._embed, "head": resident._head, "final_norm": resident._final_norm}
    found = Decoder(resident.spec, {parameter.name: tensors[parameter.name] for parameter in own}, layers)
    assert torch.equal(forward(found, IDS), forward(resident, IDS))


@pytest.mark.parametrize("weights_dtype", ["auto", "fp8"])
def test_random_weights(weights_dtype: str, folder: Path) -> None:
    spec = models.read_spec(folder)
    wanted, found = (
        models.random_weights(spec, torch.float32, CPU, 3, weights_dtype, weights) for weights in ("resident", "host")
    )
    assert torch.equal(forward(found, IDS), forward(wanted, IDS))
    assert found.num_bytes < wanted.num_bytes


# ------------------------------------------------------------------------------------- drawing layers


def marked_layers(num_layers: int) -> tuple[StreamedLayers, list[int]]:
    """Layers of a tiny model whose input norm is filled with their number, and the order in which they are read."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
    spec = models.describe(config)
    layouts = layer_layouts(spec, 4, "auto")
    order: list[int] = []

    def read(index: int, places: Mapping[str, Weight]) -> None:
        order.append(index)
        for name, place in places.items():
            assert isinstance(place, torch.Tensor)
            assert name.startswith(f"layers.{index}.")
            place.fill_(index)

    return StreamedLayers(spec, layouts, torch.float32, CPU, DiskWeights(layouts, torch.float32, CPU, read)), order


def number(layer: Layer) -> int:
    """Which layer's weights a layer computes with; all of them must be the same one's."""
    values = layer._input_norm
    assert (values == values[0]).all()
    return int(values[0])


@pytest.mark.parametrize("num_layers", [1, 2, 3, 5])
def test_one_loop_after_another(num_layers: int) -> None:
    layers, order = marked_layers(num_layers)
    assert len(layers) == num_layers
    for _ in range(3):
        assert [number(layer) for layer in layers] == list(range(num_layers))
    layers[0]
    # Two slots hold two layers for good; more are read again each time, the first of the next loop ahead.
    assert order == list(range(num_layers)) if num_layers <= 2 else order == [*range(num_layers)] * 3 + [0]


def test_a_loop_that_is_left_early() -> None:
    layers, _ = marked_layers(5)
    for stop in (0, 3, 1, 4, 2):
        for index, layer in enumerate(layers):
            assert number(layer) == index
            if index == stop:
                break
    drawn = iter(layers)
    next(drawn)
    with pytest.raises(KeyError):
        drawn.throw(KeyError)  # type: ignore[attr-defined]
    assert [number(layer) for layer in layers] == [0, 1, 2, 3, 4]


def test_layers_by_number() -> None:
    layers, _ = marked_layers(5)
    for index in (3, 0, 0, 4, 1, -1, 2, -5, 2, 3):
        assert number(layers[index]) == index % 5
    # Within a loop: the one at hand again, as a search does, and others, which take the place of what comes next.
    for index, layer in enumerate(layers):
        assert layers[index] is layer
        assert number(layer) == index
        assert number(layers[(index + 3) % 5]) == (index + 3) % 5
        assert number(layers[index]) == index
    with pytest.raises(IndexError):
        layers[5]
    with pytest.raises(TypeError, match="one at a time"):
        layers[1:3]


def test_a_layer_stays_until_another_is_drawn() -> None:
    layers, _ = marked_layers(4)
    layer = layers[2]
    for _ in range(20):
        assert number(layer) == 2
    it = iter(layers)
    first = next(it)
    threading.Event().wait(0.05)
    assert number(first) == 0


def test_the_next_layer_is_read_meanwhile() -> None:
    layers, order = marked_layers(4)
    for index, _ in enumerate(layers):
        wait_until(lambda index=index: order[-1] == (index + 1) % 4)


def wait_until(condition: Any) -> None:
    for _ in range(200):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never came to it")


def test_two_layers_are_held(folder: Path) -> None:
    decoder = load(folder, "disk")
    layouts = layer_layouts(decoder.spec, 4, "auto")
    assert [slot.buffer.nbytes for slot in streamed(decoder).slots] == [layouts[0].num_bytes] * 2
    assert decoder.num_bytes == sum(
        4 * torch.Size(parameter.shape).numel() for parameter in parameters(decoder.spec) if parameter.layer is None
    )
    forward(decoder, IDS)
    starts = {slot.buffer.untyped_storage().data_ptr() for slot in streamed(decoder).slots}
    for layer in decoder.layers:
        for weight in (layer._input_norm, layer._attention._qkv, layer._mlp._down):
            assert isinstance(weight, torch.Tensor)
            assert weight.untyped_storage().data_ptr() in starts


def test_layers_of_different_sizes(tmp_path: Path) -> None:
    save("qwen3_moe-mixed", tmp_path)
    decoder = load(tmp_path, "disk")
    sizes = [layout.num_bytes for layout in layer_layouts(decoder.spec, 4, "auto")]
    assert len(set(sizes)) > 1
    assert {slot.buffer.nbytes for slot in streamed(decoder).slots} == {max(sizes)}


def test_a_search_pass_over_streamed_layers(folder: Path) -> None:
    passed = []
    for weights in ("resident", "disk"):
        decoder = load(folder, weights)
        document = Document(decoder.embed(IDS).detach().clone())
        with torch.inference_mode():
            for index in range(len(decoder.layers)):
                LayerPass(decoder, index, document, 32).advance(None)
        passed.append(document.hidden)
    assert torch.equal(*passed)


# ------------------------------------------------------------------------------------- buffers


@pytest.mark.parametrize("weights_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("case", ["gemma3", "qwen3_moe-mixed", "gpt_oss"])
def test_a_layout_has_every_weight_once(case: str, weights_dtype: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    spec = models.read_spec(tmp_path)
    layouts = layer_layouts(spec, 2, weights_dtype)
    names = [place.parameter.name for layout in layouts for place in layout.places]
    assert names == [parameter.name for parameter in parameters(spec) if parameter.layer is not None]
    for layout in layouts:
        buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        total = 0
        for place in layout.places:
            weight = weights_in(buffer, layout, torch.bfloat16)[place.parameter.name]
            assert weight.shape == place.parameter.shape
            assert isinstance(weight, Fp8Weight) == (weights_dtype == "fp8" and place.parameter.is_product)
            for part in (weight.data, weight.scale) if isinstance(weight, Fp8Weight) else (weight,):
                assert (part.data_ptr() - buffer.data_ptr()) % ALIGNMENT == 0
                part.view(torch.uint8).add_(1)
                total += part.nbytes
        # Nothing overlaps, and nothing but the gaps is left.
        assert int(buffer.max()) == 1
        assert int(buffer.sum()) == total > layout.num_bytes - 2 * ALIGNMENT * len(layout.places)


def test_host_memory_is_whole_pages_apart() -> None:
    memory = HostMemory(CPU)
    buffers = [memory.empty(size) for size in (1, 4096, 5000)]
    assert [buffer.nbytes for buffer in buffers] == [1, 4096, 5000]
    assert all(buffer.data_ptr() % 4096 == 0 for buffer in buffers)


def test_host_memory_that_cannot_be_had() -> None:
    with pytest.raises(DeviceError, match="100,000,000,000,000,000 bytes of host memory cannot be had"):
        HostMemory(CPU).empty(10**17)
