"""Qwen 2 and 2.5: Llama's shape with biases on q, k and v; a few checkpoints use windows in the upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from longbatch.models.families.config import FULL, SLIDING, Config, rope_spec
from longbatch.models.families.llama import model_spec
from longbatch.models.spec import LayerSpec, ModelSpec


def describe(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a Qwen2 config."""
    reader = Config(config)
    heads, groups, head_dim = reader.heads()
    layer = LayerSpec(
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        rope=rope_spec(reader, head_dim),
        scale=head_dim**-0.5,
        qkv_bias=True,
        activation=reader.activation("hidden_act"),
        intermediate_size=reader.integer("intermediate_size"),
    )
    return model_spec("qwen2", reader, windowed(reader, layer))


def windowed(config: Config, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """All layers of a Qwen model: full attention, but a window from `max_window_layers` on where it is in use."""
    window = config.optional_integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else None
    first = config.integer("max_window_layers", 28, least=0)
    types = config.layer_types(lambda number: SLIDING if window is not None and number >= first else FULL)
    return tuple(replace(layer, window=window) if kind == SLIDING else layer for kind in types)
