"""Dense attention of one piece of queries: every key up to the query, or the window that the layer declares."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from longbatch.attention.state import State, explicit, masked, merge, partial, with_sinks
from longbatch.attention.step import Extent, Piece

# Gives K and V [n, kv_heads, head_dim] of positions start..stop-1 of an extent, for the layer at hand.
ReadKeys = Callable[[Extent, int, int], tuple[Tensor, Tensor]]


def attend(
    q: Tensor,
    piece: Piece,
    read: ReadKeys,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    block: int | None = None,
) -> Tensor:
    """Causal attention of queries [n, H, D] at positions piece.start..piece.stop-1: [n, H, D].

    window: keys each query sees, itself included. sinks: logits [H] that join each softmax's denominator. block: keys
    are summed up in blocks of so many positions, whatever extents they lie in; None: extent by extent.
    """
    if softcap is None and (window is None or piece.stop <= window):
        return with_sinks(_causal(q, piece, read, scale, block), sinks)
    rows = piece.stop - piece.start if window is None else min(max(256, window), 1024)
    outs = []
    for start in range(piece.start, piece.stop, rows):
        stop = min(start + rows, piece.stop)
        low = 0 if window is None else max(0, start - window + 1)
        k, v = _joined(piece, read, low, stop)
        bias = _band(stop - start, stop - low, window or stop, q.dtype if softcap is None else torch.float32, q.device)
        part = q[start - piece.start : stop - piece.start]
        if softcap is None:
            state = masked(part, k, v, bias, scale=scale)
        else:
            state = explicit(part, k, v, bias, scale=scale, softcap=softcap)
        outs.append(with_sinks(state, sinks))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _causal(q: Tensor, piece: Piece, read: ReadKeys, scale: float, block: int | None) -> State:
    """Whole earlier keys without a mask, then the triangle of the piece's own keys."""
    states = []
    for extent in piece.segment.extents:
        low, stop = extent.start, min(extent.stop, piece.start)
        while low < stop:
            high = stop if block is None else min(stop, (low // block + 1) * block)
            k, v = read(extent, low, high)
            states.append(partial(q, k, v, scale=scale))
            low = high
    own = piece.segment.extents[-1]
    k, v = read(own, piece.start, piece.stop)
    states.append(partial(q, k, v, scale=scale, causal=True))
    return merge(states)


def _joined(piece: Piece, read: ReadKeys, low: int, high: int) -> tuple[Tensor, Tensor]:
    """K and V of positions low..high-1, from as many extents as they span."""
    found = [
        read(extent, max(low, extent.start), min(high, extent.stop))
        for extent in piece.segment.extents
        if max(low, extent.start) < min(high, extent.stop)
    ]
    if len(found) == 1:
        return found[0]
    return torch.cat([k for k, _ in found]), torch.cat([v for _, v in found])


@lru_cache(maxsize=8)
def _band(rows: int, keys: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive bias [rows, keys], the last row at the last key: 0 where 0 <= distance < window, else -inf."""
    distance = torch.arange(keys - rows, keys, device=device)[:, None] - torch.arange(keys, device=device)[None]
    bias = torch.zeros((rows, keys), dtype=dtype, device=device)
    return bias.masked_fill_((distance < 0) | (distance >= window), float("-inf"))
