"""longbatch's own times in `longbatch bench attention`: layers of vertical-slash heads, step by step.

A layer's time is the estimate (last-query sums over all keys), the index (the highest sums, merged ranges, all that
the kernel reads) and the attention. The estimate runs on the random queries and keys; from there on the sums are
replaced by ones whose highest entries are the workload's, so that what is executed is the workload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longbatch.attention.patterns.vertical_slash import chosen as chosen_ranges
from longbatch.attention.selection import Ranges
from longbatch.bench.attention_check import Check, sampled_blocks
from longbatch.bench.attention_inputs import Chosen, Inputs, scores_of, selections
from longbatch.bench.vs_workload import ROWS, selected
from longbatch.sparsity import PatternSpec
from longbatch.timing import median_seconds

if TYPE_CHECKING:
    from longbatch_kernels.range_attention import Prepared

# (columns, distances, seed): what a selection of one length is.
Selection = tuple[int, int, int]
LAST_QUERIES = 64
# Blocks of rows that are compared for one head of each class of each layer, beside the last one.
CHECKED_BLOCKS = 2
# Up to this length each layer's attention warms up; beyond it only the first layer's, which compiles for all of them.
LONGEST_WARM_UP = 1 << 17


@dataclass(slots=True)
class LayerTimes:
    """Sums over the layers measured. pairs: (query, key) pairs of the selections, all query heads; causal: of dense
    attention. errors: relative RMS of each layer against float64."""

    estimate: float = 0.0
    index: float = 0.0
    attention: float = 0.0
    pairs: float = 0.0
    causal: float = 0.0
    errors: list[float] = field(default_factory=list)
    holds: bool = True

    @property
    def total(self) -> float:
        return self.estimate + self.index + self.attention

    @property
    def density(self) -> float:
        """Share of the causal area that the selections hold."""
        return self.pairs / self.causal

    def rate(self, head_dim: int) -> float:
        """Operations per second of the attention, counting the selections' alone."""
        return 4 * head_dim * self.pairs / self.attention


def measure_layers(
    inputs: Inputs,
    layers: Sequence[Sequence[tuple[int, int]]],
    *,
    shared: bool,
    repeats: int,
    most_error: float,
    pairs: dict[Selection, float],
) -> LayerTimes:
    """Time and check every layer. layers: (vertical, slash) of each query head, or of each K/V head where `shared`.
    pairs: those of selections counted before at this length; more are added."""
    from longbatch_kernels.range_attention import range_attention

    device, times = inputs.q.device, LayerTimes()
    length, num_heads, _ = inputs.q.shape
    out = torch.empty_like(inputs.q)
    # The estimate does not depend on budgets, so one layer's time is every layer's.
    estimate = median_seconds(lambda: estimated(inputs, shared), device, repeats=repeats)
    for number, budgets in enumerate(layers):
        chosen = selections(budgets, length)
        scores = scores_of(chosen, length, device)
        specs = [PatternSpec.make("vertical_slash", vertical=v, slash=s) for v, s in budgets]
        ranges, prepared = indexed(inputs, specs, scores, shared)
        times.estimate += estimate
        times.index += median_seconds(lambda: indexed(inputs, specs, scores, shared), device, repeats=repeats)  # noqa: B023
        times.attention += median_seconds(
            lambda: range_attention(inputs.q, inputs.k, inputs.v, prepared, scale=inputs.scale, out=out),  # noqa: B023
            device,
            repeats=repeats,
            warmups=1 if number == 0 or length <= LONGEST_WARM_UP else 0,
        )
        times.pairs += counted(ranges, chosen, length, pairs) * (inputs.group if shared else 1)
        times.causal += num_heads * length * (length + 1) / 2
        check = checked(inputs, out, chosen, shared, most_error, seed=number)
        times.errors.append(check.error)
        times.holds &= check.holds
    return times


def counted(ranges: Ranges, chosen: Sequence[Chosen], length: int, pairs: dict[Selection, float]) -> float:
    """Pairs of all selections of a layer; each of the workload's is counted once."""
    names = [(len(one.columns), len(one.distances), one.seed) for one in chosen]
    new = [number for number, name in enumerate(names) if name not in pairs]
    if new:
        which = torch.tensor(new, device=ranges.counts.device)
        parts = ("starts", "stops", "counts", "columns", "column_counts", "windows")
        found = replace(ranges, **{part: getattr(ranges, part)[which] for part in parts}).pairs(0, length, length)
        pairs.update(zip([names[number] for number in new], found.tolist(), strict=True))
    return sum(pairs[name] for name in names)


def estimated(inputs: Inputs, shared: bool) -> tuple[Tensor, Tensor]:
    """The last-query sums of all selections, float32 [S, N] by key and by distance."""
    from longbatch_kernels.last_query import last_query

    last = max(0, inputs.length - LAST_QUERIES)
    return last_query(inputs.q[last:], inputs.k, scale=inputs.scale, q_offset=last, shared=shared)


def indexed(
    inputs: Inputs, specs: Sequence[PatternSpec], scores: tuple[Tensor, Tensor], shared: bool
) -> tuple[Ranges, Prepared]:
    """What the pattern makes of given sums, and what the kernel makes of that."""
    from longbatch_kernels.range_attention import prepare
    from longbatch_kernels.range_index import PackedPrompt

    length, num_heads, _ = inputs.q.shape
    vertical, slash = scores
    ranges = chosen_ranges(vertical, slash, specs, (0, length))
    of_head = [head // inputs.group if shared else head for head in range(num_heads)]
    prompts = [PackedPrompt(0, length, 0, 0, length)]
    return ranges, prepare(ranges, inputs.k, inputs.v, selections=[of_head], prompts=prompts)


def checked(inputs: Inputs, out: Tensor, chosen: Sequence[Chosen], shared: bool, most_error: float, seed: int) -> Check:
    """Compare sampled blocks of rows of one head of each different selection size, from the lists themselves."""
    check = Check(most_error)
    heads = {(len(one.columns), len(one.distances)): number for number, one in enumerate(chosen)}
    for number in heads.values():
        head = number * inputs.group if shared else number
        kv_head = head // inputs.group
        k, v = inputs.k[:, kv_head], inputs.v[:, kv_head]
        for first in sampled_blocks(inputs.length, CHECKED_BLOCKS, seed * 100 + number, ROWS):
            rows = slice(first, min(first + ROWS, inputs.length))
            keys = selected(chosen[number].columns, chosen[number].distances, first, inputs.length)
            check.rows(
                inputs.q[rows, head],
                k,
                v,
                out[rows, head],
                first,
                torch.from_numpy(keys).to(out.device),
                inputs.scale,
            )
    return check
