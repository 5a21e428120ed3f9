"""Selections against their definition, row by row and key by key."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from longbatch.attention.selection import (
    NOWHERE,
    ROWS,
    Blocks,
    Ranges,
    Runs,
    block_lists,
    listed_blocks,
    merged_ranges,
    stacked,
    window_ranges,
)


def padded(lists: list[list[int]], value: int) -> tuple[Tensor, Tensor]:
    width = max(map(len, lists))
    rows = [[*one, *[value] * (width - len(one))] for one in lists]
    return torch.tensor(rows, dtype=torch.int32).reshape(len(lists), width), torch.tensor(
        [len(one) for one in lists], dtype=torch.int32
    )


def random_ranges(num_keys: int, seed: int) -> Ranges:
    """Ranges and columns, ranges alone, columns alone, nothing, a window with columns, a window, dense, one range
    that holds distance 0 alone."""
    rng = np.random.default_rng([seed, num_keys])

    def some(most: int) -> list[int]:
        return np.sort(rng.choice(num_keys, size=min(num_keys, int(rng.integers(1, most))), replace=False)).tolist()

    distances, _ = padded([some(12), some(40), [], [], [], [], [], [0]], NOWHERE)
    columns, column_counts = padded([some(9), [], some(30), [], some(20), [], some(3), []], NOWHERE)
    starts, stops, counts = merged_ranges(distances)
    windows = torch.tensor([0, 0, 0, 0, int(rng.integers(1, 100)), 1, NOWHERE, 0], dtype=torch.int32)
    return Ranges(starts, stops, counts, columns, column_counts, windows, (0, num_keys))


def seen_keys(ranges: Ranges, s: int, q: int) -> set[int]:
    """The keys that row q sees, by the words of the definition."""
    end = ROWS * (q // ROWS + 1)
    keys = set(ranges.columns[s, : ranges.column_counts[s]].tolist())
    for start, stop in zip(ranges.starts[s].tolist(), ranges.stops[s].tolist()[: ranges.counts[s]], strict=False):
        keys |= set(range(end - stop - 64, end - start))
    keys |= set(range(q - min(int(ranges.windows[s]), q + 1) + 1, q + 1))
    return {key for key in keys if 0 <= key <= q}


@pytest.mark.parametrize("num_keys", [1, 2, 63, 64, 65, 128, 129, 200, 321])
def test_ranges_follow_their_definition(num_keys: int) -> None:
    ranges = random_ranges(num_keys, seed=1)
    for start, stop in ((0, num_keys), (num_keys // 3, num_keys), (num_keys // 2, num_keys // 2 + 1)):
        pairs = ranges.pairs(start, stop, num_keys)
        assert pairs.dtype == torch.float64
        for s in range(ranges.num_selections):
            want = torch.zeros(stop - start, num_keys, dtype=torch.bool)
            for q in range(start, stop):
                want[q - start, list(seen_keys(ranges, s, q))] = True
            assert torch.equal(ranges.mask(s, start, stop, num_keys), want)
            assert pairs[s] == want.sum()


def test_every_row_of_a_dense_selection_sees_every_key() -> None:
    ranges = window_ranges([NOWHERE], [0], (0, 1000), torch.device("cpu"))
    assert torch.equal(ranges.mask(0, 0, 1000, 1000), torch.ones(1000, 1000, dtype=torch.bool).tril())
    assert ranges.pairs(0, 1000, 1000).tolist() == [1000 * 1001 / 2]


def test_pairs_at_a_long_length() -> None:
    """Single rows of a 300K prompt against sets, and all rows as the sum of two halves."""
    num_keys = 300_001
    ranges = random_ranges(num_keys, seed=3)
    for q in (0, 63, 64, 100_000, num_keys - 1):
        want = [len(seen_keys(ranges, s, q)) for s in range(ranges.num_selections)]
        assert ranges.pairs(q, q + 1, num_keys).tolist() == want
    parts = ranges.pairs(0, 131_071, num_keys) + ranges.pairs(131_071, num_keys, num_keys)
    assert parts.tolist() == ranges.pairs(0, num_keys, num_keys).tolist()
    assert parts[6] == num_keys * (num_keys + 1) // 2


def test_rows_after_the_last_key_are_refused() -> None:
    with pytest.raises(ValueError, match="rows up to 11 stand after the last of 10 keys"):
        random_ranges(10, 0).pairs(0, 11, 10)
    blocks = Blocks(torch.zeros(1, 1, 1, dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32), 64, 64, 0)
    with pytest.raises(ValueError, match="rows up to 11 stand after"):
        blocks.pairs(0, 11, 10)


@pytest.mark.parametrize("seed", range(20))
def test_merged_ranges_cover_the_same_keys(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lists = [np.sort(rng.choice(2000, size=int(rng.integers(0, 60)), replace=False)).tolist() for _ in range(5)]
    lists.append([])
    distances, _ = padded(lists, NOWHERE)
    starts, stops, counts = merged_ranges(distances)
    assert starts.dtype == stops.dtype == counts.dtype == torch.int32
    assert starts.shape == stops.shape == distances.shape
    for s, own in enumerate(lists):
        ranges = list(zip(starts[s].tolist(), stops[s].tolist(), strict=True))
        used, unused = ranges[: counts[s]], ranges[counts[s] :]
        assert unused == [(1, 0)] * len(unused)
        assert {u for a, c in used for u in range(a + 1, c + 65)} == {u for t in own for u in range(t + 1, t + 65)}
        assert all(a <= c for a, c in used)
        assert all(after[0] > before[1] + 64 for before, after in pairwise(used))


@pytest.mark.parametrize(
    ("distances", "ranges"),
    [
        ([0], [(0, 0)]),
        ([0, 64], [(0, 64)]),
        ([0, 65], [(0, 0), (65, 65)]),
        ([5, 6, 7, 71, 136], [(5, 71), (136, 136)]),
        ([], []),
    ],
)
def test_distances_at_most_64_apart_touch(distances: list[int], ranges: list[tuple[int, int]]) -> None:
    starts, stops, counts = merged_ranges(torch.tensor([distances], dtype=torch.int32))
    assert counts.tolist() == [len(ranges)]
    assert list(zip(starts[0].tolist(), stops[0].tolist(), strict=True))[: len(ranges)] == ranges


def test_window_ranges_have_their_own_sinks() -> None:
    ranges = window_ranges([5, 1, 300], [0, 7, 400], (100, 300), torch.device("cpu"))
    assert ranges.rows == (100, 300)
    assert ranges.column_counts.tolist() == [0, 7, 300]
    distance = torch.arange(100, 300)[:, None] - torch.arange(300)
    sees = (distance >= 0) & ((distance < 1) | (torch.arange(300) < 7))
    assert torch.equal(ranges.mask(1, 100, 300, 300), sees)
    assert torch.equal(ranges.mask(0, 100, 300, 300), (distance >= 0) & (distance < 5))


def test_stacked_patterns_keep_their_selections() -> None:
    """Two patterns, one of which changes its mind at row 150, and a wide one with ranges."""
    num_keys = 200
    whole = random_ranges(num_keys, seed=2)
    early = window_ranges([4, 9], [2, 3], (0, 150), torch.device("cpu"))
    late = window_ranges([NOWHERE, 9], [2, 3], (150, 200), torch.device("cpu"))
    order = (9, 0, 2, 4, 5, 6, 7, 8)
    merged = stacked([(order, (whole,)), ((3, 1), (early, late))], (0, num_keys))
    assert [one.rows for one in merged] == [(0, 150), (150, 200)]
    for one, windowed in zip(merged, (early, late), strict=True):
        start, stop = one.rows
        assert one.num_selections == 10
        for place, s in enumerate(order):
            assert torch.equal(one.mask(s, start, stop, num_keys), whole.mask(place, start, stop, num_keys))
        for place, s in enumerate((3, 1)):
            assert torch.equal(one.mask(s, start, stop, num_keys), windowed.mask(place, start, stop, num_keys))


def test_lists_without_places_stack() -> None:
    one, other = (window_ranges([width], [0], (0, 9), torch.device("cpu")) for width in (1, 2))
    merged = stacked([((1,), (one,)), ((0,), (other,))], (0, 9))
    assert merged[0].columns.shape == merged[0].starts.shape == (2, 0)
    assert merged[0].pairs(0, 9, 9).tolist() == [17, 9]


@pytest.mark.parametrize("num_keys", [1, 64, 65, 100, 300])
@pytest.mark.parametrize(("block_rows", "block_keys"), [(64, 64), (32, 64), (128, 32)])
def test_blocks_follow_their_definition(num_keys: int, block_rows: int, block_keys: int) -> None:
    torch.manual_seed(num_keys)
    num_blocks = -(-num_keys // block_keys)
    for start in {0, num_keys // 2}:
        first = start // block_rows
        query_blocks = -(-num_keys // block_rows) - first
        chosen = torch.rand(3, query_blocks, num_blocks) < 0.5
        chosen[2] = False
        index = torch.rand(chosen.shape).argsort(-1)
        indices, counts = block_lists(index, chosen.gather(-1, index))
        blocks = Blocks(indices, counts, block_rows, block_keys, first * block_rows)
        assert indices.dtype == counts.dtype == torch.int32
        assert torch.equal(listed_blocks(indices, counts, num_blocks), chosen)
        pairs = blocks.pairs(start, num_keys, num_keys)
        for s in range(3):
            want = torch.zeros(num_keys - start, num_keys, dtype=torch.bool)
            for q in range(start, num_keys):
                for key in range(q + 1):
                    want[q - start, key] = chosen[s, q // block_rows - first, key // block_keys]
            assert torch.equal(blocks.mask(s, start, num_keys, num_keys), want)
            assert pairs[s] == want.sum()


def test_block_lists_ascend_and_end_in_minus_one() -> None:
    index = torch.tensor([[5, 2, 9, 0], [3, 1, 2, 0]])
    keep = torch.tensor([[True, False, True, True], [False, False, False, False]])
    indices, counts = block_lists(index, keep)
    assert indices.tolist() == [[0, 5, 9, -1], [-1, -1, -1, -1]]
    assert counts.tolist() == [3, 0]


def random_runs(bounds: list[int], window: int, seed: int) -> Runs:
    """Of each run: some columns, none, all."""
    rng = np.random.default_rng(seed)
    lists = []
    for stop in bounds[1:]:
        some = np.sort(rng.choice(stop, size=min(stop, int(rng.integers(1, 40))), replace=False)).tolist()
        lists += [some, [], list(range(stop))]
    columns, counts = padded(lists, NOWHERE)
    num_runs = len(bounds) - 1
    return Runs(columns.reshape(num_runs, 3, -1), counts.reshape(num_runs, 3), tuple(bounds), window)


@pytest.mark.parametrize("window", [1, 5, 64, 400])
@pytest.mark.parametrize("bounds", [[0, 1], [0, 64, 128, 200], [70, 128, 256, 300], [5, 6, 7]])
def test_runs_follow_their_definition(bounds: list[int], window: int) -> None:
    runs, stop = random_runs(bounds, window, seed=0), bounds[-1]
    for s in range(3):
        mask = runs.mask(s, bounds[0], stop, stop)
        for run, (low, high) in enumerate(pairwise(bounds)):
            own = set(runs.columns[run, s, : runs.column_counts[run, s]].tolist())
            for q in range(low, high):
                seen = {key for key in own | set(range(q - window + 1, q + 1)) if 0 <= key <= q}
                assert set(mask[q - bounds[0]].nonzero()[:, 0].tolist()) == seen
    for start, end in ((bounds[0], stop), (bounds[0], bounds[0] + 1), (stop - 1, stop), (bounds[0] + 1, stop)):
        if start < end:
            masks = [runs.mask(s, start, end, stop).sum() for s in range(3)]
            assert runs.pairs(start, end, stop).tolist() == [float(one) for one in masks]
    with pytest.raises(ValueError, match="after the last"):
        runs.pairs(bounds[0], stop, stop - 1)
