"""Block-sparse: key blocks by the product of block means of queries and keys.

Of the blocks up to the query block's own, the own block always, then the highest scores: `top_k` blocks in all, or,
when `mass` is set, as many of them as hold that share of the softmax over blocks. Shared selections add up the softmax
of the group's heads.
Source: Jiang et al., MInference 1.0, 2024 (arXiv 2407.02490), algorithm 3; the own block is forced here, for a row
whose own block is not listed could see no key. The share is that of FlexPrefill (arXiv 2502.20766), per row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from longbatch.attention.patterns.base import keys_of, on_device, picked, queries_of, served
from longbatch.attention.selection import Blocks, block_lists
from longbatch.sparsity import PatternSpec


class BlockSparse:
    """See `TilePattern`. The keys' summary is their block means [KB, Hkv, D]."""

    UNIFORM = ("block",)

    def summarize(self, k: Tensor, specs: Sequence[PatternSpec]) -> Tensor | None:
        return _means(k, specs[0].count("block"), 0)

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
        from longbatch_kernels.block_scores import pooled_scores, pooled_scores_ref

        block = specs[0].count("block")
        num_kv = k.shape[1]
        kv_heads, places = served(q.shape[1], num_kv, selections, shared)
        key_means = _means(k, block, 0) if summary is None else summary
        first = q_offset // block
        q_means = _means(queries_of(q, kv_heads, num_kv), block, q_offset)
        product = pooled_scores if k.is_cuda else pooled_scores_ref
        scores = product(q_means, keys_of(key_means, kv_heads), first_block=first)  # [H, B, KB]
        masses = [spec["mass"] for spec in specs]
        log_shares = (scores * scale).log_softmax(-1) if shared or any(masses) else scores
        if shared:
            log_shares = log_shares.view(len(kv_heads), -1, *log_shares.shape[1:]).logsumexp(1) - math.log(
                q.shape[1] // num_kv
            )
        log_shares = picked(log_shares, places)
        # The scores themselves order one head's blocks as their shares do, without the shares' rounding.
        ranking = log_shares if shared else picked(scores, places)
        own = torch.arange(first, first + q_means.shape[0], device=q.device).expand(ranking.shape[:2])[..., None]
        ranking = ranking.scatter(-1, own, float("inf"))
        limits = [min(spec.count("top_k"), ranking.shape[-1]) for spec in specs]
        values, index = torch.topk(ranking, max(limits), dim=-1)
        keep = values > float("-inf")
        if min(limits) < max(limits):
            limit = on_device(limits, q.device)[:, None, None]
            keep &= torch.arange(max(limits), device=q.device) < limit
        if any(masses):
            share = log_shares.gather(-1, index).exp()
            wanted = on_device(masses, q.device, torch.float32)[:, None, None]
            keep &= (share.cumsum(-1) - share < wanted) | (wanted == 0)
        return Blocks(*block_lists(index, keep), block_rows=block, block_keys=block, first_row=first * block)


def _means(x: Tensor, block: int, first_position: int) -> Tensor:
    """Mean over the rows there are of each block of positions: [blocks, heads, D]."""
    from longbatch_kernels.block_scores import pooled, pooled_ref

    return pooled(x, block, first_position) if x.is_cuda else pooled_ref(x, block, first_position)
