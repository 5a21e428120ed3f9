"""Rotary frequencies of every kind against transformers, and their independence of neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import GPT_OSS_YARN, LLAMA3, SIZES, YARN, longrope
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_partial_rotary_pos_emb

from longbatch.models import RopeSpec, describe
from longbatch.models.rope import Rope, RopeValues, rotate

CPU = torch.device("cpu")
HEAD_DIM = 64
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "yarn": YARN,
    "yarn-untruncated": GPT_OSS_YARN,
    "yarn-mscale": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.3, "beta_fast": 20, "beta_slow": 2},
    "llama3": LLAMA3,
    "longrope": {**longrope(HEAD_DIM // 2), "factor": 4.0, "original_max_position_embeddings": 256},
    "longrope-attention-factor": {
        **longrope(HEAD_DIM // 2),
        "attention_factor": 1.2,
        "original_max_position_embeddings": 256,
    },
}


def reference(parameters: dict[str, Any], positions: torch.Tensor, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    config = LlamaConfig(**{**SIZES, "head_dim": HEAD_DIM, "rope_parameters": {**parameters, "rope_theta": theta}})
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    return cos[0], sin[0]


def rope_of(parameters: dict[str, Any], theta: float) -> RopeSpec:
    config = {**SIZES, "architectures": ["LlamaForCausalLM"], "head_dim": HEAD_DIM}
    rope = describe({**config, "rope_parameters": {**parameters, "rope_theta": theta}}).layers[0].rope
    assert rope is not None
    return rope


@pytest.mark.parametrize("length", [1, 63, 256, 257, 1024, 1025, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_values_equal_transformers(kind: str, length: int) -> None:
    for theta in (10_000.0, 500_000.0):
        positions = torch.arange(length)
        cos, sin = reference(KINDS[kind], positions, theta)
        rope = Rope.build(rope_of(KINDS[kind], theta), CPU)
        values = rope.cos_sin(positions, torch.full_like(positions, length))
        assert values.cos.shape == (length, HEAD_DIM // 2)
        assert values.cos.dtype == torch.float32
        # Angles reach thousands, where float32 steps by 5e-4: a rounding of one frequency shows there.
        assert (values.cos - cos[:, : HEAD_DIM // 2]).abs().max() < 1e-3
        assert (values.sin - sin[:, : HEAD_DIM // 2]).abs().max() < 1e-3
        near = min(length, 64)
        assert (values.cos[:near] - cos[:near, : HEAD_DIM // 2]).abs().max() < 1e-5
        assert (values.sin[:near] - sin[:near, : HEAD_DIM // 2]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_go_by_the_own_length(kind: str) -> None:
    """A short row packed with a long one rotates exactly as it does alone."""
    rope = Rope.build(rope_of(KINDS[kind], 10_000.0), CPU)
    assert rope.needs_lengths
    short, long = torch.arange(100), torch.arange(3000)
    alone = [rope.cos_sin(own, torch.full_like(own, len(own))) for own in (short, long)]
    lengths = torch.cat([torch.full_like(own, len(own)) for own in (short, long)])
    packed = rope.cos_sin(torch.cat([short, long]), lengths)
    assert torch.equal(packed.cos, torch.cat([values.cos for values in alone]))
    assert torch.equal(packed.sin, torch.cat([values.sin for values in alone]))
    assert not torch.allclose(alone[0].cos, alone[1].cos[:100])


def test_missing_lengths_are_an_error_only_where_they_matter() -> None:
    positions = torch.arange(4)
    for kind in ("dynamic", "longrope"):
        with pytest.raises(ValueError, match="needs the sequence length of each token"):
            Rope.build(rope_of(KINDS[kind], 10_000.0), CPU).cos_sin(positions)
    rope = Rope.build(rope_of(KINDS["yarn"], 10_000.0), CPU)
    assert not rope.needs_lengths
    assert torch.equal(rope.cos_sin(positions).cos, rope.cos_sin(positions, positions).cos)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(dtype: torch.dtype) -> None:
    """Any strides in, contiguous out; bfloat16 is rotated in float32 and so errs less than transformers' own."""
    positions = torch.tensor([0, 5, 5, 900])
    fused = torch.randn(4, 7, HEAD_DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = fused[:, 1:4]
    rope = Rope.build(rope_of(KINDS["yarn"], 10_000.0), CPU)
    cos, sin = reference(KINDS["yarn"], positions, 10_000.0)
    wanted, _ = apply_rotary_pos_emb(x.float(), x.float(), cos, sin)
    rotated = rotate(x, rope.cos_sin(positions))
    assert rotated.is_contiguous()
    assert rotated.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    assert (rotated.float() - wanted).abs().max() < tolerance
    assert torch.equal(fused[:, 1:4], x)


def test_partial_rotation_passes_the_rest() -> None:
    config = Phi3Config(**{**SIZES, "hidden_size": 256, "partial_rotary_factor": 0.75})
    positions = torch.arange(10)
    cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    x = torch.randn(10, 4, 64, generator=torch.Generator().manual_seed(0))
    wanted, _ = apply_partial_rotary_pos_emb(x, x, cos[0], sin[0])
    half = cos.shape[-1] // 2
    rotated = rotate(x, RopeValues(cos[0, :, :half], sin[0, :, :half]))
    assert half == 24
    assert (rotated - wanted).abs().max() < 1e-6
    assert torch.equal(rotated[..., 48:], x[..., 48:])
