"""Strided: the last `local` key blocks up to the query's own, and each block a multiple of `stride` blocks before it.

Source: Child et al., Sparse Transformers, 2019 (arXiv 1904.10509), section 4.3, both heads of the strided kind in one
and on blocks instead of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longbatch.attention.patterns.base import on_device
from longbatch.attention.selection import Blocks
from longbatch.sparsity import PatternSpec


class Strided:
    """See `TilePattern`; positions alone decide."""

    UNIFORM = ("block",)

    def summarize(self, k: Tensor, specs: Sequence[PatternSpec]) -> Tensor | None:
        return None

    def select(
        self,
        q: Tensor,
        k: Tensor,
        specs: Sequence[PatternSpec],
        *,
        shared: bool,
        scale: float,
        q_offset: int,
        selections: Sequence[int] | None = None,
        summary: Tensor | None = None,
    ) -> Blocks:
        block = specs[0].count("block")
        first, last = q_offset // block, (q_offset + q.shape[0] - 1) // block
        own = torch.arange(first, last + 1, device=q.device)[:, None]
        sizes = [(spec.count("stride"), spec.count("local")) for spec in specs]
        stride, local = on_device(sizes, q.device).view(-1, 2, 1, 1).unbind(1)
        # Each list: the multiples of the stride from the farthest on, as long as they lie before the local blocks.
        num_far = (own // stride - (local - 1) // stride).clamp(min=0)  # [S, B, 1]
        counts = num_far + local.minimum(own + 1)
        most = max(max(0, last // far - (near - 1) // far) + min(near, last + 1) for far, near in sizes)
        place = torch.arange(most, device=q.device)
        near_blocks = (own - local + 1).clamp(min=0) + place - num_far
        indices = torch.where(place < num_far, own % stride + place * stride, near_blocks)
        indices = indices.masked_fill_(place >= counts, -1).int()
        return Blocks(indices, counts[..., 0].int(), block_rows=block, block_keys=block, first_row=first * block)
