"""Small GGUF files made from transformers models the way llama.cpp's convert_hf_to_gguf.py does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

# transformers' model_type -> general.architecture
NAMES = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "mistral": "llama"}


def write(path: Path, model: Any, change: Callable[[gguf.GGUFWriter, dict[str, Array]], None] | None = None) -> None:
    """Writes a model with a toy tokenizer. change: may alter metadata and tensors before they are written."""
    architecture = NAMES.get(model.config.model_type, model.config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    _write_sizes(writer, architecture, model.config)
    _write_tokenizer(writer, model.config.vocab_size)
    tensors = tensors_of(architecture, model)
    if change is not None:
        change(writer, tensors)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors_of(architecture: str, model: Any) -> dict[str, Array]:
    """The model's tensors under gguf-py's names and with llama.cpp's changes."""
    config = model.config
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    result: dict[str, Array] = {}
    for name, parameter in model.state_dict().items():
        values = parameter.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".experts." in name:
            result |= _experts(architecture, name, values)
            continue
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        if name.endswith(".sinks"):
            name += ".weight"
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known is not None, name
        result[known] = values
    return result


def _experts(architecture: str, name: str, values: Array) -> dict[str, Array]:
    """Fused experts as transformers holds them, split into llama.cpp's gate, up and down."""
    layer, leaf = name.removeprefix("model.layers.").split(".mlp.experts.")
    kind = "bias" if leaf.endswith("_bias") else "weight"
    if architecture == "gpt-oss" and kind == "weight":
        values = values.swapaxes(1, 2)
    if leaf.startswith("down_proj"):
        return {f"blk.{layer}.ffn_down_exps.{kind}": values}
    half = values.shape[1] // 2
    gate, up = (values[:, ::2], values[:, 1::2]) if architecture == "gpt-oss" else (values[:, :half], values[:, half:])
    return {f"blk.{layer}.ffn_gate_exps.{kind}": gate, f"blk.{layer}.ffn_up_exps.{kind}": up}


def _write_sizes(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if architecture in ("qwen3moe", "gpt-oss"):
        writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    _write_rope(writer, architecture, config, head)


def _write_rope(writer: gguf.GGUFWriter, architecture: str, config: Any, head: int) -> None:
    rope = config.rope_parameters
    if architecture == "gemma3":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1.0)))
    original = rope.get("original_max_position_embeddings")
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if original:
        writer.add_rope_scaling_orig_ctx_len(original)


def _write_tokenizer(writer: gguf.GGUFWriter, num_tokens: int) -> None:
    tokens = ["<pad>", "<s>", "</s>", "a", "b", "ab"]
    tokens += [f"t{index}" for index in range(len(tokens), num_tokens)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (num_tokens - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
