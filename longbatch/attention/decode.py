"""Attention of one new token per sequence over its pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longbatch.attention.state import explicit, with_sinks
from longbatch.cache import KVCache

# Keys are summed up in ranges of so many positions, one program each.
SPLIT_TOKENS = 1024


class DeviceRows(NamedTuple):
    """A decode forward as the kernel reads it. tables: int32 [B, most pages]. lengths, open_blocks: int32 [B]; the
    latter are not looked at where the K/V format has none."""

    tables: Tensor
    lengths: Tensor
    open_blocks: Tensor


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One decode forward of B sequences, the new token of each already written to its page.

    longest: upper bound of the lengths. tables: block table of each sequence, on the host. lengths: tokens in the
    cache, the new one included. open_blocks: each sequence's open block, None where the K/V format has none. device:
    the same where a kernel runs, and of more rows where some only fill up the batch; else None.
    """

    longest: int
    tables: tuple[np.ndarray, ...]
    lengths: tuple[int, ...]
    open_blocks: tuple[int, ...] | None = None
    device: DeviceRows | None = None


def decode_attention(
    q: Tensor,
    cache: KVCache,
    layer: int,
    step: DecodeStep,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [B, H, D] -> [B, H, D]; the other arguments are as in `attend`."""
    if step.device is not None and softcap is None:
        from longbatch_kernels.paged_decode import OpenBlocks, paged_decode

        opened = None
        if cache.kv.has_open:
            opened = OpenBlocks(cache.open_keys[layer], cache.open_values[layer], step.device.open_blocks)
        return paged_decode(
            q,
            cache.keys[layer],
            cache.values[layer],
            step.device.tables,
            step.device.lengths,
            step.longest,
            scale=scale,
            window=window,
            sinks=sinks,
            kv=cache.format,
            open_blocks=opened,
            split=SPLIT_TOKENS,
        )
    out = torch.empty_like(q)
    for b, (table, length) in enumerate(zip(step.tables, step.lengths, strict=True)):
        start = max(0, length - window) if window else 0
        k, v = cache.read(layer, table, start, length, None if step.open_blocks is None else step.open_blocks[b])
        if softcap is not None:
            out[b] = with_sinks(explicit(q[b : b + 1], k, v, None, scale=scale, softcap=softcap), sinks)[0]
        else:
            _attend_one(q[b], k, v, scale, sinks, out[b])
    return out


def _attend_one(q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None, out: Tensor) -> None:
    """One query [H, D] over k, v [L, Hkv, D] into out [H, D]: two products over views, the keys never repeated."""
    heads, dim = q.shape
    num_kv = k.shape[1]
    grouped = q.view(num_kv, heads // num_kv, dim)
    scores = torch.matmul(grouped, k.permute(1, 2, 0)).mul_(scale)  # [Hkv, G, L]
    if sinks is not None:
        column = sinks.to(scores.dtype).view(num_kv, -1, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    torch.matmul(weights, v.transpose(0, 1), out=out.view(num_kv, heads // num_kv, dim))
