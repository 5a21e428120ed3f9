"""Every family against transformers' own code, fp32, on random weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference_driver import forward
from tiny_models import CASES, save

from longbatch import models
from longbatch.errors import UsageError

CPU = torch.device("cpu")
NUM_POSITIONS = 300


def ids(num_tokens: int = NUM_POSITIONS, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 200, (num_tokens,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    reference = save(case, tmp_path)
    with torch.no_grad():
        wanted = reference(ids()[None]).logits[0]
    decoder = models.load(tmp_path, torch.float32, CPU)
    whole = forward(decoder, ids())
    assert wanted.std() > 0.3  # else the comparison would say little
    assert whole.dtype == torch.float32
    assert (whole - wanted).abs().max() <= 1e-4
    tiled = forward(decoder, ids(), tile=128)
    assert (tiled - wanted).abs().max() <= 1e-4


def test_bfloat16_stays_close_to_float32(tmp_path: Path) -> None:
    """Every family's bfloat16 path runs, keeps its dtype, and errs by no more than bfloat16 explains."""
    for case in ("llama", "qwen3", "phi3", "gemma3", "qwen3_moe", "gpt_oss"):
        folder = tmp_path / case
        save(case, folder)
        exact = forward(models.load(folder, torch.float32, CPU), ids(64))
        decoder = models.load(folder, torch.bfloat16, CPU)
        assert decoder.embed(ids(3)).dtype == torch.bfloat16
        rough = forward(decoder, ids(64))
        assert rough.dtype == torch.float32
        # Routing to another expert may change single rows a lot; the typical row must not move.
        error = (rough - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert error.median() < 0.05, case


def test_layers_report_their_streams_and_windows(tmp_path: Path) -> None:
    save("gemma3", tmp_path)
    spec = models.read_spec(tmp_path)
    assert [layer.window for layer in spec.layers] == [40, 40, 40, 40]
    assert {stream.window for layer in spec.layers for stream in layer.streams} == {40}
    assert spec.embed_scale == 8.0
    assert spec.tied_embeddings
    assert spec.layers[0].scale == pytest.approx(20**-0.5)


@pytest.mark.parametrize("case", ["llama", "llama-biases-tied", "qwen3", "phi3", "gemma3", "qwen3_moe"])
def test_parameter_count_is_the_checkpoints(case: str, tmp_path: Path) -> None:
    """The spec's count leaves out norms and biases only."""
    reference = save(case, tmp_path)
    matrices = sum(tensor.numel() for tensor in reference.parameters() if tensor.ndim > 1)
    assert models.read_spec(tmp_path).num_parameters == matrices


@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen3_moe", "gpt_oss"])
def test_random_weights_depend_on_the_seed_alone(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    spec = models.read_spec(tmp_path)
    first, again, other = (forward(models.random_weights(spec, torch.float32, CPU, s), ids(20)) for s in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.isfinite().all()
    assert first.std() > 0


def test_end_of_text_ids_come_from_the_generation_config(tmp_path: Path) -> None:
    save("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert models.read_spec(tmp_path).eos_ids == (7, 2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    assert models.read_spec(tmp_path).eos_ids == (2,)
    (tmp_path / "generation_config.json").unlink()
    assert models.read_spec(tmp_path).eos_ids == (2,)
    assert models.read_spec(tmp_path).bos_id == 1


def test_reading_a_spec_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    save("gemma3", tmp_path)
    code = (
        "import sys, pathlib; from longbatch import models; models.read_spec(pathlib.Path(sys.argv[1])); "
        "models.model_hash(pathlib.Path(sys.argv[1])); "
        "sys.exit(str([name for name in ('torch', 'transformers', 'safetensors') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.stderr.strip() == "[]"


# ------------------------------------------------------------------------------------- configs, old and odd

LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def test_old_and_new_rope_settings_are_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = {**LLAMA_CONFIG, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    older = {**LLAMA_CONFIG, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = {**LLAMA_CONFIG, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    specs = [models.describe(config) for config in (old, older, new)]
    assert specs[0] == specs[1] == specs[2]
    assert specs[0].layers[0].rope is not None
    assert (specs[0].layers[0].rope.theta, specs[0].layers[0].rope.original_length) == (5e5, 64)


def test_gemma3_keeps_the_ropes_of_its_layer_types_apart() -> None:
    base = {
        **LLAMA_CONFIG,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 16,
        "num_hidden_layers": 7,
        "num_key_value_heads": 2,
        "sliding_window": 100,
    }
    old = {
        **base,
        "rope_theta": 2e6,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    }
    new = {
        **base,
        "layer_types": [("full" if (i + 1) % 3 == 0 else "sliding") + "_attention" for i in range(7)],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    }
    spec = models.describe(old)
    assert spec == models.describe(new)
    assert [layer.window for layer in spec.layers] == [100, 100, None, 100, 100, None, 100]
    assert [layer.rope.theta for layer in spec.layers[1:3] if layer.rope] == [2e4, 2e6]
    assert [layer.rope.kind for layer in spec.layers[1:3] if layer.rope] == ["default", "linear"]
    assert spec.max_length == 512  # Gemma's length already includes the scaling


def test_phi3_longrope_by_its_earlier_name() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = {
        **LLAMA_CONFIG,
        "architectures": ["Phi3ForCausalLM"],
        "max_position_embeddings": 131072,
        "rope_scaling": {"type": "su", **factors},
    }
    rope = models.describe(config).layers[0].rope
    assert rope is not None
    assert (rope.kind, rope.original_length, rope.parameters["factor"]) == ("longrope", 4096, 32.0)


def test_longest_sequence_counts_the_scaling_where_the_config_does_not() -> None:
    def longest(scaling: dict[str, object]) -> int:
        return models.describe({**LLAMA_CONFIG, "rope_scaling": scaling}).max_length

    assert longest({"rope_type": "linear", "factor": 4.0}) == 2048
    assert longest({"rope_type": "dynamic", "factor": 2.0}) == 1024
    assert longest({"rope_type": "yarn", "factor": 4.0}) == 2048
    assert longest({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}) == 512


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "model MambaForCausalLM is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification is not supported"),
        ({"architectures": ["X"], "auto_map": {"AutoModel": "x.X"}}, "remote code named by auto_map"),
        ({"architectures": None, "model_type": "mamba"}, "model mamba is not supported"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantized with mxfp4"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "quantized with gptq in 3 bits"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized with bitsandbytes"),
        ({"compression_config": {"format": "int4"}}, "quantized with unknown"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number of at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number of at least 1"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; known: silu"),
        ({"head_dim": 15}, "cannot rotate 15 dimensions of a head of 15"),
        ({"rope_scaling": {"rope_type": "axial"}}, "rope type 'axial' is not supported; known: default, linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling lacks factor"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "short_factor must be a list of 8"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "a list of 2 names"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention", "linear_attention"]},
            "layer type linear_attention is not supported",
        ),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "bidirectional attention"),
        ({"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_odd_configs_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        models.describe({**LLAMA_CONFIG, **change})
    assert message in caught.value.message


def test_unknown_models_are_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        models.describe({"architectures": ["MambaForCausalLM"]})
    assert caught.value.hint is not None
    assert "LlamaForCausalLM" in caught.value.hint
    assert "GptOssForCausalLM" in caught.value.hint


def test_native_models_are_read_whatever_their_auto_map_says() -> None:
    config = {**LLAMA_CONFIG, "auto_map": {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}}
    assert models.describe(config).family == "llama"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "is missing"), (b"{", "cannot be read"), (b"[]", "must hold a JSON object"), (b"\xff", "cannot be read")],
    ids=["absent", "cut", "list", "bytes"],
)
def test_unreadable_config(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        models.read_spec(tmp_path)
    assert message in caught.value.message
    assert str(tmp_path / "config.json") in caught.value.message


def test_an_adapter_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError) as caught:
        models.read_spec(tmp_path)
    assert "LoRA" in str(caught.value.hint)
