"""Random selections for the tests of the range kernels, and what a row takes of a prepared one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from longbatch_kernels.range_index import RangeIndex

NOWHERE = 2**31 - 1


class Lists(NamedTuple):
    """What `range_attention` takes for a list of selections."""

    starts: Tensor
    stops: Tensor
    counts: Tensor
    columns: Tensor
    column_counts: Tensor
    windows: Tensor


def random_lists(num_selections: int, num_keys: int, seed: int, device: str = "cpu") -> Lists:
    """Selections of every kind in turn: ranges and columns, ranges alone, a window with sinks, columns alone, nothing,
    dense, one key per row."""
    rng = np.random.default_rng([seed, num_keys])
    ranges, columns, windows = [], [], []
    for s in range(num_selections):
        kind = (s + seed) % 7
        found: list[tuple[int, int]] = []
        if kind in (0, 1):
            low = int(rng.integers(0, 3)) * int(rng.integers(0, 100))
            while low < num_keys and len(found) < 6:
                high = min(low + int(rng.integers(0, 200)) * int(rng.integers(0, 2)), num_keys - 1)
                found.append((low, high))
                low = high + 65 + int(rng.integers(0, max(1, num_keys // 3)))
        ranges.append(found)
        columns.append(
            np.sort(rng.choice(num_keys, int(rng.integers(1, min(num_keys, 300) + 1)), replace=False))
            if kind in (0, 2, 3)
            else np.zeros(1, dtype=np.int64)
            if kind == 6
            else np.zeros(0, dtype=np.int64)
        )
        windows.append(NOWHERE if kind == 5 else int(rng.integers(1, 150)) if kind == 2 else 0)
    most, widest = max(map(len, ranges)), max(map(len, columns))
    starts = np.ones((num_selections, most), dtype=np.int32)
    stops = np.zeros((num_selections, most), dtype=np.int32)
    padded = np.full((num_selections, widest), NOWHERE, dtype=np.int32)
    for s in range(num_selections):
        for r, (low, high) in enumerate(ranges[s]):
            starts[s, r], stops[s, r] = low, high
        padded[s, : len(columns[s])] = columns[s]
    numbers = (starts, stops, [len(r) for r in ranges], padded, [len(c) for c in columns], windows)
    return Lists(*(torch.as_tensor(np.asarray(x, dtype=np.int32), device=device) for x in numbers))


def taken(index: RangeIndex, record: Tensor, row: int, which: int, num_keys: int) -> Tensor:
    """How often a row takes each key when it walks the stream of a record as the kernels do: int32 [keys]."""
    counts = torch.zeros(num_keys, dtype=torch.int32)
    s, end, window = int(record[9]), int(record[2]), int(record[20])
    reach = window if window > 0 else 2**31 - 1
    for kind in range(4):
        if (kind, which) in ((2, 1), (3, 0)):
            continue
        words = index.runs[s, int(record[10 + kind]) :][: 8 * int(record[14 + kind])]
        begin = end - words[:, 0].long()
        bits = words[:, 1] >> (16 * which)
        last = torch.arange(len(words)) // 8 == int(record[14 + kind]) - 1
        masked = last & bool(record[21] >> kind & 1) if kind else torch.ones_like(last)
        key = begin.clamp(0, max(num_keys - 16, 0))[:, None] + torch.arange(16)
        seen = (bits[:, None] >> (key - begin[:, None]).clamp(0, 31)) & 1 > 0
        seen &= (key >= begin[:, None]) & (key < begin[:, None] + 16)
        seen &= (key <= row) & (row - key < reach)
        key = key[seen | ~masked[:, None]]
        counts.index_add_(0, key, torch.ones(len(key), dtype=torch.int32))
    if not int(record[18]):
        return counts
    place = torch.arange(int(record[18]) * 128)
    block = int(record[19]) + which * index.paired
    seen = index.columns.bits[block][place // 32] >> (place % 32) & 1 > 0
    column = index.columns.places[s, : len(place)].long()
    clean = index.columns.clean[block].repeat_interleave(128)[: len(place)]
    seen = (seen & ((row - column >= window) | (clean > 0))) | (clean == 2)
    return counts.index_add_(0, column[seen], torch.ones(int(seen.sum()), dtype=torch.int32))
