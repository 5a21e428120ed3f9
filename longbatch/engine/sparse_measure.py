"""How fast a GPU runs selections; `python -m longbatch.engine.sparse_measure cuda:0 bfloat16` prints it as JSON.

Selections are made up: distances cluster as `longbatch.plan.sparse_cost` expects of trained models, because those of
random queries and keys are spread evenly and touch most of the keys. Rates count what was selected. Takes some seconds,
most of them compiling kernels for the first time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longbatch.attention.patterns import select_ranges, select_tile, summarize_keys
from longbatch.attention.selection import Ranges, merged_ranges
from longbatch.attention.sparse import SparseLayer
from longbatch.attention.state import partial
from longbatch.plan.sparse_cost import BLOCK, CLUSTER, causal_pairs
from longbatch.plan.sparse_rates import SparseRates
from longbatch.sparsity import LayerPatterns, PatternSpec
from longbatch.timing import median_seconds

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
# The longer one where this much memory is free.
LENGTHS, LONG_BYTES = (32768, 131072), 24 << 30
SHORT = 1024
BLOCK_TILE = 16384
VERTICAL, SLASH = 1000, 6096
REPEATS = 5


@torch.inference_mode()
def measure(device: torch.device, dtype: torch.dtype) -> SparseRates:
    """Measure a GPU now."""
    torch.cuda.set_device(device)
    length = LENGTHS[torch.cuda.mem_get_info(device)[0] >= LONG_BYTES]
    generator = torch.Generator(device).manual_seed(0)

    def noise(heads: int) -> Tensor:
        return torch.randn((length, heads, HEAD_DIM), generator=generator, dtype=dtype, device=device)

    q, k, v = noise(HEADS), noise(KV_HEADS), noise(KV_HEADS)
    dense = _seconds(lambda: partial(q, k, v, scale=SCALE, causal=True))
    estimate, ranges_flops = _ranges(q, k, v, shared=False)
    shared_estimate, shared_flops = _ranges(q, k, v, shared=True)
    pooled, blocks_flops = _blocks(q, k, v)
    return SparseRates(
        device=torch.cuda.get_device_name(device),
        dense_flops=_flops(HEADS * causal_pairs(length)) / dense,
        ranges_flops=ranges_flops,
        shared_flops=shared_flops,
        blocks_flops=blocks_flops,
        estimate_seconds=estimate / (HEADS * length),
        shared_estimate_seconds=shared_estimate / (HEADS * length),
        pooled_seconds=pooled,
        antidiagonal_flops=_antidiagonal(q, k),
        sampled_flops=_sampled(q, k),
        layer_seconds=_short_layer(q, k, v),
    )


def made_up_ranges(length: int, num_selections: int, device: torch.device) -> Ranges:
    """Vertical-slash selections whose columns are spread evenly and whose distances cluster, all rows of a prompt."""
    chance = np.random.default_rng(0)
    columns, distances = [], []
    for _ in range(num_selections):
        rest = chance.choice(np.arange(30, length), size=VERTICAL - 30, replace=False)
        columns.append(np.sort(np.concatenate([np.arange(30), rest])))
        distances.append(_clustered(length, chance))
    starts, stops, counts = merged_ranges(_on(distances, device))
    return Ranges(
        starts=starts,
        stops=stops,
        counts=counts,
        columns=_on(columns, device),
        column_counts=torch.full((num_selections,), VERTICAL, dtype=torch.int32, device=device),
        windows=torch.zeros(num_selections, dtype=torch.int32, device=device),
        rows=(0, length),
    )


def _clustered(length: int, chance: np.random.Generator) -> np.ndarray:
    """`SLASH` distances: a quarter of them next to the query, the others in runs at log-uniform distances."""
    band = SLASH // 4
    chosen = np.zeros(length, dtype=bool)
    chosen[:band] = True
    while (missing := SLASH - int(chosen.sum())) > 0:
        first = int(np.exp(chance.uniform(np.log(band), np.log(length - CLUSTER))))
        chosen[first : first + min(CLUSTER, missing)] = True
    return np.flatnonzero(chosen)


def _ranges(q: Tensor, k: Tensor, v: Tensor, *, shared: bool) -> tuple[float, float]:
    """Seconds for choosing and preparing the selections of a layer, and FLOP/s of running them."""
    from longbatch_kernels.range_attention import prepare, range_attention
    from longbatch_kernels.range_index import PackedPrompt

    length = q.shape[0]
    each = HEADS // KV_HEADS if shared else 1
    ranges = made_up_ranges(length, HEADS // each, q.device)
    of_head = [head // each for head in range(HEADS)]
    prompts = [PackedPrompt(0, length, 0, 0, length)]
    specs = [PatternSpec.make("vertical_slash", vertical=VERTICAL, slash=SLASH)] * (HEADS // each)

    def chosen() -> None:
        last = length - 64
        select_ranges(q[last:], k, specs, shared=shared, scale=SCALE, q_offset=last, rows=(0, length))

    def prepared() -> Any:
        ranges.pairs(0, length, length)
        return prepare(ranges, k, v, selections=[of_head], prompts=prompts)

    lists, out = prepared(), torch.empty_like(q)
    seconds = _seconds(lambda: range_attention(q, k, v, lists, scale=SCALE, out=out))
    pairs = float(ranges.pairs(0, length, length).sum()) * each
    return _seconds(chosen) + _seconds(prepared), _flops(pairs) / seconds


def _blocks(q: Tensor, k: Tensor, v: Tensor) -> tuple[float, float]:
    """Seconds of pooled scores for each pair of blocks and head, and FLOP/s of the blocks that they choose."""
    length = q.shape[0]
    specs = [PatternSpec.make("block_sparse")] * HEADS
    layer = SparseLayer(LayerPatterns(tuple(specs)), HEADS, KV_HEADS, SCALE)
    rows = slice(length - BLOCK_TILE, length)
    selection = layer.select(None, k, v, q_offset=length, rows=(0, length))
    both = _seconds(lambda: layer.attend(q[rows], k, v, selection, q_offset=rows.start))
    summaries = summarize_keys(k, specs)

    def scored() -> Any:
        return select_tile(q[rows], k, specs, shared=False, scale=SCALE, q_offset=rows.start, summaries=summaries)

    scoring = _seconds(scored)
    pairs = float(scored()[0].selected.pairs(rows.start, length, length).sum())
    num_scores = HEADS * (causal_pairs(length) - causal_pairs(rows.start)) / BLOCK**2
    # A difference of two measurements; the attention is never less than a tenth of both.
    return scoring / num_scores, _flops(pairs) / max(both - scoring, both / 10)


def _antidiagonal(q: Tensor, k: Tensor) -> float:
    """FLOP/s of antidiagonal scores, the choice among them included."""
    specs = [PatternSpec.make("antidiagonal")] * HEADS
    length = min(LENGTHS[0], q.shape[0])
    start = length - BLOCK_TILE

    def scored() -> None:
        select_tile(q[start:length], k[:length], specs, shared=False, scale=SCALE, q_offset=start)

    pairs = HEADS * (causal_pairs(length) - causal_pairs(start))
    return pairs * 2 * HEAD_DIM / specs[0]["stride"] / _seconds(scored)


def _sampled(q: Tensor, k: Tensor) -> float:
    """FLOP/s of scores by sampled queries, the choice of keys by them included."""
    specs = [PatternSpec.make("stripes")] * HEADS
    length = min(LENGTHS[0], q.shape[0])
    start = length - BLOCK_TILE

    def chosen() -> None:
        select_tile(q[start:length], k[:length], specs, shared=False, scale=SCALE, q_offset=start)

    pairs = HEADS * (causal_pairs(length) - causal_pairs(start))
    return _flops(pairs / specs[0]["step"]) / _seconds(chosen)


def _short_layer(q: Tensor, k: Tensor, v: Tensor) -> float:
    """Seconds of a layer of a short prompt: launches, and what waits for them."""
    specs = (PatternSpec.make("vertical_slash", vertical=100, slash=100),) * HEADS
    layer = SparseLayer(LayerPatterns(specs), HEADS, KV_HEADS, SCALE)
    q, k, v = q[:SHORT], k[:SHORT], v[:SHORT]

    def run() -> None:
        selection = layer.select(q[-64:], k, v, q_offset=SHORT - 64, rows=(0, SHORT))
        layer.attend(q, k, v, selection, q_offset=0)

    return _seconds(run)


def _flops(pairs: float) -> float:
    return 4.0 * HEAD_DIM * pairs


def _on(lists: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """Equally long lists as int32 [S, M]."""
    return torch.from_numpy(np.stack(lists).astype(np.int32)).to(device)


def _seconds(work: Callable[[], object]) -> float:
    return median_seconds(work, torch.device("cuda"), repeats=REPEATS, warmups=2)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(measure(torch.device(sys.argv[1]), getattr(torch, sys.argv[2])))) + "\n")
