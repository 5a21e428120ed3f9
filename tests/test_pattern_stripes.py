"""Stripes against their definition: the sampled queries of each run, what they attend to, and the keys that holds."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from longbatch.attention.patterns import select_tile
from longbatch.attention.patterns.stripes import SINKS, worthwhile
from longbatch.attention.selection import NOWHERE, Runs
from longbatch.sparsity import PatternSpec

SCALE = 0.3


def inputs(num_keys: int, num_queries: int, heads: int, kv_heads: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_queries, heads, 16, generator=generator)
    return q, torch.randn(num_keys, kv_heads, 16, generator=generator)


def select(q: Tensor, k: Tensor, specs: list[PatternSpec], q_offset: int, shared: bool = False) -> Runs:
    (found,) = select_tile(q, k, specs, shared=shared, scale=SCALE, q_offset=q_offset)
    assert found.selections == tuple(range(len(specs)))
    return found.selected


def weights_of(q: Tensor, k: Tensor, q_offset: int) -> Tensor:
    """Softmax of every query over the keys up to it: float64 [H, n, N]."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys.double()) * SCALE
    hidden = torch.arange(k.shape[0]) > q_offset + torch.arange(q.shape[0])[:, None]
    return scores.masked_fill(hidden, float("-inf")).softmax(-1)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("num_keys", "q_offset"), [(300, 0), (300, 70), (130, 129), (64, 0), (7, 0)])
def test_the_keys_that_samples_look_at(num_keys: int, q_offset: int, shared: bool) -> None:
    q, k = inputs(num_keys, num_keys - q_offset, 6, 2)
    weights = weights_of(q, k, q_offset)
    masses = [0.3, 0.9] if shared else [0.1, 0.3, 0.6, 0.8, 0.9, 0.99]
    specs = [PatternSpec.make("stripes", mass=mass, window=5, rows=64, step=8) for mass in masses]
    runs = select(q, k, specs, q_offset, shared)
    assert runs.bounds == (q_offset, *(p for p in range(0, num_keys, 64) if p > q_offset), num_keys)
    each = 3 if shared else 1
    keys = torch.arange(num_keys)
    for run, (low, high) in enumerate(pairwise(runs.bounds)):
        rows = [p for p in range(low, high) if (p + 1) % 8 == 0 or p == high - 1]
        far = torch.tensor(rows)[:, None] - keys >= runs.window
        for s, mass in enumerate(masses):
            own = weights[s * each : (s + 1) * each, [p - q_offset for p in rows]]
            worth = (own * far).mean((0, 1)) * num_keys
            chosen = set(runs.columns[run, s, : runs.column_counts[run, s]].tolist())
            sure = set(keys[worth > (1 - mass) * (1 + 1e-4)].tolist()) | set(range(min(SINKS, num_keys)))
            assert sure <= chosen <= sure | set(keys[worth > (1 - mass) * (1 - 1e-4)].tolist())
            mask = runs.mask(s, low, high, num_keys)[[p - low for p in rows]]
            assert float((own * mask).sum(-1).mean()) >= mass - 1e-5


def test_heads_may_have_runs_of_their_own() -> None:
    q, k = inputs(256, 256, 2, 2)
    specs = [PatternSpec.make("stripes", rows=64), PatternSpec.make("stripes", rows=128)]
    found = select_tile(q, k, specs, shared=False, scale=SCALE, q_offset=0)
    assert [(one.selections, len(one.selected.bounds)) for one in found] == [((0,), 5), ((1,), 3)]


def test_some_selections_of_a_layer() -> None:
    q, k = inputs(200, 200, 6, 3)
    specs = [PatternSpec.make("stripes", mass=0.2 + 0.1 * i, rows=64, window=3) for i in range(6)]
    whole = select(q, k, specs, 0)
    (part,) = select_tile(q, k, [specs[3], specs[5]], shared=False, scale=SCALE, q_offset=0, selections=[3, 5])
    for number, place in enumerate((3, 5)):
        for run in range(4):
            want = whole.columns[run, place, : whole.column_counts[run, place]]
            found = part.selected.columns[run, number, : part.selected.column_counts[run, number]]
            assert found.tolist() == want.tolist()


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are looked at one after the other are what they are together."""
    q, k = inputs(300, 300, 2, 1)
    specs = [PatternSpec.make("stripes", mass=0.5, rows=64, window=4)] * 2
    whole = select(q, k, specs, 0)
    monkeypatch.setattr("longbatch.attention.patterns.stripes._SUMS", 1)
    parts = select(q, k, specs, 0)
    assert parts.bounds == whole.bounds
    assert torch.equal(parts.column_counts, whole.column_counts)
    assert torch.equal(parts.columns, whole.columns)


def test_keys_below_the_least_are_left_out() -> None:
    sums = torch.zeros(1, 2, 40)
    sums[0, 0, 20:30] = 1.0
    sums[0, 1, 39] = 0.5
    columns, counts = worthwhile(sums, torch.tensor([[1.0, 0.75]]))
    assert columns[0, 0].tolist() == [*range(SINKS), *range(20, 30)]
    assert columns[0, 1].tolist() == [*range(SINKS), *[NOWHERE] * 10]
    assert counts.tolist() == [[SINKS + 10, SINKS]]


def test_queries_that_look_at_one_key_take_it() -> None:
    """A run whose queries all look at one far key sees that key, its window and the first ones."""
    q, k = torch.zeros(256, 1, 16), torch.zeros(256, 1, 16)
    q[:, 0, 0], k[100, 0, 0] = 100.0, 1.0
    runs = select(q, k, [PatternSpec.make("stripes", mass=0.9, rows=64, window=4)], 0)
    assert [int(count) for count in runs.column_counts[2:, 0]] == [SINKS + 1, SINKS + 1]
    assert runs.columns[3, 0, SINKS] == 100
