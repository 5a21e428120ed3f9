"""What each GGUF architecture is called in transformers: config keys, tensor names and tensor shapes.

GGUF names are those of gguf-py's constants.py; how llama.cpp changes values on the way in (permuted rows of q and
k, norms stored as w + 1, fused or split experts) is in its convert_hf_to_gguf.py and is named here by `edit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from longbatch.models.gguf.reader import GgufError, GgufFile

Config = dict[str, Any]


class Weight(NamedTuple):
    """One tensor of a GGUF file. shape: names of `Dimensions`. edit: what undoes llama.cpp's change
    ("" for nothing; see weights.py). optional: absent in some models of the architecture."""

    source: str
    target: str
    shape: tuple[str, ...]
    edit: str = ""
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """model_type, class_name: transformers'. weights: tensors of one layer. norm_edit: edit of the norms, the
    final one included. extra: config keys that only this architecture has. turn_ends: tokens that end an answer
    even where the file names only one end token."""

    model_type: str
    class_name: str
    weights: tuple[Weight, ...]
    extra: Callable[[GgufFile], Config]
    turn_ends: tuple[str, ...]
    norm_edit: str = ""


def dimensions(gguf: GgufFile) -> dict[str, int]:
    """Sizes that tensor shapes are made of, from the metadata. Raises `GgufError`."""
    name = gguf.architecture
    hidden, heads = gguf.size(f"{name}.embedding_length"), gguf.size(f"{name}.attention.head_count")
    kv_heads = gguf.size(f"{name}.attention.head_count_kv", heads)
    head = gguf.size(f"{name}.attention.key_length", _default_head_size(gguf, hidden, heads))
    if gguf.size(f"{name}.attention.value_length", head) != head:
        raise GgufError("its keys and values differ in size, which none of our decoders has")
    if head % 2:
        raise GgufError(f"its head size {head} is odd, which RoPE does not allow")
    mlp = gguf.size(f"{name}.feed_forward_length", 1)
    return {
        "layers": gguf.size(f"{name}.block_count"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head": head,
        "query": heads * head,
        "kv": kv_heads * head,
        "qkv": (heads + 2 * kv_heads) * head,
        "mlp": mlp,
        "gate_up": 2 * mlp,
        "experts": gguf.size(f"{name}.expert_count", 1),
        "expert_mlp": gguf.size(f"{name}.expert_feed_forward_length", mlp),
    }


def _default_head_size(gguf: GgufFile, hidden: int, heads: int) -> int:
    """Llama's rotated dimensions are its whole head; elsewhere the heads share out the hidden size."""
    if gguf.architecture == "llama" and "llama.rope.dimension_count" in gguf.metadata:
        return gguf.size("llama.rope.dimension_count")
    return hidden // heads


def architecture(gguf: GgufFile) -> Architecture:
    """The entry for this file. Raises `GgufError`, naming the known ones."""
    name = gguf.architecture
    if name not in ARCHITECTURES:
        raise GgufError(f"its architecture {name!r} is not one of {', '.join(sorted(ARCHITECTURES))}")
    if gguf.metadata.get("split.count", 1) not in (0, 1):
        raise GgufError("it is one part of a split model; join the parts with `llama-gguf-split --merge` first")
    if name == "llama" and "llama.expert_count" in gguf.metadata:
        raise GgufError("it is a Mixtral model, which has no decoder here")
    return ARCHITECTURES[name]


def config(gguf: GgufFile, sizes: dict[str, int], vocab_size: int, tied: bool) -> Config:
    """config.json in the form that transformers 5 writes. Raises `GgufError`."""
    found = architecture(gguf)
    name = gguf.architecture
    result: Config = {
        "architectures": [found.class_name],
        "model_type": found.model_type,
        "vocab_size": vocab_size,
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["mlp"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head"],
        "max_position_embeddings": gguf.size(f"{name}.context_length"),
        "rms_norm_eps": gguf.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(gguf),
        "tie_word_embeddings": tied,
        "use_cache": True,
    }
    for key, source in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if f"tokenizer.ggml.{source}_token_id" in gguf.metadata:
            result[key] = gguf.integer(f"tokenizer.ggml.{source}_token_id")
    return result | found.extra(gguf)


def _rope(gguf: GgufFile) -> Config:
    """rope_parameters of a model with one kind of layer."""
    name = gguf.architecture
    result: Config = {"rope_type": "default", "rope_theta": gguf.number(f"{name}.rope.freq_base", 10000.0)}
    kind = gguf.text(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return result
    if kind not in ("linear", "yarn"):
        raise GgufError(f"its RoPE scaling {kind!r} is not one of none, linear, yarn")
    result |= {"rope_type": kind, "factor": gguf.number(f"{name}.rope.scaling.factor")}
    if kind == "yarn":
        original = f"{name}.rope.scaling.original_context_length"
        result["original_max_position_embeddings"] = gguf.size(original)
    return result


def _llama(gguf: GgufFile) -> Config:
    """Llama, or Mistral: the same but for the sliding window."""
    result: Config = {"hidden_act": "silu", "attention_bias": "blk.0.attn_q.bias" in gguf.tensors, "mlp_bias": False}
    if "rope_freqs.weight" in gguf.tensors:
        result["rope_parameters"] = _llama3_rope(gguf)
    if "llama.attention.sliding_window" in gguf.metadata:
        window = gguf.size("llama.attention.sliding_window")
        result |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    return result


def _llama3_rope(gguf: GgufFile) -> Config:
    """Llama 3.1's scaling, which llama.cpp stores as one divisor per frequency: the largest is the factor, the
    other numbers are the same in all published models, and this checks that they give the stored divisors."""
    tensor = gguf.tensors["rope_freqs.weight"]
    stored = np.concatenate([chunk.ravel() for chunk in gguf.rows(tensor)])
    theta = gguf.number("llama.rope.freq_base", 10000.0)
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    wavelengths = 2 * math.pi * theta ** (np.arange(len(stored)) / len(stored))
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(stored, expected, rtol=1e-3):
        raise GgufError("its rope_freqs.weight is not the scaling of any known Llama model")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _qwen(gguf: GgufFile) -> Config:
    return {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


def _qwen2(gguf: GgufFile) -> Config:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _qwen3_moe(gguf: GgufFile) -> Config:
    return _qwen(gguf) | {
        "num_experts": gguf.size("qwen3moe.expert_count"),
        "num_experts_per_tok": gguf.size("qwen3moe.expert_used_count"),
        "moe_intermediate_size": gguf.size("qwen3moe.expert_feed_forward_length"),
        # Not in the file: true in every published model, and fixed in llama.cpp's src/models/qwen3moe.cpp.
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _phi3(gguf: GgufFile) -> Config:
    sizes = dimensions(gguf)
    window = gguf.metadata.get("phi3.attention.sliding_window")
    rope = _rope(gguf)
    rope["partial_rotary_factor"] = gguf.size("phi3.rope.dimension_count", sizes["head"]) / sizes["head"]
    original = gguf.size("phi3.rope.scaling.original_context_length", gguf.size("phi3.context_length"))
    if "rope_factors_long.weight" in gguf.tensors:
        rope |= {
            "rope_type": "longrope",
            "long_factor": _factors(gguf, "rope_factors_long.weight"),
            "short_factor": _factors(gguf, "rope_factors_short.weight"),
            "original_max_position_embeddings": original,
        }
    return {
        "hidden_act": "silu",
        "sliding_window": gguf.size("phi3.attention.sliding_window") if window else None,
        "original_max_position_embeddings": original,
        "rope_parameters": rope,
    }


def _factors(gguf: GgufFile, name: str) -> list[float]:
    if name not in gguf.tensors:
        raise GgufError(f"it lacks the tensor {name}")
    return [float(str(value)) for chunk in gguf.rows(gguf.tensors[name]) for value in chunk.ravel()]


def _gemma3(gguf: GgufFile) -> Config:
    """Every sixth layer is global; local layers keep their own base. Gemma's 27B is the one model whose queries are
    not scaled by the head size (llama.cpp, src/models/gemma3.cpp)."""
    sizes = dimensions(gguf)
    num_layers = sizes["layers"]
    scalar = sizes["hidden"] // sizes["heads"] if num_layers == 62 else sizes["head"]
    local = {"rope_type": "default", "rope_theta": gguf.number("gemma3.rope.freq_base_swa", 10000.0)}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": scalar,
        "sliding_window": gguf.size("gemma3.attention.sliding_window"),
        "layer_types": ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(num_layers)],
        "rope_parameters": {"full_attention": _rope(gguf), "sliding_attention": local},
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    }


def _gpt_oss(gguf: GgufFile) -> Config:
    num_layers = dimensions(gguf)["layers"]
    rope = _rope(gguf)
    if rope["rope_type"] == "yarn":
        rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return {
        "hidden_act": "silu",
        "attention_bias": True,
        "intermediate_size": gguf.size("gpt-oss.expert_feed_forward_length"),
        "num_local_experts": gguf.size("gpt-oss.expert_count"),
        "num_experts_per_tok": gguf.size("gpt-oss.expert_used_count"),
        "sliding_window": gguf.size("gpt-oss.attention.sliding_window"),
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)],
        "swiglu_limit": 7.0,
        "rope_parameters": rope,
    }


_NORMS = (
    Weight("attn_norm.weight", "input_layernorm.weight", ("hidden",), "norm"),
    Weight("ffn_norm.weight", "post_attention_layernorm.weight", ("hidden",), "norm"),
)
_VALUE_OUT = (
    Weight("attn_v.weight", "self_attn.v_proj.weight", ("kv", "hidden")),
    Weight("attn_output.weight", "self_attn.o_proj.weight", ("hidden", "query")),
)
_QUERY_KEY = (
    Weight("attn_q.weight", "self_attn.q_proj.weight", ("query", "hidden")),
    Weight("attn_k.weight", "self_attn.k_proj.weight", ("kv", "hidden")),
)
_QKV_BIAS = (
    Weight("attn_q.bias", "self_attn.q_proj.bias", ("query",)),
    Weight("attn_k.bias", "self_attn.k_proj.bias", ("kv",)),
    Weight("attn_v.bias", "self_attn.v_proj.bias", ("kv",)),
)
_QK_NORM = (
    Weight("attn_q_norm.weight", "self_attn.q_norm.weight", ("head",), "norm"),
    Weight("attn_k_norm.weight", "self_attn.k_norm.weight", ("head",), "norm"),
)
_DOWN = (Weight("ffn_down.weight", "mlp.down_proj.weight", ("hidden", "mlp")),)
_MLP = (
    Weight("ffn_gate.weight", "mlp.gate_proj.weight", ("mlp", "hidden")),
    Weight("ffn_up.weight", "mlp.up_proj.weight", ("mlp", "hidden")),
    *_DOWN,
)
_LLAMA = (
    *_NORMS,
    Weight("attn_q.weight", "self_attn.q_proj.weight", ("query", "hidden"), "unpermute"),
    Weight("attn_k.weight", "self_attn.k_proj.weight", ("kv", "hidden"), "unpermute"),
    *_VALUE_OUT,
    Weight("attn_q.bias", "self_attn.q_proj.bias", ("query",), "unpermute", optional=True),
    Weight("attn_k.bias", "self_attn.k_proj.bias", ("kv",), "unpermute", optional=True),
    Weight("attn_v.bias", "self_attn.v_proj.bias", ("kv",), optional=True),
    Weight("attn_output.bias", "self_attn.o_proj.bias", ("hidden",), optional=True),
    *_MLP,
)
_GEMMA3 = (
    Weight("attn_norm.weight", "input_layernorm.weight", ("hidden",), "norm"),
    Weight("post_attention_norm.weight", "post_attention_layernorm.weight", ("hidden",), "norm"),
    Weight("ffn_norm.weight", "pre_feedforward_layernorm.weight", ("hidden",), "norm"),
    Weight("post_ffw_norm.weight", "post_feedforward_layernorm.weight", ("hidden",), "norm"),
    *_QUERY_KEY,
    *_VALUE_OUT,
    *_QK_NORM,
    *_MLP,
)
_PHI3 = (
    *_NORMS,
    Weight("attn_qkv.weight", "self_attn.qkv_proj.weight", ("qkv", "hidden")),
    _VALUE_OUT[1],
    Weight("ffn_up.weight", "mlp.gate_up_proj.weight", ("gate_up", "hidden")),
    *_DOWN,
)
_QWEN3_EXPERTS = (
    Weight("ffn_gate_inp.weight", "mlp.gate.weight", ("experts", "hidden")),
    Weight("ffn_gate_exps.weight", "mlp.experts.{}.gate_proj.weight", ("experts", "expert_mlp", "hidden"), "split"),
    Weight("ffn_up_exps.weight", "mlp.experts.{}.up_proj.weight", ("experts", "expert_mlp", "hidden"), "split"),
    Weight("ffn_down_exps.weight", "mlp.experts.{}.down_proj.weight", ("experts", "hidden", "expert_mlp"), "split"),
)
_GPT_OSS = (
    Weight("attn_norm.weight", "input_layernorm.weight", ("hidden",), "norm"),
    Weight("post_attention_norm.weight", "post_attention_layernorm.weight", ("hidden",), "norm"),
    *_QUERY_KEY,
    *_VALUE_OUT,
    *_QKV_BIAS,
    Weight("attn_output.bias", "self_attn.o_proj.bias", ("hidden",)),
    Weight("attn_sinks.weight", "self_attn.sinks", ("heads",)),
    Weight("ffn_gate_inp.weight", "mlp.router.weight", ("experts", "hidden")),
    Weight("ffn_gate_inp.bias", "mlp.router.bias", ("experts",)),
    Weight("ffn_gate_exps.weight", "mlp.experts.gate_up_proj", ("experts", "expert_mlp", "hidden"), "gate_up"),
    Weight("ffn_up_exps.weight", "", ("experts", "expert_mlp", "hidden"), "with_gate"),
    Weight("ffn_down_exps.weight", "mlp.experts.down_proj", ("experts", "hidden", "expert_mlp"), "transpose"),
    Weight("ffn_gate_exps.bias", "mlp.experts.gate_up_proj_bias", ("experts", "expert_mlp"), "gate_up_bias"),
    Weight("ffn_up_exps.bias", "", ("experts", "expert_mlp"), "with_gate"),
    Weight("ffn_down_exps.bias", "mlp.experts.down_proj_bias", ("experts", "hidden")),
)

_CHATML = ("<|im_end|>", "<|endoftext|>")
_QWEN2 = (*_NORMS, *_QUERY_KEY, *_VALUE_OUT, *_QKV_BIAS, *_MLP)
_QWEN3 = (*_NORMS, *_QUERY_KEY, *_VALUE_OUT, *_QK_NORM, *_MLP)
_QWEN3_MOE = (*_NORMS, *_QUERY_KEY, *_VALUE_OUT, *_QK_NORM, *_QWEN3_EXPERTS)
_GPT_OSS_ENDS = ("<|return|>", "<|call|>", "<|endoftext|>")

# The key is the value of general.architecture.
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _LLAMA, _llama, ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _QWEN2, _qwen2, _CHATML),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _QWEN3, _qwen, _CHATML),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _QWEN3_MOE, _qwen3_moe, _CHATML),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _PHI3, _phi3, ("<|end|>", "<|endoftext|>")),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _GEMMA3, _gemma3, ("<end_of_turn>",), "minus_one"),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", _GPT_OSS, _gpt_oss, _GPT_OSS_ENDS),
}
