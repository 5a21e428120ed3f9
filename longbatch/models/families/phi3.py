"""Phi-3, Phi-3.5 mini and Phi-4 mini: q, k, v and gate, up fused in the checkpoint, longrope for long inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longbatch.models.families.config import Config, rope_spec
from longbatch.models.families.llama import NAMES, model_spec
from longbatch.models.spec import LayerSpec, ModelSpec

_NAMES = {
    **NAMES,
    "qkv": ("model.layers.{layer}.self_attn.qkv_proj.weight",),
    "gate_up": ("model.layers.{layer}.mlp.gate_up_proj.weight",),
}
# Names that earlier Phi-3 configs gave to longrope.
_LONGROPE = ("su", "yarn")


def describe(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a Phi-3 config."""
    reader = Config(_with_longrope(config))
    heads, groups, head_dim = reader.heads()
    layer = LayerSpec(
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        rope=rope_spec(reader, head_dim),
        scale=head_dim**-0.5,
        window=reader.optional_integer("sliding_window"),
        activation=reader.activation("hidden_act"),
        intermediate_size=reader.integer("intermediate_size"),
    )
    return model_spec("phi3", reader, (layer,) * reader.integer("num_hidden_layers"), names=_NAMES)


def _with_longrope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with longrope under its one name, and the trained length that Phi-3 leaves out when it is 4096."""
    values = {"original_max_position_embeddings": 4096, **config}
    for key in ("rope_scaling", "rope_parameters"):
        entry = values.get(key)
        if isinstance(entry, dict) and entry.get("rope_type", entry.get("type")) in _LONGROPE:
            values[key] = {**entry, "rope_type": "longrope"}
    return values
