"""The fused kernels inside the blocks: every family on a GPU against the same weights on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_driver import forward

from longbatch import models
from longbatch.models.decoder import Decoder
from longbatch.models.parameters import parameters

pytestmark = pytest.mark.gpu

BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "phi3-partial": {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 64},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "moe_intermediate_size": 128},
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], "num_local_experts": 16, "sliding_window": 64},
}


def pair(family: str, dtype: torch.dtype) -> tuple[Decoder, Decoder]:
    """A decoder in float32 on the CPU, and the same in dtype on the GPU."""
    spec = models.describe({**BASE, **FAMILIES[family]})
    generator = torch.Generator().manual_seed(0)
    own, moved = {}, {}
    for parameter in parameters(spec):
        tensor = torch.empty(parameter.shape).normal_(
            1.0 if parameter.role == "norm" else 0.0, 0.06, generator=generator
        )
        own[parameter.name] = tensor
        wide = parameter.role == "norm" and spec.norm_offset
        moved[parameter.name] = tensor.to("cuda", torch.float32 if wide else dtype)
    return Decoder(spec, own), Decoder(spec, moved)


def ids(num_tokens: int) -> torch.Tensor:
    return torch.randint(0, 512, (num_tokens,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_tokens", [1, 63, 300])
def test_float32_equals_the_cpu(family: str, num_tokens: int) -> None:
    own, moved = pair(family, torch.float32)
    wanted = forward(own, ids(num_tokens))
    assert (forward(moved, ids(num_tokens).cuda()).cpu() - wanted).abs().max() <= 1e-4
    assert (forward(moved, ids(num_tokens).cuda(), tile=128).cpu() - wanted).abs().max() <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(family: str, dtype: torch.dtype) -> None:
    own, moved = pair(family, dtype)
    wanted = forward(own, ids(300))
    error = (forward(moved, ids(300).cuda()).cpu() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    # Routing to another expert may change single rows a lot; the typical row must not move.
    assert error.median() < (0.03 if dtype == torch.bfloat16 else 0.004)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step_can_be_captured(family: str) -> None:
    """No hidden synchronization with the host: the blocks go into a CUDA graph and replay to the same numbers."""
    _, decoder = pair(family, torch.bfloat16)
    tokens = ids(32).cuda()
    positions = torch.arange(32, device="cuda")

    def step() -> torch.Tensor:
        x = decoder.embed(tokens)
        for layer in decoder.layers:
            rope = (
                None if layer.rope_index is None else decoder.ropes[layer.rope_index].cos_sin(positions, positions + 1)
            )
            q, _, _ = layer.qkv(layer.norm(x), rope)
            x = layer.mlp(layer.out(x, q))
        return decoder.logits(decoder.final_norm(x))

    with torch.inference_mode():
        wanted = step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(found, wanted)
