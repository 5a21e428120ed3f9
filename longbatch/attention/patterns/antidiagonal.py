"""Antidiagonal: key blocks by the softmax of antidiagonal sums over patches of stride x stride.

Block 0 and the query block's own always, then the blocks with the largest sums until the kept ones hold the share
`threshold` of the row's sum. Shared selections add up the sums of the group's heads.
Source: Xu et al., XAttention, 2025 (arXiv 2503.16428).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longbatch.attention.patterns.base import keys_of, on_device, picked, queries_of, served
from longbatch.attention.selection import Blocks, block_lists
from longbatch.sparsity import PatternSpec


class Antidiagonal:
    """See `TilePattern`."""

    UNIFORM = ("stride", "block")

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
        from longbatch_kernels.block_scores import antidiagonal_scores, antidiagonal_scores_ref

        block = specs[0].count("block")
        num_kv = k.shape[1]
        kv_heads, places = served(q.shape[1], num_kv, selections, shared)
        estimate = antidiagonal_scores if k.is_cuda else antidiagonal_scores_ref
        sums = estimate(
            queries_of(q, kv_heads, num_kv),
            keys_of(k, kv_heads),
            stride=specs[0].count("stride"),
            block=block,
            scale=scale,
            q_offset=q_offset,
        )  # [H, B, KB]
        if shared:
            sums = sums.view(len(kv_heads), -1, *sums.shape[1:]).sum(1)
        sums = picked(sums, places)
        first = q_offset // block
        own = torch.arange(first, first + sums.shape[1], device=q.device)[:, None]
        blocks = torch.arange(sums.shape[2], device=q.device)
        forced = (blocks == 0) | (blocks == own)
        ranking = sums.masked_fill(forced, float("inf")).masked_fill_(blocks > own, -1.0)
        index = ranking.argsort(dim=-1, descending=True)
        ordered = sums.gather(-1, index).double()
        before = ordered.cumsum(-1) - ordered
        wanted = ordered.sum(-1, keepdim=True) * on_device(
            [spec["threshold"] for spec in specs], q.device, torch.float64
        ).view(-1, 1, 1)
        keep = (before < wanted) | (index == 0) | (index == own)
        keep &= index <= own
        return Blocks(*block_lists(index, keep), block_rows=block, block_keys=block, first_row=first * block)
