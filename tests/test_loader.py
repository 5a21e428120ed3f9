"""The strict loader on real folders: everything that can be wrong with one is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference_driver import forward
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, make, save
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from longbatch import models
from longbatch.errors import UsageError

CPU = torch.device("cpu")
IDS = torch.arange(3, 60)
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save("llama", tmp_path)
    return tmp_path


def logits(folder: Path) -> torch.Tensor:
    return forward(models.load(folder, torch.float32, CPU), IDS)


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Rewrites the folder's one weight file after a change to its tensors."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def set_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def failure(folder: Path) -> UsageError:
    with pytest.raises(UsageError) as caught:
        models.load(folder, torch.float32, CPU)
    return caught.value


# ------------------------------------------------------------------------------------------ what must load


def test_sharded_checkpoints_equal_single_ones(folder: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    make("llama").save_pretrained(sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert torch.equal(logits(sharded), logits(folder))
    assert models.model_hash(sharded) == models.model_hash(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_stored_types_are_cast(folder: Path, dtype: torch.dtype) -> None:
    reference = make("llama")
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.to(dtype))  # model.to() would round the rotary frequencies too
    edit(folder, lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()}))
    with torch.no_grad():
        assert (logits(folder) - reference(IDS[None]).logits[0]).abs().max() < 1e-4


def test_tied_checkpoints_may_keep_either_name_or_both(tmp_path: Path) -> None:
    save("qwen2", tmp_path)
    wanted = logits(tmp_path)
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    edit(tmp_path, lambda tensors: tensors.update({head: tensors[embed].clone()}))
    assert torch.equal(logits(tmp_path), wanted)
    edit(tmp_path, lambda tensors: tensors.pop(embed))
    assert torch.equal(logits(tmp_path), wanted)


def test_names_without_the_model_prefix(folder: Path) -> None:
    wanted = logits(folder)

    def strip(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit(folder, strip)
    assert torch.equal(logits(folder), wanted)


def test_rotary_buffers_of_old_checkpoints_are_ignored(folder: Path) -> None:
    wanted = logits(folder)
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert torch.equal(logits(folder), wanted)


def test_the_text_part_of_a_multimodal_gemma(tmp_path: Path) -> None:
    text = {**SIZES, "head_dim": 32, "sliding_window": 20, "num_hidden_layers": 6}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
        wanted = model(input_ids=IDS[None], token_type_ids=torch.zeros(1, len(IDS), dtype=torch.long)).logits[0]
    model.save_pretrained(tmp_path)
    assert wanted.std() > 0.1
    assert (logits(tmp_path) - wanted).abs().max() < 1e-4
    # Published checkpoints and those that transformers 5 writes put the two words in different orders.
    orders = ("model.language_model.", "language_model.model.")
    old, new = orders if any(orders[0] in name for name in load_file(tmp_path / "model.safetensors")) else orders[::-1]

    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new)] = tensors.pop(name)

    edit(tmp_path, rename)
    assert any(name.startswith(new) for name in load_file(tmp_path / "model.safetensors"))
    assert (logits(tmp_path) - wanted).abs().max() < 1e-4


# ---------------------------------------------------------------------------------------- what must be refused


def test_every_fault_is_named_at_once(folder: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 63)
        tensors["model.layers.9.extra.weight"] = torch.zeros(3, 2)
        tensors["model.layers.2.mlp.down_proj.weight"] = torch.zeros(64, 96, dtype=torch.uint8)

    edit(folder, change)
    message = failure(folder).message
    assert message.splitlines()[0] == "the weights are not those of the config (LlamaForCausalLM):"
    assert sorted(message.splitlines()[1:]) == [
        "  extra: model.layers.9.extra.weight [3, 2]",
        "  missing: model.layers.1.self_attn.k_proj.weight [32, 64]",
        "  missing: model.norm.weight [64]",
        "  unsupported type U8 (quantized?): model.layers.2.mlp.down_proj.weight",
        "  wrong shape: model.layers.0.mlp.up_proj.weight [96, 63], the config needs [96, 64]",
    ]


def test_an_absent_head_of_an_untied_model_is_missing(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "missing: lm_head.weight [200, 64]" in failure(folder).message


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    edit(tmp_path, lambda tensors: tensors.pop(name))
    assert failure(tmp_path).message.splitlines()[1:] == [f"  missing: {name} [40, 64]"]


def test_stacked_experts_of_another_shape(tmp_path: Path) -> None:
    save("gpt_oss", tmp_path)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    edit(tmp_path, lambda tensors: tensors.update({name: tensors[name].transpose(1, 2).contiguous()}))
    fault = f"  wrong shape: {name} [8, 192, 64], the config needs [8, 64, 192]"
    assert failure(tmp_path).message.splitlines()[1:] == [fault]


def test_one_weight_by_two_names(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(64)}))
    assert "are the same weight by two names" in failure(folder).message


def test_a_tensor_in_two_shards(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "b.safetensors")
    weight_map = {"model.norm.weight": "model.safetensors", "lm_head.weight": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "is in both b.safetensors and model.safetensors" in failure(folder).message


def test_missing_shards_are_named(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1:3]
    for path in gone:
        path.unlink()
    error = failure(tmp_path)
    assert error.message.endswith(f"lacks weight files: {gone[0].name}, {gone[1].name}")
    assert error.hint == "download the model again to complete it"


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_cannot_leave_the_folder(folder: Path, name: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    assert failure(folder).message.endswith(f"names files outside the folder: {name}")


def test_an_index_without_a_map(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")
    assert failure(folder).message.endswith("has no weight_map")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("pytorch_model.bin", "pytorch_model.bin is a pickle and is never opened"),
        ("model.pth", "model.pth is a pickle and is never opened"),
        ("model.Q4_K_M.gguf", "run `longbatch convert FILE DIR` on the GGUF file"),
        ("notes.txt", "download the model's safetensors files"),
    ],
)
def test_other_formats_are_named_with_their_mend(folder: Path, name: str, hint: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    error = failure(folder)
    assert "has neither model.safetensors nor model.safetensors.index.json" in error.message
    assert str(error.hint).startswith(hint)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:5], "is not a safetensors file, or was cut short"),
        (lambda data: data[:200], "is not a safetensors file, or was cut short"),
        (lambda data: data[:-100], "was cut short: "),
        (lambda data: b"\xff" * 8 + data[8:], "is not a safetensors file, or was cut short"),
        (lambda data: data[:8] + b"[" + data[9:], "cannot be read"),
        (lambda data: data.replace(b'"shape":[200,64]', b'"shape":[201,64]', 1), "needs others"),
        (lambda data: data.replace(b'"shape":[200,64]', b'"shape":["20",4]', 1), "needs others"),
        (lambda data: data.replace(b'"shape":[200,64]', b'"shape":{"0":44}', 1), "needs others"),
        (lambda data: data.replace(b'"data_offsets":[', b'"data_offsats":[', 1), "is damaged"),
        (lambda data: data.replace(b'"data_offsets":[0', b'"data_offsets":[9', 1), "needs others"),
    ],
    ids=["tiny", "header", "tail", "length", "json", "shape", "text-shape", "object-shape", "no-offsets", "offset"],
)
def test_damaged_files(folder: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    assert damage(data) != data
    path.write_bytes(damage(data))
    error = failure(folder).message
    assert message in error
    assert str(path) in error
    with pytest.raises(UsageError):
        models.model_hash(folder)


def test_a_config_of_another_size(folder: Path) -> None:
    set_config(folder, num_hidden_layers=3)
    message = failure(folder).message
    assert message.count("extra: model.layers.3.") == 9
    assert "missing" not in message


# ------------------------------------------------------------------------------------------------- identity


def test_the_hash_follows_weights_and_settings_only(folder: Path, tmp_path: Path) -> None:
    first = models.model_hash(folder)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.glob("*.*"):
        shutil.copy(path, copy)
    set_config(copy, transformers_version="4.0.0", _name_or_path="elsewhere")
    assert models.model_hash(copy) == first
    set_config(copy, rms_norm_eps=1e-5)
    assert models.model_hash(copy) != first
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [9]}))
    assert models.model_hash(copy) != first
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.3}))
    assert models.model_hash(copy) == first
    edit(copy, lambda tensors: tensors["model.layers.2.self_attn.v_proj.weight"].add_(1e-3))
    assert models.model_hash(copy) != first


def test_the_hash_samples_large_tensors(tmp_path: Path) -> None:
    """A tensor far larger than its sample: an even change is seen whichever tensor it touches."""
    config = {**SIZES, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": 40_000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": torch.zeros(40_000, 64), "lm_head.weight": torch.zeros(40_000, 64)}
    save_file(tensors, tmp_path / "model.safetensors")
    hashes = {models.model_hash(tmp_path)}
    for name in tensors:
        edit(tmp_path, lambda tensors, name=name: tensors[name].add_(1e-3))
        hashes.add(models.model_hash(tmp_path))
    assert len(hashes) == 3
