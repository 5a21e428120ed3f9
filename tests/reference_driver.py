"""The plainest way to run a decoder: one sequence, full softmax attention. What the engine must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from longbatch.models.decoder import Decoder, Layer
from longbatch.models.rope import RopeValues


@torch.inference_mode()
def forward(decoder: Decoder, ids: Tensor, tile: int | None = None) -> Tensor:
    """Logits [T, vocab] of one sequence. tile: drive q, kv and mlp in tiles of so many tokens, else all at once."""
    num_tokens = len(ids)
    positions = torch.arange(num_tokens, device=decoder.device)
    lengths = torch.full_like(positions, num_tokens)
    ropes = [rope.cos_sin(positions, lengths) for rope in decoder.ropes]
    x = decoder.embed(ids)
    for layer in decoder.layers:
        rope = None if layer.rope_index is None else ropes[layer.rope_index]
        if tile is None:
            q, k, v = layer.qkv(layer.norm(x), rope)
            x = layer.mlp(layer.out(x, attention(layer, q, k, v)))
        else:
            x = _tiled(layer, x, rope, tile)
    return decoder.logits(decoder.final_norm(x))


def _tiled(layer: Layer, x: Tensor, rope: RopeValues | None, tile: int) -> Tensor:
    parts = [slice(start, start + tile) for start in range(0, len(x), tile)]
    ropes = [None if rope is None else RopeValues(rope.cos[part], rope.sin[part]) for part in parts]
    keys, values = zip(
        *(layer.kv(layer.norm(x[part]), own) for part, own in zip(parts, ropes, strict=True)), strict=True
    )
    k, v = torch.cat(keys), torch.cat(values)
    for part, own in zip(parts, ropes, strict=True):
        q = layer.q(layer.norm(x[part]), own)
        layer.mlp(layer.out(x[part], attention(layer, q, k, v, start=part.start)))
    return x


def attention(layer: Layer, q: Tensor, k: Tensor, v: Tensor, start: int = 0) -> Tensor:
    """Softmax attention of queries at positions start.. over all keys: [n, H, D]."""
    spec = layer.spec
    group = spec.num_heads // spec.num_kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    distance = torch.arange(start, start + len(q), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
    hidden = (distance < 0) | (distance >= (spec.window or len(k)))
    scores = scores.masked_fill(hidden, -torch.inf)
    if layer.sinks is not None:
        sinks = layer.sinks[:, None, None].expand(-1, len(q), 1)
        return torch.einsum("hqk,khd->qhd", torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1], v)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
