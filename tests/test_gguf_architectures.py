"""Every architecture: a random transformers model to GGUF as llama.cpp does it, and back; the logits must stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest
import tiny_models
import torch
import transformers

from longbatch.errors import UsageError
from longbatch.models import read_spec
from longbatch.models.gguf import convert

# Settings beyond tiny_models' for what GGUF fixes: Llama 3's four numbers, Gemma's sixth layer and query scale.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-llama3": ("LlamaConfig", {"rope_parameters": LLAMA3, "head_dim": 64}),
    "gemma3-six": (
        "Gemma3TextConfig",
        {"head_dim": 32, "sliding_window": 40, "query_pre_attn_scalar": 32, "num_hidden_layers": 6},
    ),
}
UNCHANGED = [
    "llama",
    "llama-head-dim",
    "llama-linear",
    "llama-yarn",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "phi3",
    "phi3-longrope-long",
    "phi3-longrope-short",
    "gpt_oss",
]


def rope_factors(case: str) -> Any:
    """Adds the tensors in which llama.cpp keeps RoPE factors."""

    def change(writer: gguf.GGUFWriter, tensors: dict[str, gguf_files.Array]) -> None:
        rope = tiny_models.CASES[case][1].get("rope_parameters", {})
        if rope.get("rope_type") == "longrope":
            for kind in ("long", "short"):
                tensors[f"rope_factors_{kind}.weight"] = np.asarray(rope[f"{kind}_factor"], dtype=np.float32)
        if case == "llama-llama3":
            tensors["rope_freqs.weight"] = llama3_divisors(64)

    return change


def llama3_divisors(head: int) -> gguf_files.Array:
    """As convert_hf_to_gguf.py computes them, one by one."""
    divisors = []
    for frequency in 1.0 / (LLAMA3["rope_theta"] ** (np.arange(0, head, 2) / head)):
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4.0:
            divisors.append(1.0)
        elif wavelength > 8192 / 1.0:
            divisors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / 32.0 + smooth))
    return np.asarray(divisors, dtype=np.float32)


@pytest.fixture
def exact_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, case in EXACT.items():
        monkeypatch.setitem(tiny_models.CASES, name, case)


@pytest.mark.parametrize("case", [*UNCHANGED, *EXACT])
@pytest.mark.usefixtures("exact_cases")
def test_round_trip_keeps_logits(case: str, tmp_path: Path) -> None:
    model = tiny_models.make(case)
    gguf_files.write(tmp_path / "model.gguf", model, rope_factors(case))
    convert(tmp_path / "model.gguf", tmp_path / "model")
    back = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.randint(0, 200, (1, 150), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(back(ids).logits, model(ids).logits, rtol=0, atol=2e-5)
    assert read_spec(tmp_path / "model").num_parameters > 0


def test_window_of_a_llama_file_is_refused_or_kept(tmp_path: Path) -> None:
    """Mistral 7B v0.1 is a llama with a window, which llama.cpp's llama ignores; ours must not lose it silently."""
    gguf_files.write(tmp_path / "model.gguf", tiny_models.make("mistral-window"))
    convert(tmp_path / "model.gguf", tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    assert (config.model_type, config.sliding_window) == ("mistral", 37)


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_0", "Q5_1", "F16", "BF16"])
def test_quantized_weights_are_the_gguf_packages(quantization: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    kind = gguf.GGMLQuantizationType[quantization]
    packed: dict[str, Any] = {}

    def change(writer: gguf.GGUFWriter, tensors: dict[str, gguf_files.Array]) -> None:
        values = tensors.pop("blk.1.ffn_down.weight")
        packed["data"] = gguf.quants.quantize(values, kind)
        writer.add_tensor("blk.1.ffn_down.weight", packed["data"], raw_dtype=kind)

    gguf_files.write(tmp_path / "model.gguf", tiny_models.make("llama"), change)
    convert(tmp_path / "model.gguf", tmp_path / "model")
    found = load_file(tmp_path / "model" / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(found, gguf.quants.dequantize(packed["data"], kind))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_round_like_torch(dtype: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    gguf_files.write(tmp_path / "model.gguf", tiny_models.make("qwen2"))
    convert(tmp_path / "model.gguf", tmp_path / "exact")
    convert(tmp_path / "model.gguf", tmp_path / "rounded", dtype=dtype)
    exact = load_file(tmp_path / "exact" / "model.safetensors")
    rounded = load_file(tmp_path / "rounded" / "model.safetensors")
    assert exact.keys() == rounded.keys()
    for name, values in exact.items():
        assert torch.equal(values.to(getattr(torch, dtype)), rounded[name]), name


def test_float16_overflow_is_refused(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter, tensors: dict[str, gguf_files.Array]) -> None:
        tensors["output_norm.weight"] = np.full_like(tensors["output_norm.weight"], 1e6)

    gguf_files.write(tmp_path / "model.gguf", tiny_models.make("qwen2"), change)
    with pytest.raises(UsageError, match=r"model\.norm\.weight holds values that float16 cannot"):
        convert(tmp_path / "model.gguf", tmp_path / "model", dtype="float16")
    assert not (tmp_path / "model").exists()


def test_unknown_llama3_scaling_is_refused(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter, tensors: dict[str, gguf_files.Array]) -> None:
        tensors["rope_freqs.weight"] = np.linspace(1, 9, 8, dtype=np.float32)

    gguf_files.write(tmp_path / "model.gguf", tiny_models.make("llama"), change)
    with pytest.raises(UsageError, match="not the scaling of any known Llama model"):
        convert(tmp_path / "model.gguf", tmp_path / "model")
