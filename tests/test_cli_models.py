"""`longbatch models list` and `check` on folders made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prompt_folders import write_folder

from longbatch.cli import main
from longbatch.models.local import local_models

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2000,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


LAYER = {
    "input_layernorm": (16,),
    "post_attention_layernorm": (16,),
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (8, 16),
    "self_attn.v_proj": (8, 16),
    "self_attn.o_proj": (16, 16),
    "mlp.gate_proj": (32, 16),
    "mlp.up_proj": (32, 16),
    "mlp.down_proj": (16, 32),
}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A model folder with every tensor of its config, all zero."""
    import torch
    from safetensors.torch import save_file

    folder = write_folder(tmp_path / "model", "chatml")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = {"model.embed_tokens.weight": (2000, 16), "model.norm.weight": (16,)}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in LAYER.items()}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def test_check_describes_a_model_that_can_be_loaded(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "check", str(model_folder)]) == 0
    printed = capsys.readouterr().out
    assert "LlamaForCausalLM" in printed
    assert "in 2 layers" in printed
    assert "longest sequence 512 tokens" in printed


def test_check_names_what_is_missing(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert main(["models", "check", str(model_folder)]) == 2
    printed = capsys.readouterr().err
    assert "missing: model.layers.2." in printed
    assert "Traceback" not in printed


def test_check_says_how_a_model_is_quantized(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from quantized_files import awq, quantize_folder

    quantize_folder(model_folder, model_folder / "twin", {"quant_method": "awq", "bits": 4, "group_size": 8}, awq(8))
    assert main(["models", "check", str(model_folder)]) == 0
    wanted = "14 of 20 weights quantized (AWQ, 4 bits, groups of 8), dequantized when they are loaded"
    assert wanted in capsys.readouterr().out


def test_list_shows_converted_and_pulled_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LONGBATCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert local_models() == []
    assert main(["models", "list"]) == 0
    assert "no models here" in capsys.readouterr().out
    repository = tmp_path / "hub" / "models--some--model-7b"
    folders = [
        tmp_path / "cache" / "models" / "small",
        repository / "snapshots" / "abc",
        repository / "snapshots" / "def",
    ]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, commit in (("main", "abc"), ("pr/2", "def"), ("gone", "123")):
        reference = repository / "refs" / name
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)
    assert [(model.name, model.folder) for model in local_models()] == [
        (str(folders[0]), folders[0]),
        ("some/model-7b", folders[1]),
        ("some/model-7b@pr/2", folders[2]),
    ]
    assert main(["models", "list"]) == 0
    printed = capsys.readouterr().out
    assert "some/model-7b  LlamaForCausalLM" in printed
    assert "supported: " in printed
