"""Gemma 3, text only: five sliding layers to one global, each kind with its own rope; norms before and after.

Checkpoints with a vision tower (Gemma3ForConditionalGeneration) are read for their text part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from longbatch.errors import UsageError
from longbatch.models.families.config import FULL, SLIDING, Config, rope_spec
from longbatch.models.families.llama import IGNORED, NAMES, RENAMES, model_spec
from longbatch.models.spec import LayerSpec, ModelSpec

_LAYER = "model.layers.{layer}."
_NAMES = {
    **NAMES,
    "attention_out_norm": (f"{_LAYER}post_attention_layernorm.weight",),
    "mlp_norm": (f"{_LAYER}pre_feedforward_layernorm.weight",),
    "mlp_out_norm": (f"{_LAYER}post_feedforward_layernorm.weight",),
}
_RENAMES = (
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^(language_model\.model|model\.language_model)\.", "model."),
    *RENAMES,
)
_IGNORED = (*IGNORED, r"(^|\.)vision_tower\.", r"(^|\.)multi_modal_projector\.")
# Configs of multimodal checkpoints leave out what equals transformers' defaults.
_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def describe(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a Gemma 3 config, or of the text part of a multimodal one."""
    reader = _text_config(config)
    if reader.flag("use_bidirectional_attention", False):
        raise UsageError("Gemma 3 with bidirectional attention is an encoder, which is not supported")
    if reader.has("attn_logit_softcapping"):
        raise UsageError("Gemma 3 with attn_logit_softcapping is not supported")
    heads, groups, head_dim = reader.heads()
    pattern = reader.integer("sliding_window_pattern", 6)
    attention_bias = reader.flag("attention_bias", False)
    full = LayerSpec(
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        rope=rope_spec(reader, head_dim, theta=_GLOBAL_THETA, layer_type=FULL),
        scale=reader.number("query_pre_attn_scalar", 256.0) ** -0.5,
        qk_norm=True,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        sandwich=True,
        activation=reader.activation("hidden_activation", "gelu_pytorch_tanh"),
        intermediate_size=reader.integer("intermediate_size"),
    )
    sliding = replace(
        full,
        window=reader.optional_integer("sliding_window", 4096),
        rope=rope_spec(_local(reader), head_dim, theta=_LOCAL_THETA, layer_type=SLIDING, scaling=False),
    )
    types = reader.layer_types(lambda number: SLIDING if (number + 1) % pattern else FULL)
    layers = [sliding if kind == SLIDING else full for kind in types]
    length = reader.integer("max_position_embeddings")
    spec = model_spec("gemma3", reader, layers, names=_NAMES, tied_by_default=True, max_length=length)
    return replace(
        spec,
        norm_offset=1.0,
        embed_scale=spec.hidden_size**0.5,
        final_softcap=reader.optional_number("final_logit_softcapping"),
        renames=_RENAMES,
        ignored=_IGNORED,
    )


def _text_config(config: Mapping[str, Any]) -> Config:
    """The text decoder's settings, whether they stand alone or within a multimodal config."""
    if not isinstance(config.get("text_config"), dict):
        return Config({**_DEFAULTS, **config})
    outer = Config(config)
    kept = {key: config[key] for key in ("architectures", "eos_token_id", "bos_token_id") if key in config}
    text = {**_DEFAULTS, **outer.section("text_config").values, **kept}
    text["tie_word_embeddings"] = outer.flag("tie_word_embeddings", True)
    return Config(text, "config.json: text_config")


def _local(config: Config) -> Config:
    """The settings as the sliding layers see them: older configs name their base `rope_local_base_freq`."""
    return Config({**config.values, "rope_theta": config.number("rope_local_base_freq", _LOCAL_THETA)}, config.where)
