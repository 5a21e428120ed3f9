"""Sparse layers whose selections are the clustered workload of `vs_workload`, whatever their queries and keys are.

Random weights attend everywhere, so that what their own estimate selects says nothing of trained models. Here each
layer makes its estimate as ever and then goes on with sums whose highest entries are the workload's: all the work of a
real layer is done, and what is executed is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longbatch.attention import SparseLayer
from longbatch.attention.patterns.vertical_slash import chosen as chosen_ranges
from longbatch.attention.selection import Ranges
from longbatch.bench import vs_workload
from longbatch.bench.attention_inputs import scores_of, selections
from longbatch.models.spec import ModelSpec
from longbatch.sparsity import LayerPatterns, PatternSpec


class WorkloadLayer(SparseLayer):
    """budgets: (vertical, slash) of each query head, or of each K/V head where they are fewer."""

    def __init__(
        self,
        budgets: Sequence[tuple[int, int]],
        num_heads: int,
        num_kv_heads: int,
        scale: float,
        length: int,
        device: torch.device,
    ) -> None:
        specs = tuple(PatternSpec.make("vertical_slash", vertical=v, slash=s) for v, s in budgets)
        super().__init__(LayerPatterns(specs, len(budgets) < num_heads), num_heads, num_kv_heads, scale)
        self._length = length
        self._scores = scores_of(selections(budgets, length), length, device)

    def select_ranges(
        self, q_last: Tensor | None, k: Tensor, *, q_offset: int, rows: tuple[int, int]
    ) -> tuple[Ranges, ...]:
        """The workload, for a prompt in one piece. Raises ValueError for any other."""
        from longbatch_kernels.last_query import last_query, last_query_ref

        assert q_last is not None
        if k.shape[0] != self._length:
            raise ValueError(f"the workload is that of {self._length:,} tokens in one piece, not of {k.shape[0]:,}")
        estimate = last_query if k.is_cuda else last_query_ref
        estimate(q_last, k, scale=self.scale, q_offset=q_offset, shared=self.patterns.shared)
        # On a CPU they are overwritten.
        vertical, slash = self._scores if k.is_cuda else [scores.clone() for scores in self._scores]
        return (chosen_ranges(vertical, slash, self.patterns.heads, rows),)


def workload_layers(spec: ModelSpec, length: int, device: torch.device, *, shared: bool) -> tuple[WorkloadLayer, ...]:
    """The published mix over a model's layers, again from its start where there are more than 32 of them."""
    mix = vs_workload.shared_layers() if shared else vs_workload.layers()
    found = []
    for index, layer in enumerate(spec.layers):
        count = layer.num_kv_heads if shared else layer.num_heads
        budgets = mix[index % len(mix)]
        own = [budgets[place % len(budgets)] for place in range(count)]
        found.append(WorkloadLayer(own, layer.num_heads, layer.num_kv_heads, layer.scale, length, device))
    return tuple(found)
