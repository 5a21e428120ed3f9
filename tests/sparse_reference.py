"""Sparse prefill written out plainly: whole prompts, chunk by chunk, every selection as a mask over explicit scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longbatch.attention.patterns import select_ranges, select_tile
from longbatch.models.decoder import Decoder
from longbatch.sparsity import LayerPatterns


def mask_of(
    q: Tensor, k: Tensor, patterns: LayerPatterns, scale: float, rows: tuple[int, int], tile: int, read: int
) -> Tensor:
    """bool [heads, rows, keys] of one layer: q [n, H, D] of the rows, k [N, Hkv, D] of all up to the last one.
    read: the position before which rows are attended; the others take no part in choosing blocks."""
    start, stop = rows
    heads_each = q.shape[1] // len(patterns.heads)
    masks = torch.zeros(q.shape[1], stop - start, k.shape[0], dtype=torch.bool)
    for place, spec in enumerate(patterns.heads):
        heads = slice(place * heads_each, (place + 1) * heads_each)
        common = {"shared": patterns.shared, "scale": scale, "selections": [place]}
        if spec.kind == "ranges":
            last = min(64, q.shape[0])
            found = select_ranges(q[-last:], k, [spec], q_offset=stop - last, rows=rows, **common)
            for part in found:
                low, high = part.rows
                masks[heads, low - start : high - start] = part.mask(0, low, high, k.shape[0])
            continue
        for low in range(start // tile * tile, stop, tile):
            low, high = max(low, start), min(low + tile, stop, read)
            tile_q = q[low - start : high - start]
            (part,) = select_tile(tile_q, k, [spec], q_offset=low, **common)
            masks[heads, low - start : high - start] = part.selected.mask(0, low, high, k.shape[0])
    return masks


@torch.inference_mode()
def logprobs_and_density(
    model: Decoder, ids: Sequence[int], patterns: Sequence[LayerPatterns | None], chunk: int, tile: int
) -> tuple[Tensor, float]:
    """Log-probability of every token but the first, and the share of causal pairs that was computed, over the layers
    without a window; every query of every layer is computed, but the last one of the last layer chooses nothing.
    patterns: None for a dense layer."""
    tokens = torch.as_tensor(ids, dtype=torch.int64)
    positions = torch.arange(len(tokens))
    ropes = [rope.cos_sin(positions, torch.full_like(positions, len(tokens))) for rope in model.ropes]
    x = model.embed(tokens)
    selected = causal = 0
    for layer, own in zip(model.layers, patterns, strict=True):
        spec = layer.spec
        q, k, v = layer.qkv(layer.norm(x), None if layer.rope_index is None else ropes[layer.rope_index])
        seen = positions[None] <= positions[:, None]
        if spec.window is not None:
            seen &= positions[:, None] - positions[None] < spec.window
        seen = seen.expand(spec.num_heads, -1, -1).clone()
        if spec.window is None:
            causal += int(seen.sum())
            for low in range(0, len(tokens), chunk) if own is not None else ():
                high = min(low + chunk, len(tokens))
                seen[:, low:high] = False
                read = high if layer is not model.layers[-1] else len(tokens) - 1
                seen[:, low:high, :high] = mask_of(q[low:high], k[:high], own, spec.scale, (low, high), tile, read)
            selected += int(seen.sum())
        groups = spec.num_heads // spec.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(groups, 1)) * spec.scale
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        if layer.sinks is not None:
            scores = torch.cat([scores, layer.sinks[:, None, None].expand(-1, len(tokens), 1)], -1)
        weights = scores.softmax(-1)[..., : len(tokens)]
        attention = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(groups, 1))
        x = layer.mlp(layer.out(x, attention.contiguous()))
    values = torch.log_softmax(model.logits(model.final_norm(x[:-1])), -1)
    return values.gather(1, tokens[1:, None])[:, 0], selected / causal
