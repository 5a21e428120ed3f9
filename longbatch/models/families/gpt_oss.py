"""gpt-oss (20b, 120b) with bfloat16 experts: attention sinks, windows in every other layer, biased experts.

The published checkpoints keep the experts in mxfp4 and are refused as such; versions in bfloat16 are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from longbatch.models.families.config import FULL, SLIDING, Config, rope_spec
from longbatch.models.families.llama import NAMES, model_spec
from longbatch.models.spec import LayerSpec, ModelSpec, MoeSpec

_MLP = "model.layers.{layer}.mlp."
_NAMES = {
    **NAMES,
    "sinks": ("model.layers.{layer}.self_attn.sinks",),
    "router": (f"{_MLP}router.weight",),
    "router_bias": (f"{_MLP}router.bias",),
    "expert_gate_up": (f"{_MLP}experts.gate_up_proj",),
    "expert_gate_up_bias": (f"{_MLP}experts.gate_up_proj_bias",),
    "expert_down": (f"{_MLP}experts.down_proj",),
    "expert_down_bias": (f"{_MLP}experts.down_proj_bias",),
}
_THETA = 150_000.0
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def describe(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a gpt-oss config."""
    has_rope = config.get("rope_parameters") or config.get("rope_scaling")
    reader = Config(config if has_rope else {**config, "rope_parameters": _ROPE})
    heads, groups, head_dim = reader.heads(default_head_dim=64)
    attention_bias = reader.flag("attention_bias", True)
    moe = MoeSpec(
        num_experts=reader.integer("num_local_experts" if reader.has("num_local_experts") else "num_experts"),
        experts_per_token=reader.integer("num_experts_per_tok", 4),
        intermediate_size=reader.integer("intermediate_size"),
        score="topk_then_softmax",
        renormalize=False,
        style="gpt_oss",
        alpha=reader.number("swiglu_alpha", 1.702),
        limit=reader.number("swiglu_limit", 7.0),
    )
    full = LayerSpec(
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        rope=rope_spec(reader, head_dim, theta=_THETA),
        scale=head_dim**-0.5,
        sinks=True,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        moe=moe,
    )
    sliding = replace(full, window=reader.optional_integer("sliding_window", 128))
    types = reader.layer_types(lambda number: FULL if number % 2 else SLIDING)
    layers = [sliding if kind == SLIDING else full for kind in types]
    return model_spec("gpt_oss", reader, layers, names=_NAMES)
