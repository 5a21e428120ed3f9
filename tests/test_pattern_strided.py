"""Strided against its definition."""

from __future__ import annotations

import pytest
import torch

from longbatch.attention.patterns import select_tile
from longbatch.sparsity import PatternSpec


@pytest.mark.parametrize(
    ("offset", "num_keys"), [(0, 1), (0, 64), (0, 65), (0, 1000), (640, 1000), (700, 1000), (999, 1000)]
)
@pytest.mark.parametrize("block", [64, 128])
def test_local_blocks_and_each_stride_th_before(offset: int, num_keys: int, block: int) -> None:
    sizes = [(1, 1), (3, 1), (4, 2), (2, 5), (100, 3), (5, 100)]
    specs = [PatternSpec.make("strided", stride=stride, local=local, block=block) for stride, local in sizes]
    q, k = torch.empty(num_keys - offset, 6, 8), torch.empty(num_keys, 6, 8)
    (answer,) = select_tile(q, k, specs, shared=True, scale=1.0, q_offset=offset)
    blocks = answer.selected
    assert (blocks.block_rows, blocks.block_keys, blocks.first_row) == (block, block, offset // block * block)
    for s, (stride, local) in enumerate(sizes):
        for row, own in enumerate(range(offset // block, (num_keys - 1) // block + 1)):
            wanted = [key for key in range(own + 1) if own - key < local or (own - key) % stride == 0]
            count = int(blocks.counts[s, row])
            assert blocks.indices[s, row, :count].tolist() == wanted
            assert (blocks.indices[s, row, count:] == -1).all()


def test_lists_are_no_wider_than_they_must_be() -> None:
    specs = [PatternSpec.make("strided", stride=10, local=4)]
    (answer,) = select_tile(
        torch.empty(64, 1, 8), torch.empty(64 * 100, 1, 8), specs, shared=False, scale=1.0, q_offset=64 * 99
    )
    assert int(answer.selected.counts.max()) == 13
    assert answer.selected.indices.shape[-1] <= 14
