"""Mistral 7B to Mistral Large and Nemo: Llama's shape, some with a sliding window over all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longbatch.models.families.config import Config, rope_spec
from longbatch.models.families.llama import model_spec
from longbatch.models.spec import LayerSpec, ModelSpec


def describe(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a Mistral config."""
    reader = Config(config)
    heads, groups, head_dim = reader.heads()
    layer = LayerSpec(
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        rope=rope_spec(reader, head_dim),
        scale=head_dim**-0.5,
        window=reader.optional_integer("sliding_window", 4096),
        activation=reader.activation("hidden_act"),
        intermediate_size=reader.integer("intermediate_size"),
    )
    return model_spec("mistral", reader, (layer,) * reader.integer("num_hidden_layers"))
