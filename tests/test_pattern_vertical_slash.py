"""Vertical-slash against a slow transcription of MInference's estimate and of its block index."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from longbatch.attention.patterns import select_ranges
from longbatch.attention.selection import NOWHERE, Ranges
from longbatch.sparsity import PatternSpec

GROUPS = (1, 3, 4, 7, 8)


def inputs(num_keys: int, num_queries: int, group: int, num_kv: int = 2, dim: int = 16) -> tuple[Tensor, Tensor]:
    """Queries and keys with a few strong columns and distances, in float64 so that both sides sort alike."""
    generator = torch.Generator().manual_seed(num_keys * 131 + group)
    k = torch.randn(num_keys, num_kv, dim, generator=generator, dtype=torch.float64)
    q = torch.randn(num_queries, num_kv * group, dim, generator=generator, dtype=torch.float64)
    return q, k


def estimate(q: Tensor, k: Tensor, scale: float, num_queries: int) -> tuple[np.ndarray, np.ndarray]:
    """MInference's column and distance scores of one head, entry by entry; q are the last queries."""
    num_keys = len(k)
    vertical, slash = np.zeros(num_keys), np.zeros(num_keys)
    for row in range(num_queries):
        position = num_keys - num_queries + row
        scores = [float(score) * scale for score in k[: position + 1] @ q[row]]
        top = max(scores)
        weights = [math.exp(score - top) for score in scores]
        total = sum(weights)
        for key, weight in enumerate(weights):
            vertical[key] += weight / total
            slash[position - key] += weight / total
    return vertical, slash


def chosen(vertical: np.ndarray, slash: np.ndarray, v: int, s: int) -> tuple[list[int], list[int]]:
    """The columns and distances: budgets raised to 30 and 50, the first 30 and 100 forced, the nearer ones first."""
    num_keys = len(vertical)
    v, s = min(num_keys, max(v, 30)), min(num_keys, max(s, 50))
    order = sorted(range(num_keys), key=lambda key: (key >= 30, key if key < 30 else 0, -vertical[key]))
    distances = sorted(range(num_keys), key=lambda t: (t >= 100, t if t < 100 else 0, -slash[t]))
    return sorted(order[:v]), sorted(distances[:s])


def exact_keys(q: int, columns: list[int], distances: list[int]) -> set[int]:
    """Every distance stands for the 64 keys up to `distance` before the end of the row's block."""
    end = 64 * (q // 64 + 1)
    keys = {key for t in distances for key in range(end - t - 64, end - t)} | set(columns)
    return {key for key in keys if 0 <= key <= q}


def minference_keys(q: int, columns: list[int], distances: list[int]) -> set[int]:
    """The keys that MInference's index and kernel read for row q: csrc/vertical_slash_index.cu, one thread."""
    end = 64 * (q // 64 + 1)
    slashes = sorted(distances, reverse=True)
    v = s = 1
    column = columns[0]
    slash = slashes[0]
    while slash >= end and s < len(slashes):
        slash = slashes[s]
        s += 1
    slash = end + 64 if slash >= end else max(end - slash, 64)
    low, high = slash - 64, slash
    ranges, single = [], []
    while True:
        if column < high:
            if column < low:
                single.append(column)
            column = columns[v] if v < len(columns) else end + 64
            v += 1
            continue
        if s >= len(slashes):
            ranges.append((low, high))
            break
        slash = max(end - slashes[s], 64)
        s += 1
        if slash > high + 64:
            ranges.append((low, high))
            low, high = slash - 64, slash
        elif slash > high:
            high += 64
    keys = set(single)
    for low, high in ranges:
        assert (high - low) % 64 == 0
        keys |= set(range(low, high))
    return {key for key in keys if key <= q}


def select(q: Tensor, k: Tensor, specs: list[PatternSpec], *, shared: bool, rows: tuple[int, int]) -> Ranges:
    last = q[-64:]
    (found,) = select_ranges(last, k, specs, shared=shared, scale=0.4, q_offset=rows[1] - len(last), rows=rows)
    return found


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
def test_the_same_columns_and_distances_as_minference(group: int, shared: bool) -> None:
    """Each selection with its own budget, in one call; 64 queries."""
    num_keys, num_kv = 193, 2
    q, k = inputs(num_keys, 64, group)
    budgets = [(35 + 3 * i, 101 + 7 * i) for i in range(num_kv if shared else num_kv * group)]
    specs = [PatternSpec.make("vertical_slash", vertical=v, slash=s) for v, s in budgets]
    found = select(q, k, specs, shared=shared, rows=(0, num_keys))
    assert found.rows == (0, num_keys)
    assert found.windows.tolist() == [0] * len(specs)
    scores = [estimate(q[:, h], k[:, h // group], 0.4, 64) for h in range(num_kv * group)]
    for s, budget in enumerate(budgets):
        heads = range(s * group, (s + 1) * group) if shared else [s]
        columns, distances = chosen(sum(scores[h][0] for h in heads), sum(scores[h][1] for h in heads), *budget)
        count = int(found.column_counts[s])
        assert found.columns[s, :count].tolist() == columns
        assert (found.columns[s, count:] == NOWHERE).all()
        for row in (0, 5, 63, 64, 100, 191, 192):
            want = exact_keys(row, columns, distances)
            assert set(found.mask(s, row, row + 1, num_keys)[0].nonzero()[:, 0].tolist()) == want


@pytest.mark.parametrize(
    ("num_keys", "num_queries"), [(1, 1), (2, 2), (29, 29), (65, 64), (130, 7), (257, 64), (320, 64)]
)
def test_odd_lengths_and_chunks(num_keys: int, num_queries: int) -> None:
    """A chunk shorter than 64 queries is judged by those that it has; a short prompt is judged by all of its own."""
    q, k = inputs(num_keys, num_queries, 2, num_kv=1)
    specs = [PatternSpec.make("vertical_slash", vertical=40, slash=120)] * 2
    rows = (num_keys - num_queries, num_keys)
    found = select(q, k, specs, shared=False, rows=rows)
    for head in range(2):
        columns, distances = chosen(*estimate(q[:, head], k[:, 0], 0.4, num_queries), 40, 120)
        assert found.column_counts[head] == len(columns)
        mask = found.mask(head, *rows, num_keys)
        for row in range(*rows):
            assert set(mask[row - rows[0]].nonzero()[:, 0].tolist()) == exact_keys(row, columns, distances)


def test_minferences_index_reads_the_same_keys_and_a_few_more() -> None:
    """Its own index adds at most 63 keys after a range, and the first 64 keys when a distance reaches into them."""
    num_keys = 1500
    q, k = inputs(num_keys, 64, 1, num_kv=1)
    found = select(q, k, [PatternSpec.make("vertical_slash", vertical=60, slash=112)], shared=False, rows=(0, num_keys))
    columns, distances = chosen(*estimate(q[:, 0], k[:, 0], 0.4, 64), 60, 112)
    extra = 0
    for row in range(0, num_keys, 31):
        own = set(found.mask(0, row, row + 1, num_keys)[0].nonzero()[:, 0].tolist())
        theirs = minference_keys(row, columns, distances)
        assert own <= theirs
        extra += len(theirs - own)
        for key in theirs - own:
            assert key < 64 or any(key - back in own for back in range(1, 64))
    assert extra > 0


@pytest.mark.parametrize(("vertical", "slash"), [(1, 1), (30, 50), (10, 99), (500, 1), (5, 5000)])
def test_least_and_most_budgets(vertical: int, slash: int) -> None:
    """Budgets below the forced keys take the nearest of them; budgets above the prompt take everything."""
    num_keys = 200
    q, k = inputs(num_keys, 64, 1, num_kv=1)
    spec = PatternSpec.make("vertical_slash", vertical=vertical, slash=slash)
    found = select(q, k, [spec], shared=False, rows=(0, num_keys))
    columns, distances = chosen(*estimate(q[:, 0], k[:, 0], 0.4, 64), vertical, slash)
    assert len(columns) == min(200, max(30, vertical))
    assert len(distances) == min(200, max(50, slash))
    assert found.columns[0].tolist() == columns
    mask = found.mask(0, 0, num_keys, num_keys)
    for row in range(num_keys):
        assert set(mask[row].nonzero()[:, 0].tolist()) == exact_keys(row, columns, distances)


@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize("selections", [[0], [5], [2, 3], [4, 1], [5, 0, 3]])
def test_some_selections_alone_are_as_among_all(shared: bool, selections: list[int]) -> None:
    """6 selections: of 6 query heads over 3 key heads, or shared ones of 6 key heads."""
    q, k = inputs(150, 64, 2, num_kv=6 if shared else 3)
    spec = PatternSpec.make("vertical_slash", vertical=33, slash=104)
    arguments = {"shared": shared, "scale": 0.4, "q_offset": 86, "rows": (0, 150)}
    (everything,) = select_ranges(q, k, [spec] * 6, **arguments)
    (some,) = select_ranges(q, k, [spec] * len(selections), selections=selections, **arguments)
    for name in ("starts", "stops", "counts", "columns", "column_counts"):
        assert torch.equal(getattr(some, name), getattr(everything, name)[selections]), name


def test_views_of_keys_are_enough() -> None:
    """Keys and queries that lie in a wider tensor, as slices of a cache or of a fused projection do."""
    q, k = inputs(150, 64, 2)
    wide = torch.full((150, 2, 40), float("nan"), dtype=torch.float64)
    wide[..., 3:19] = k
    spec = [PatternSpec.make("vertical_slash", vertical=33, slash=104)] * 4
    plain = select(q, k, spec, shared=False, rows=(0, 150))
    view = select(q, wide[..., 3:19], spec, shared=False, rows=(0, 150))
    assert torch.equal(plain.columns, view.columns)
    assert torch.equal(plain.starts, view.starts)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
def test_the_device_is_not_waited_for(shared: bool) -> None:
    q, k = (x.to("cuda", torch.bfloat16) for x in inputs(5000, 64, 4, dim=64))
    specs = [
        PatternSpec.make("vertical_slash", vertical=100 + 10 * i, slash=200 + i) for i in range(2 if shared else 8)
    ]
    arguments = {"shared": shared, "scale": 0.125, "q_offset": 4936, "rows": (0, 5000)}
    select_ranges(q, k, specs, **arguments)  # compiles the kernel
    torch.cuda.set_sync_debug_mode("error")
    try:
        (found,) = select_ranges(q, k, specs, **arguments)
        pairs = found.pairs(0, 5000, 5000)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (want,) = select_ranges(q.cpu().float(), k.cpu().float(), specs, **arguments)
    assert torch.equal(found.column_counts.cpu(), want.column_counts)
    # Sums from two roundings may swap the last places of a list.
    assert torch.allclose(pairs.cpu(), want.pairs(0, 5000, 5000), rtol=0.02)
