"""Qwen 3, dense: norms on q and k instead of Qwen 2's biases, head dimension 128 whatever the width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longbatch.models.families.config import Config, rope_spec
from longbatch.models.families.llama import model_spec
from longbatch.models.families.qwen2 import windowed
from longbatch.models.spec import LayerSpec, ModelSpec


def describe(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a Qwen3 config."""
    reader = Config(config)
    heads, groups, head_dim = reader.heads(default_head_dim=128)
    attention_bias = reader.flag("attention_bias", False)
    layer = LayerSpec(
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        rope=rope_spec(reader, head_dim),
        scale=head_dim**-0.5,
        qk_norm=True,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        activation=reader.activation("hidden_act"),
        intermediate_size=reader.integer("intermediate_size"),
    )
    return model_spec("qwen3", reader, windowed(reader, layer))
