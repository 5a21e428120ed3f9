"""Stripes: for each run of some hundred queries, a window and the keys that sampled queries of the run attend to most.

Every `step`-th query of a run of `rows`, and its last one, attends to all keys before it; the mean of its softmax by
key, over these samples, says what a key is worth to the run. Beside the `window` keys next to each query, which it
always sees, and the first 16 keys, a run gets every key that is worth at least (1 - mass) / N, where N is the number of
keys: all that is left out then holds at most the share 1 - mass of what the samples attend to, and in trained models a
tenth of that. How many keys are kept follows the data: a run whose queries look at little sees little. (With as few
keys as hold a certain share, the same for each run, the output is about 10% further from dense at the same density.)
Shared selections add up what the group's heads attend to. Sampling queries as in FlexPrefill (Lai et al., 2025, arXiv
2502.20766), which chooses blocks by the last of them; single keys as in the columns of `vertical_slash`, but chosen
anew for each run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longbatch.attention.patterns.base import keys_of, on_device, picked, queries_of, served
from longbatch.attention.selection import NOWHERE, Runs
from longbatch.sparsity import PatternSpec

# The first keys, which most heads rest on (Xiao et al., StreamingLLM, 2023, arXiv 2309.17453).
SINKS = 16
# Sums that are looked at together, so that memory stays bounded in long tiles.
_SUMS = 1 << 25


class Stripes:
    """See `TilePattern`."""

    UNIFORM = ("rows", "step", "window")

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
    ) -> Runs:
        num_kv = k.shape[1]
        kv_heads, places = served(q.shape[1], num_kv, selections, shared)
        queries, keys = queries_of(q, kv_heads, num_kv), keys_of(k, kv_heads)
        rows, stop = specs[0].count("rows"), q_offset + q.shape[0]
        bounds = [q_offset, *range((q_offset // rows + 1) * rows, stop, rows), stop]
        # Runs that are looked at together.
        step = max(1, _SUMS // (queries.shape[1] * k.shape[0]))
        parts = []
        for first in range(0, len(bounds) - 1, step):
            start, end = bounds[first], bounds[min(first + step, len(bounds) - 1)]
            part = queries[start - q_offset : end - q_offset]
            parts.append(_columns(part, keys, specs, places, shared=shared, scale=scale, q_offset=start))
        most = max(columns.shape[2] for columns, _ in parts)
        pad = torch.nn.functional.pad
        return Runs(
            columns=torch.cat([pad(columns, (0, most - columns.shape[2]), value=NOWHERE) for columns, _ in parts]),
            column_counts=torch.cat([counts for _, counts in parts]),
            bounds=tuple(bounds),
            window=specs[0].count("window"),
        )


def _columns(
    q: Tensor,
    k: Tensor,
    specs: Sequence[PatternSpec],
    places: Sequence[int],
    *,
    shared: bool,
    scale: float,
    q_offset: int,
) -> tuple[Tensor, Tensor]:
    """Columns and their counts for some runs: q [n, H, D] at positions from q_offset on, k [q_offset + n, Hkv, D]."""
    from longbatch_kernels.key_mass import key_mass, key_mass_ref

    estimate = key_mass if k.is_cuda else key_mass_ref
    num_keys = k.shape[0]
    # No keys after the last of these queries: float32 [B, S, N] and [B, S].
    sums, totals = estimate(
        q,
        k[: q_offset + q.shape[0]],
        scale=scale,
        q_offset=q_offset,
        rows=specs[0].count("rows"),
        step=specs[0].count("step"),
        window=specs[0].count("window"),
        shared=shared,
    )
    sums, totals = (picked(x.transpose(0, 1), places).transpose(0, 1) for x in (sums, totals))
    left_out = on_device([(1 - spec["mass"]) / num_keys for spec in specs], k.device, torch.float32)
    return worthwhile(sums, totals * left_out)


def worthwhile(sums: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """The keys whose sums reach a least one, and the first ones: int32 [B, S, C] ascending, padded with `NOWHERE`, and
    their counts, int32 [B, S]. The device is waited for once: how many keys that are is the data's business, and room
    for all of them would be gathered otherwise.

    sums: float32 [B, S, N]. least: float32 [B, S].
    """
    keep = sums >= least[..., None]
    keep[..., :SINKS] = True
    place = keep.cumsum(-1, dtype=torch.int32)
    counts = place[..., -1].contiguous()
    most = int(counts.max())
    # Keys left out are written to a place past the end, which is cut off.
    place = place.sub_(1).masked_fill_(~keep, most).long()
    keys = torch.arange(sums.shape[-1], dtype=torch.int32, device=sums.device).expand_as(place)
    columns = torch.full((*counts.shape, most + 1), NOWHERE, dtype=torch.int32, device=sums.device)
    columns.scatter_(-1, place, keys)
    return columns[..., :most].contiguous(), counts
