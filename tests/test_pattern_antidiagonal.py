"""Antidiagonal against a slow transcription of XAttention's scores and block search."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from longbatch.attention.patterns import select_tile
from longbatch.attention.selection import Blocks
from longbatch.sparsity import PatternSpec

GROUPS = (1, 3, 4, 7, 8)
SCALE = 0.35


def inputs(num_queries: int, num_keys: int, group: int, num_kv: int = 2, dim: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_keys * 29 + group)
    k = torch.randn(num_keys, num_kv, dim, generator=generator, dtype=torch.float64) * 4
    q = torch.randn(num_queries, num_kv * group, dim, generator=generator, dtype=torch.float64) * 4
    return q, k


def block_sums(q: Tensor, k: Tensor, offset: int, stride: int, block: int) -> dict[int, list[float]]:
    """XAttention's sums of one head by query block: groups of `stride` tokens, padded with zeros where none are."""
    num_keys = len(k)
    zero = torch.zeros_like(k[0])

    def query(position: int) -> Tensor:
        return q[position - offset] if offset <= position < num_keys else zero

    def key(position: int) -> Tensor:
        return k[position] if position < num_keys else zero

    sums: dict[int, list[float]] = {}
    num_blocks = -(-num_keys // block)
    for a in range(offset // stride, -(-num_keys // stride)):
        flat_query = torch.cat([query(a * stride + stride - 1 - i) for i in range(stride)])
        scores = [
            float(flat_query @ torch.cat([key(b * stride + i) for i in range(stride)])) * SCALE / stride
            for b in range(a + 1)
        ]
        top = max(scores)
        weights = [math.exp(score - top) for score in scores]
        row = sums.setdefault(a * stride // block, [0.0] * num_blocks)
        for b, weight in enumerate(weights):
            row[b * stride // block] += weight / sum(weights)
    return sums


def found_blocks(sums: list[float], own: int, threshold: float) -> list[int]:
    """`find_blocks_chunked`: block 0 and the own one, then by size while what is kept is less than required."""
    kept = {0, own}
    held, required = sum(sums[block] for block in kept), threshold * sum(sums)
    for block in sorted(set(range(own)) - kept, key=lambda block: -sums[block]):
        if not held < required:
            break
        kept.add(block)
        held += sums[block]
    return sorted(kept)


def rows_of(blocks: Blocks, s: int) -> list[list[int]]:
    found = []
    for indices, count in zip(blocks.indices[s].tolist(), blocks.counts[s].tolist(), strict=True):
        assert indices[count:] == [-1] * (len(indices) - count)
        found.append(indices[:count])
    return found


def check(
    q: Tensor, k: Tensor, specs: list[PatternSpec], *, shared: bool, offset: int, stride: int, block: int
) -> None:
    (answer,) = select_tile(q, k, specs, shared=shared, scale=SCALE, q_offset=offset)
    blocks = answer.selected
    assert (blocks.block_rows, blocks.block_keys, blocks.first_row) == (block, block, offset // block * block)
    group = q.shape[1] // k.shape[1]
    sums = [block_sums(q[:, h], k[:, h // group], offset, stride, block) for h in range(q.shape[1])]
    for s, spec in enumerate(specs):
        heads = range(s * group, (s + 1) * group) if shared else [s]
        wanted = [
            found_blocks([sum(x) for x in zip(*(sums[h][own] for h in heads), strict=True)], own, spec["threshold"])
            for own in sorted(sums[0])
        ]
        assert rows_of(blocks, s) == wanted


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
def test_the_same_blocks_as_the_rule(group: int, shared: bool) -> None:
    """Each selection with its own threshold, in one call."""
    num_keys = 64 * 5 + 37
    q, k = inputs(num_keys, num_keys, group)
    num_selections = 2 if shared else 2 * group
    specs = [
        PatternSpec.make("antidiagonal", stride=16, block=64, threshold=round(0.4 + 0.5 * i / num_selections, 3))
        for i in range(num_selections)
    ]
    check(q, k, specs, shared=shared, offset=0, stride=16, block=64)


@pytest.mark.parametrize("num_keys", [1, 7, 8, 127, 128, 129, 300])
@pytest.mark.parametrize(("stride", "block"), [(8, 128), (4, 64), (64, 64)])
def test_odd_lengths_and_other_sizes(num_keys: int, stride: int, block: int) -> None:
    q, k = inputs(num_keys, num_keys, 1, num_kv=1)
    specs = [PatternSpec.make("antidiagonal", stride=stride, block=block, threshold=0.6)]
    check(q, k, specs, shared=False, offset=0, stride=stride, block=block)


@pytest.mark.parametrize("offset", [64, 100, 133, 299])
def test_a_tile_anywhere(offset: int) -> None:
    """A tile that begins inside a group or a block is judged by the queries that it has."""
    q, k = inputs(300 - offset, 300, 2)
    specs = [PatternSpec.make("antidiagonal", stride=8, block=64, threshold=0.7)] * 4
    check(q, k, specs, shared=False, offset=offset, stride=8, block=64)


def test_tiles_of_whole_blocks_select_as_one() -> None:
    q, k = inputs(500, 500, 2)
    specs = [PatternSpec.make("antidiagonal", block=64, threshold=0.7)] * 4
    (whole,) = select_tile(q, k, specs, shared=False, scale=SCALE, q_offset=0)
    low = 0
    for stop in (128, 192, 500):
        (part,) = select_tile(q[low:stop], k[:stop], specs, shared=False, scale=SCALE, q_offset=low)
        for s in range(4):
            assert rows_of(part.selected, s) == rows_of(whole.selected, s)[low // 64 : -(-stop // 64)]
        low = stop


@pytest.mark.parametrize(("threshold", "most"), [(0.0, 2), (1.0, 8)])
def test_the_ends_of_the_scale(threshold: float, most: int) -> None:
    """0 keeps the forced blocks alone, 1 keeps all that hold anything."""
    q, k = inputs(500, 500, 1, num_kv=1)
    specs = [PatternSpec.make("antidiagonal", block=64, threshold=threshold)]
    (answer,) = select_tile(q / 10, k / 10, specs, shared=False, scale=SCALE, q_offset=0)
    for own, found in enumerate(rows_of(answer.selected, 0)):
        assert found == sorted({0, own}) if most == 2 else found == list(range(own + 1))
