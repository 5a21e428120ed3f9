"""Llama 1 to 3.3, and the many models of its shape (SmolLM2, Yi, TinyLlama).

Also the shared ground of the families that differ from it in little: their checkpoints use its tensor names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longbatch.models.families.config import Config, longest_sequence, rope_spec
from longbatch.models.spec import LayerSpec, ModelSpec

_ATTENTION = "model.layers.{layer}.self_attn."
_MLP = "model.layers.{layer}.mlp."

NAMES: dict[str, tuple[str, ...]] = {
    "embed": ("model.embed_tokens.weight",),
    "input_norm": ("model.layers.{layer}.input_layernorm.weight",),
    "qkv": tuple(f"{_ATTENTION}{name}_proj.weight" for name in "qkv"),
    "qkv_bias": tuple(f"{_ATTENTION}{name}_proj.bias" for name in "qkv"),
    "q_norm": (f"{_ATTENTION}q_norm.weight",),
    "k_norm": (f"{_ATTENTION}k_norm.weight",),
    "out": (f"{_ATTENTION}o_proj.weight",),
    "out_bias": (f"{_ATTENTION}o_proj.bias",),
    "mlp_norm": ("model.layers.{layer}.post_attention_layernorm.weight",),
    "gate_up": (f"{_MLP}gate_proj.weight", f"{_MLP}up_proj.weight"),
    "gate_up_bias": (f"{_MLP}gate_proj.bias", f"{_MLP}up_proj.bias"),
    "down": (f"{_MLP}down_proj.weight",),
    "down_bias": (f"{_MLP}down_proj.bias",),
    "final_norm": ("model.norm.weight",),
    "head": ("lm_head.weight",),
}

# Checkpoints of a bare decoder leave out the `model.` of a causal language model.
RENAMES = ((r"^(?=(embed_tokens|layers|norm)\.)", "model."),)
# Buffers that old versions of transformers saved.
IGNORED = (r"rotary_emb\.inv_freq$", r"\.attention\.(masked_)?bias$")


def describe(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a Llama config."""
    reader = Config(config)
    heads, groups, head_dim = reader.heads()
    attention_bias = reader.flag("attention_bias", False)
    layer = LayerSpec(
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        rope=rope_spec(reader, head_dim),
        scale=head_dim**-0.5,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=reader.flag("mlp_bias", False),
        activation=reader.activation("hidden_act"),
        intermediate_size=reader.integer("intermediate_size"),
    )
    return model_spec("llama", reader, (layer,) * reader.integer("num_hidden_layers"))


def model_spec(
    family: str,
    config: Config,
    layers: Sequence[LayerSpec],
    *,
    names: Mapping[str, tuple[str, ...]] = NAMES,
    tied_by_default: bool = False,
    max_length: int | None = None,
) -> ModelSpec:
    """What the families of Llama's shape share around their layers. max_length: where it is not the rope's."""
    rope = next((layer.rope for layer in layers if layer.rope is not None), None)
    if max_length is None:
        max_length = config.integer("max_position_embeddings") if rope is None else longest_sequence(rope)
    bos_ids = config.token_ids("bos_token_id")
    return ModelSpec(
        family=family,
        architecture=str((config.values.get("architectures") or [family])[0]),
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        layers=tuple(layers),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        max_length=max_length,
        tied_embeddings=config.flag("tie_word_embeddings", tied_by_default),
        eos_ids=config.token_ids("eos_token_id"),
        bos_id=bos_ids[0] if bos_ids else None,
        renames=RENAMES,
        ignored=IGNORED,
        weight_names=names,
    )
