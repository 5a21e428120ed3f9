"""Every block of rows takes every key of its selection exactly once, in the single and in the paired stream."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from longbatch_kernels.range_attention import _bounds, prepare
from longbatch_kernels.range_index import PackedPrompt, build_index, on_device, records
from range_lists import Lists, random_lists, taken
from torch import Tensor

NUM_SELECTIONS = 7


def wanted(lists: Lists, s: int, rows: Tensor, num_keys: int) -> Tensor:
    """By the definition: int32 [rows, keys]."""
    key, row = torch.arange(num_keys)[None], rows[:, None]
    end = (row // 64 + 1) * 64
    seen = row - key < lists.windows[s]
    for a, c in zip(lists.starts[s, : lists.counts[s]], lists.stops[s, : lists.counts[s]], strict=True):
        seen |= (key >= end - c - 64) & (key < end - a)
    seen |= torch.isin(key, lists.columns[s, : lists.column_counts[s]])
    return (seen & (key <= row)).int()


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(
    ("num_keys", "q_offset", "seed"),
    [(1, 0, 5), (130, 0, 0), (300, 0, 1), (777, 300, 2), (1025, 513, 3), (1500, 64, 0)],
)
def test_takes_every_key_once(num_keys: int, q_offset: int, seed: int, paired: bool) -> None:
    lists = random_lists(NUM_SELECTIONS, num_keys, seed)
    keys = torch.zeros(num_keys, 1, 16)
    prompt = PackedPrompt(0, num_keys - q_offset, q_offset, 0, num_keys)
    index = build_index(lists, keys, keys, [prompt], [(0, 0)] * NUM_SELECTIONS, paired=paired)
    jobs = on_device(tuple((0, 0, s) for s in range(NUM_SELECTIONS)), keys.device)
    rows_per_unit = 128 if paired else 64
    last = (num_keys - 1) // rows_per_unit
    count = last - q_offset // rows_per_unit + 1
    bounds = tuple((count, last, s * count, -q_offset, q_offset, num_keys, 1) for s in range(NUM_SELECTIONS))
    items = records(index, jobs, bounds)
    assert items.shape == (NUM_SELECTIONS * count, 24)
    rows = torch.arange(q_offset, num_keys)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:60]].sort().values
    for s in range(NUM_SELECTIONS):
        expected = wanted(lists, s, rows, num_keys)
        for place, row in enumerate(rows.tolist()):
            record = items[s * count + last - row // rows_per_unit]
            found = taken(index, record, row, row // 64 % 2 if paired else 0, num_keys)
            assert torch.equal(found, expected[place]), (s, row)


def test_prompts_get_their_own_records() -> None:
    lists = random_lists(4, 300, 0)
    keys = torch.zeros(500, 2, 16)
    prompts = [PackedPrompt(0, 200, 0, 0, 200), PackedPrompt(200, 170, 130, 200, 300)]
    prepared = prepare(lists, keys, keys, selections=[[0, 0, 1, 1], [2, 2, 3, 3]], prompts=prompts)
    assert prepared.heads_per_tile == 2
    items = records(prepared.index, prepared.jobs, _bounds(prepared, 370, None))
    # Two jobs over 4 blocks, two over blocks 2 to 4.
    assert items.shape[0] == 2 * 4 + 2 * 3
    assert items[:8, 7].eq(0).all()
    for place, value in ((4, 200 - 130), (5, 130), (6, 300), (7, 200)):
        assert items[8:, place].eq(value).all()
