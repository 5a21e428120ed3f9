"""Small random models of every family, made by transformers: the references of the parity tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 24}
GPT_OSS_YARN = {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}


def longrope(num_frequencies: int) -> dict[str, Any]:
    """A longrope entry with factors that differ from frequency to frequency."""
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.02 * i for i in range(num_frequencies)],
        "long_factor": [1.5 + 0.7 * i for i in range(num_frequencies)],
    }


# name of a case -> (config class, settings beyond SIZES)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-biases-tied": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-head-dim": ("LlamaConfig", {"head_dim": 20}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama-dynamic": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.5}, "max_position_embeddings": 100},
    ),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama-llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 37}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 2}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3-yarn-bias": ("Qwen3Config", {"head_dim": 32, "attention_bias": True, "rope_parameters": YARN}),
    "qwen3_moe": ("Qwen3MoeConfig", {**MOE, "norm_topk_prob": True}),
    "qwen3_moe-mixed": ("Qwen3MoeConfig", {**MOE, "mlp_only_layers": [1], "decoder_sparse_step": 2}),
    "phi3": ("Phi3Config", {"sliding_window": 64}),
    "phi3-longrope-long": (
        "Phi3Config",
        {"rope_parameters": longrope(6), "partial_rotary_factor": 0.75, "original_max_position_embeddings": 128},
    ),
    "phi3-longrope-short": (
        "Phi3Config",
        {"rope_parameters": longrope(8), "original_max_position_embeddings": 512, "tie_word_embeddings": True},
    ),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 32, "sliding_window": 40, "query_pre_attn_scalar": 20}),
    "gemma3-scaled-capped": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "sliding_window": 40,
            "final_logit_softcapping": 5.0,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 30,
            "rope_parameters": GPT_OSS_YARN,
        },
    ),
}


def make(case: str, seed: int = 0) -> Any:
    """The transformers model of a case, with random weights in every tensor, norms, biases and sinks included."""
    config_class, settings = CASES[case]
    config = getattr(transformers, config_class)(**{**SIZES, **settings})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.empty_like(parameter).normal_(generator=generator)
            if "norm" in name:
                parameter.copy_((0.0 if "Gemma" in config_class else 1.0) + 0.2 * noise)
            elif parameter.ndim == 1 or "bias" in name:
                parameter.copy_(0.2 * noise)
            else:
                parameter.copy_(0.12 * noise)
    return model


def save(case: str, folder: Path) -> Any:
    """The model of a case, and its folder written as transformers does."""
    model = make(case)
    model.save_pretrained(folder)
    return model
