"""A model folder of Llama shapes with random weights, and prompts for it: what the GPU benchmarks run on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARD_BYTES = 4 << 30
WEIGHT_STD = 0.02


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Dimensions of a Llama model, by default those of Llama-3.1-8B."""

    hidden: int = 4096
    intermediate: int = 14336
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128_256
    max_length: int = 131_072

    def config(self) -> dict[str, Any]:
        """config.json as the published model has it, but without an end token, so that every answer is full."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_length,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "torch_dtype": "bfloat16",
        }

    def products(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of a layer's matrix products, those of equal input as one: QKV, output, gate and up,
        down."""
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return [
            (self.hidden, heads),
            (self.num_heads * self.head_dim, self.hidden),
            (self.hidden, 2 * self.intermediate),
            (self.intermediate, self.hidden),
        ]

    @property
    def num_read_in_decode(self) -> int:
        """Weights that a decode step reads: all but the embedding and the norms."""
        return self.num_layers * sum(a * b for a, b in self.products()) + self.hidden * self.vocab

    @property
    def num_kv_per_token(self) -> int:
        """Numbers of K and V that a token leaves."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every weight's name and shape, as in the published files."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (self.hidden,)
            for name, num_outputs in (("q", q), ("k", kv), ("v", kv)):
                yield f"{prefix}.self_attn.{name}_proj.weight", (num_outputs, self.hidden)
            yield f"{prefix}.self_attn.o_proj.weight", (self.hidden, q)
            yield f"{prefix}.post_attention_layernorm.weight", (self.hidden,)
            yield f"{prefix}.mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}.mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}.mlp.down_proj.weight", (self.hidden, self.intermediate)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocab, self.hidden)


def write_model(folder: Path, shape: LlamaShape, device_name: str, seed: int, shard_bytes: int = SHARD_BYTES) -> None:
    """Write config, tokenizer (one word per id: `w0 w1 ...`) and bf16 weights, normal with deviation 0.02, norms 1.
    They are made on the device, shard by shard."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator(device_name).manual_seed(seed)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
    (folder / "tokenizer.json").write_text(json.dumps(word_tokenizer(shape.vocab)))
    shards = _shards(shape, shard_bytes)
    places = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for name, size in names.items():
            weight = torch.ones(size, dtype=torch.bfloat16, device=device_name)
            if len(size) > 1:
                weight.normal_(0.0, WEIGHT_STD, generator=generator)
            tensors[name] = weight.cpu()
            places[name] = file
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def make_prompts(shape: LlamaShape, num_rows: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Random token ids."""
    chance = random.Random(seed)
    return [chance.choices(range(shape.vocab), k=num_tokens) for _ in range(num_rows)]


def words(ids: list[int]) -> str:
    """Token ids as the text that the model's tokenizer turns into them."""
    return " ".join(f"w{token}" for token in ids)


def ids_of(text: str) -> list[int]:
    """The inverse of `words`."""
    return [int(word[1:]) for word in text.split()]


def _shards(shape: LlamaShape, shard_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    """Tensors in order, as many per file as fit."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, size in shape.tensors():
        num_bytes = 2 * size[0] * (size[1] if len(size) > 1 else 1)
        if filled and filled + num_bytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = size
        filled += num_bytes
    return shards


def word_tokenizer(vocab: int) -> dict[str, Any]:
    """tokenizer.json with one word per id: `w0 w1 ...`."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(vocab)}, "unk_token": "w0"},
    }
