"""Vertical-slash: the keys ("vertical") and the distances ("slash") that the last 64 queries attend to most.

With A the softmax of those queries over all keys: the `vertical` keys with the largest column sums, the first 30
always among them, and the `slash` distances with the largest diagonal sums, 0..99 always among them. Shared selections
add up the sums of the group's heads. Each distance stands for 64 keys of a block of rows (see `Ranges`).
Source: Jiang et al., MInference 1.0, 2024 (arXiv 2407.02490), algorithm 2 and the code's forced keys and least budgets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longbatch.attention.patterns.base import keys_of, on_device, picked, queries_of, served
from longbatch.attention.selection import NOWHERE, ROWS, Ranges, merged_ranges
from longbatch.sparsity import PatternSpec

FORCED_VERTICAL = 30
FORCED_SLASH = 100
LEAST_SLASH = 50
# Above every sum of softmax rows (64 for each head of a group), by steps that float32 tells apart.
_FORCED_SCORE = 1e6


class VerticalSlash:
    """See `RangesPattern`."""

    LAST_QUERIES = 64

    def select(
        self,
        q_last: Tensor,
        k: Tensor,
        specs: Sequence[PatternSpec],
        *,
        shared: bool,
        scale: float,
        q_offset: int,
        rows: tuple[int, int],
        selections: Sequence[int] | None = None,
    ) -> tuple[Ranges, ...]:
        from longbatch_kernels.last_query import last_query, last_query_ref

        num_kv = k.shape[1]
        kv_heads, places = served(q_last.shape[1], num_kv, selections, shared)
        estimate = last_query if k.is_cuda else last_query_ref
        vertical, slash = estimate(
            queries_of(q_last, kv_heads, num_kv), keys_of(k, kv_heads), scale=scale, q_offset=q_offset, shared=shared
        )
        return (chosen(picked(vertical, places), picked(slash, places), specs, rows),)


def chosen(vertical: Tensor, slash: Tensor, specs: Sequence[PatternSpec], rows: tuple[int, int]) -> Ranges:
    """The selections that sums lead to: float32 [S, N] by key and by distance, overwritten; one spec for each."""
    num_keys, device = vertical.shape[1], vertical.device
    num_columns = [min(num_keys, max(spec.count("vertical"), FORCED_VERTICAL)) for spec in specs]
    num_distances = [min(num_keys, max(spec.count("slash"), LEAST_SLASH)) for spec in specs]
    if vertical.is_cuda:
        from longbatch_kernels.top_places import joined, top_places

        # Keys and distances in one go: at short lengths launches are what costs.
        budgets = on_device([*num_columns, *num_distances], device, torch.int32)
        forced = [min(num_keys, most) for most in (FORCED_VERTICAL, FORCED_SLASH) for _ in specs]
        most = max(*num_columns, *num_distances)
        found = top_places(torch.cat([vertical, slash]), budgets, on_device(forced, device, torch.int32), most)
        columns = found[: len(specs), : max(num_columns)]
        starts, stops, counts = joined(found[len(specs) :, : max(num_distances)], num_keys, gap=ROWS)
    else:
        columns = _largest(vertical, num_columns, FORCED_VERTICAL)
        starts, stops, counts = merged_ranges(_largest(slash, num_distances, FORCED_SLASH))
    return Ranges(
        starts=starts,
        stops=stops,
        counts=counts,
        columns=columns,
        column_counts=on_device(num_columns, device, torch.int32),
        windows=torch.zeros_like(counts),
        rows=rows,
    )


def _largest(scores: Tensor, budgets: Sequence[int], forced: int) -> Tensor:
    """The places of each row's largest scores, ascending: int32 [S, M], padded with NOWHERE.

    scores: float32 [S, N], overwritten. budgets: how many places each row gets, the first `forced` places before all
    others and the nearer ones first, so that a smaller budget than `forced` is well defined.
    """
    forced = min(forced, scores.shape[1])
    scores[:, :forced] = _FORCED_SCORE * torch.arange(forced, 0, -1, device=scores.device)
    most = max(budgets)
    found = torch.topk(scores, most, dim=1, sorted=min(budgets) < most).indices.int()
    if min(budgets) < most:
        # Best first, so that each row keeps its budget's share of the list.
        counts = torch.tensor(budgets, dtype=torch.int32)
        found.masked_fill_(torch.arange(most) >= counts[:, None], NOWHERE)
    return found.sort(dim=1).values
