"""Qwen 3 mixture of experts (30B-A3B, 235B-A22B): Qwen 3's attention over sparse MLPs, few layers dense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from longbatch.models.families.config import Config, rope_spec
from longbatch.models.families.llama import NAMES, model_spec
from longbatch.models.spec import LayerSpec, ModelSpec, MoeSpec

_EXPERT = "model.layers.{layer}.mlp.experts.{expert}."
_NAMES = {
    **NAMES,
    "router": ("model.layers.{layer}.mlp.gate.weight",),
    "expert_gate_up": (f"{_EXPERT}gate_proj.weight", f"{_EXPERT}up_proj.weight"),
    "expert_down": (f"{_EXPERT}down_proj.weight",),
}


def describe(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a Qwen3-MoE config."""
    reader = Config(config)
    heads, groups, head_dim = reader.heads()
    attention_bias = reader.flag("attention_bias", False)
    dense = LayerSpec(
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        rope=rope_spec(reader, head_dim),
        scale=head_dim**-0.5,
        window=reader.optional_integer("sliding_window", 4096) if reader.flag("use_sliding_window", False) else None,
        qk_norm=True,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        activation=reader.activation("hidden_act"),
        intermediate_size=reader.integer("intermediate_size"),
    )
    moe = MoeSpec(
        num_experts=reader.integer("num_local_experts" if reader.has("num_local_experts") else "num_experts", 128),
        experts_per_token=reader.integer("num_experts_per_tok", 8),
        intermediate_size=reader.integer("moe_intermediate_size"),
        score="softmax_then_topk",
        renormalize=reader.flag("norm_topk_prob", False),
        style="swiglu",
    )
    sparse = replace(dense, intermediate_size=0, moe=moe)
    step, always_dense = reader.integer("decoder_sparse_step", 1), reader.integers("mlp_only_layers")
    layers = tuple(
        dense if number in always_dense or (number + 1) % step else sparse
        for number in range(reader.integer("num_hidden_layers"))
    )
    return model_spec("qwen3_moe", reader, layers, names=_NAMES)
