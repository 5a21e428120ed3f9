"""LoRA adapters in PEFT's layout: merged as computed by hand, part of the run, and refused where they do more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import gptq, quantize_folder
from reference_driver import forward
from run_folders import results, run, tiny_model, words, write_manifest
from safetensors.torch import load_file, save_file
from tiny_models import save

from longbatch import models
from longbatch.errors import UsageError
from longbatch.models.adapter import adapter_hash, read_adapter

__all__ = ["tiny_model"]

CPU = torch.device("cpu")
IDS = torch.arange(3, 60)
RANK, ALPHA = 4, 12
TARGETS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
Tensors = dict[str, torch.Tensor]


def write_adapter(folder: Path, base: Path, targets: tuple[str, ...] = TARGETS, **settings: Any) -> Tensors:
    """An adapter of some modules in every layer of a model folder; its tensors."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": f"somebody/{base.name}",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.1,
        "target_modules": [target.rsplit(".", 1)[-1] for target in targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    generator = torch.Generator().manual_seed(3)
    tensors: Tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(targets):
            for half, shape in (("A", (RANK, weight.shape[1])), ("B", (weight.shape[0], RANK))):
                numbers = torch.randn(shape, generator=generator) * 0.2
                tensors[f"base_model.model.{module}.lora_{half}.weight"] = numbers
    assert tensors
    save_file(tensors, folder / "adapter_model.safetensors")
    return tensors


def merge(base: Path, tensors: Tensors, scale: float) -> None:
    """Adds scale * B A to the weights of a model folder."""
    weights = load_file(base / "model.safetensors")
    for name in tensors:
        if "lora_A" in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            product = tensors[name.replace("lora_A", "lora_B")].double() @ tensors[name].double()
            weights[f"{module}.weight"] = (weights[f"{module}.weight"].double() + scale * product).float()
    save_file(weights, base / "model.safetensors")


def logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    return forward(models.load(folder, torch.float32, CPU, adapter=adapter), IDS)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save("llama", tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    write_adapter(tmp_path / "adapter", base)
    return tmp_path / "adapter"


def edit(folder: Path, **changed: Any) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changed}))


def failure(folder: Path, base: Path) -> UsageError:
    with pytest.raises(UsageError) as caught:
        models.load(base, torch.float32, CPU, adapter=folder)
    return caught.value


# ------------------------------------------------------------------------------------------------- what is merged


@pytest.mark.parametrize(
    ("settings", "scale"),
    [({}, ALPHA / RANK), ({"use_rslora": True}, ALPHA / RANK**0.5), ({"lora_alpha": 1}, 1 / RANK)],
)
def test_the_merged_model_is_the_one_computed_by_hand(
    tmp_path: Path, base: Path, settings: dict[str, Any], scale: float
) -> None:
    plain = logits(base)
    tensors = write_adapter(tmp_path / "adapter", base, **settings)
    found = logits(base, tmp_path / "adapter")
    merge(base, tensors, scale)
    assert (found - plain).abs().max() > 0.1
    assert (found - logits(base)).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("case", "targets"),
    [
        ("phi3", ("qkv_proj", "gate_up_proj")),
        ("qwen3_moe", ("experts.3.up_proj", "mlp.gate")),
        ("llama", ("lm_head",)),
        ("gemma3", TARGETS),
    ],
)
def test_other_families(tmp_path: Path, case: str, targets: tuple[str, ...]) -> None:
    base = tmp_path / "base"
    save(case, base)
    plain = logits(base)
    tensors = write_adapter(tmp_path / "adapter", base, targets)
    found = logits(base, tmp_path / "adapter")
    merge(base, tensors, ALPHA / RANK)
    assert (found - plain).abs().max() > 1e-2
    assert (found - logits(base)).abs().max() <= 1e-4


def test_the_sum_is_rounded_once(tmp_path: Path, base: Path) -> None:
    """In bfloat16 the update is added in float32: small steps are not lost before the weight is rounded."""
    tensors = write_adapter(tmp_path / "adapter", base)
    found = models.load(base, torch.bfloat16, CPU, adapter=tmp_path / "adapter")
    merge(base, tensors, ALPHA / RANK)
    error = (forward(found, IDS) - forward(models.load(base, torch.bfloat16, CPU), IDS)).abs()
    assert error.mean() < 1e-2


def test_an_adapter_of_a_quantized_model(tmp_path: Path, base: Path) -> None:
    tensors = write_adapter(tmp_path / "adapter", base)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    quantize_folder(base, tmp_path / "twin", config, gptq(4, 32, symmetric=True))
    found = logits(base, tmp_path / "adapter")
    merge(tmp_path / "twin", tensors, ALPHA / RANK)
    assert (found - logits(tmp_path / "twin")).abs().max() <= 1e-4


# --------------------------------------------------------------------------------------------- what must be refused


def test_every_fault_of_the_tensors_is_named_at_once(adapter: Path, base: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    layer = "base_model.model.model.layers.0"
    tensors[f"{layer}.self_attn.q_proj.lora_A.weight"] = torch.zeros(RANK, 63)
    del tensors[f"{layer}.self_attn.o_proj.lora_B.weight"]
    tensors[f"{layer}.mlp.down_proj.lora_B.weight"] = torch.zeros(64, RANK, dtype=torch.int32)
    tensors[f"{layer}.attn.c_attn.lora_A.weight"] = torch.zeros(RANK, 64)
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(RANK, 200)
    tensors["base_model.model.lm_head.weight"] = torch.zeros(200, 64)
    save_file(tensors, adapter / "adapter_model.safetensors")
    message = failure(adapter, base).message
    assert message.splitlines()[0] == f"the adapter {adapter} is not one for LlamaForCausalLM:"
    assert sorted(message.splitlines()[1:]) == [
        "  missing: model.layers.0.self_attn.o_proj.lora_B.weight [64, 4]",
        "  unknown: base_model.model.lm_head.weight [200, 64]",
        "  unknown: base_model.model.model.embed_tokens.lora_embedding_A [4, 200]",
        f"  unknown: {layer}.attn.c_attn.lora_A.weight [4, 64]",
        f"  unsupported type I32: {layer}.mlp.down_proj.lora_B.weight",
        f"  wrong shape: {layer}.self_attn.q_proj.lora_A.weight [4, 63], the model and r 4 need [4, 64]",
    ]


def test_another_rank_than_the_config(adapter: Path, base: Path) -> None:
    edit(adapter, r=8)
    assert "[4, 64], the model and r 8 need [8, 64]" in failure(adapter, base).message


def test_an_adapter_of_nothing(adapter: Path, base: Path) -> None:
    save_file({}, adapter / "adapter_model.safetensors")
    assert failure(adapter, base).message.endswith("no tensor at all")


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"peft_type": "IA3"}, "adapters of type IA3 are not merged; known: LORA"),
        ({"peft_type": None}, "adapters of type None are not merged"),
        ({"use_dora": True}, "not merged: use_dora True"),
        ({"bias": "all"}, "not merged: bias 'all'"),
        ({"fan_in_fan_out": True}, "not merged: fan_in_fan_out True"),
        ({"modules_to_save": ["lm_head"]}, "not merged: modules_to_save ['lm_head']"),
        ({"rank_pattern": {"q_proj": 8}}, "not merged: rank_pattern {'q_proj': 8}"),
        ({"alpha_pattern": {"q_proj": 8}}, "not merged: alpha_pattern {'q_proj': 8}"),
        ({"layer_replication": [[0, 2]]}, "not merged: layer_replication [[0, 2]]"),
        ({"init_lora_weights": "pissa"}, "not merged: init_lora_weights 'pissa'"),
        ({"use_dora": True, "bias": "all"}, "not merged: bias 'all', use_dora True"),
        ({"r": 0}, "r must be a whole number of at least 1"),
        ({"lora_alpha": "16"}, "lora_alpha must be a number"),
        ({"use_rslora": "no"}, "use_rslora must be true or false"),
    ],
)
def test_what_does_more_is_refused_by_name(adapter: Path, base: Path, settings: dict[str, Any], what: str) -> None:
    edit(adapter, **settings)
    error = failure(adapter, base)
    assert what in error.message
    assert "merged" not in what or "merge_and_unload" in str(error.hint)


def test_folders_that_are_no_adapters(adapter: Path, base: Path) -> None:
    assert "is not an adapter: it has no adapter_config.json" in failure(base, base).message
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    error = failure(adapter, base)
    assert error.message == f"{adapter} has no adapter_model.safetensors"
    assert "is a pickle and is never opened" in str(error.hint)


def test_an_adapter_in_place_of_a_model(adapter: Path) -> None:
    with pytest.raises(UsageError) as caught:
        models.read_spec(adapter)
    assert "--adapter" in str(caught.value.hint)


# -------------------------------------------------------------------------------------------------------- identity


def test_the_hash_follows_the_scale_and_every_number(adapter: Path) -> None:
    first = adapter_hash(adapter)
    edit(adapter, base_model_name_or_path="elsewhere", lora_dropout=0.0)
    assert adapter_hash(adapter) == first
    edit(adapter, lora_alpha=13)
    second = adapter_hash(adapter)
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.3.mlp.down_proj.lora_B.weight"][5, 1] += 1e-3
    save_file(tensors, adapter / "adapter_model.safetensors")
    assert len({first, second, adapter_hash(adapter)}) == 3


@pytest.mark.parametrize(
    ("name", "fits"),
    [("base", True), ("org/Base", True), ("/models/base/", True), ("base-instruct", False), ("org/other", False)],
)
def test_the_base_model_goes_by_its_last_name(adapter: Path, base: Path, name: str, fits: bool) -> None:
    assert read_adapter(adapter, models.read_spec(base)).fits(name) is fits


def test_a_run_with_an_adapter(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = write_manifest(tmp_path / "m.jsonl", [{"id": "a", "task": "score", "prompt": words(40)}])
    write_adapter(tmp_path / "adapter", tiny_model, base_model_name_or_path="somebody/else")
    run(manifest, tiny_model, tmp_path / "plain")
    run(manifest, tiny_model, tmp_path / "out", adapter=tmp_path / "adapter", quiet=False)
    warning = f"warning: the adapter {tmp_path / 'adapter'} was trained on somebody/else"
    assert warning in capsys.readouterr().err
    before, after = (results(tmp_path / name)[0]["logprobs"] for name in ("plain", "out"))
    assert before != after
    content = json.loads((tmp_path / "out" / "run.json").read_text())
    assert content["identity"]["adapter_hash"] == adapter_hash(tmp_path / "adapter")
    assert content["info"]["adapter"] == str(tmp_path / "adapter")
    assert "adapter_hash" not in json.loads((tmp_path / "plain" / "run.json").read_text())["identity"]
    with pytest.raises(UsageError, match=r"adapter_hash: \"[0-9a-f]+\" there, \(not set\) now"):
        run(manifest, tiny_model, tmp_path / "out")


def test_a_run_finds_a_wrong_adapter_before_it_starts(tmp_path: Path, tiny_model: Path) -> None:
    manifest = write_manifest(tmp_path / "m.jsonl", [{"id": "a", "prompt": words(4)}])
    write_adapter(tmp_path / "adapter", tiny_model, use_dora=True)
    with pytest.raises(UsageError, match="use_dora"):
        run(manifest, tiny_model, tmp_path / "out", adapter=tmp_path / "adapter")
    assert not (tmp_path / "out").exists()
