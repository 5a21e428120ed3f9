"""Block-sparse against a slow transcription of MInference's block index, and of the rule by mass."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from longbatch.attention.patterns import select_tile, summarize_keys, tile_pattern
from longbatch.attention.selection import Blocks
from longbatch.sparsity import PatternSpec

GROUPS = (1, 3, 4, 7, 8)
SCALE = 0.3


def inputs(num_queries: int, num_keys: int, group: int, num_kv: int = 2, dim: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_keys * 17 + group)
    k = torch.randn(num_keys, num_kv, dim, generator=generator, dtype=torch.float64) * 3
    q = torch.randn(num_queries, num_kv * group, dim, generator=generator, dtype=torch.float64) * 3
    return q, k


def means(x: Tensor, first: int, block: int) -> dict[int, Tensor]:
    """Mean of each block over the rows there are, by block number; x is one head, its row 0 at position `first`."""
    found: dict[int, list[Tensor]] = {}
    for place, row in enumerate(x):
        found.setdefault((first + place) // block, []).append(row)
    return {number: sum(rows) / len(rows) for number, rows in found.items()}


def chosen_by_scores(scores: list[float], own: int, top_k: int) -> list[int]:
    """The own block, then the highest scores of the blocks before it."""
    before = sorted(range(own), key=lambda key: -scores[key])
    return sorted([own, *before[: top_k - 1]])


def chosen_by_mass(shares: list[float], own: int, top_k: int, mass: float) -> list[int]:
    kept, held = [own], shares[own]
    for key in sorted(range(own), key=lambda key: -shares[key]):
        if held >= mass or len(kept) == top_k:
            break
        kept.append(key)
        held += shares[key]
    return sorted(kept)


def softmax(scores: list[float]) -> list[float]:
    weights = [math.exp(score * SCALE) for score in scores]
    return [weight / sum(weights) for weight in weights]


def rows_of(blocks: Blocks, s: int) -> list[list[int]]:
    """The lists of a selection, whose unused places must hold -1."""
    found = []
    for indices, count in zip(blocks.indices[s].tolist(), blocks.counts[s].tolist(), strict=True):
        assert indices[count:] == [-1] * (len(indices) - count)
        found.append(indices[:count])
    return found


def select(q: Tensor, k: Tensor, specs: list[PatternSpec], *, shared: bool, q_offset: int) -> Blocks:
    (found,) = select_tile(q, k, specs, shared=shared, scale=SCALE, q_offset=q_offset)
    assert found.selections == tuple(range(len(specs)))
    return found.selected


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize("offset", [0, 64, 100])
def test_the_same_blocks_as_the_rule(group: int, shared: bool, offset: int) -> None:
    """Each selection with its own budget, by count and by mass, in one call; a tile may begin inside a block."""
    num_keys, block = 409, 64
    q, k = inputs(num_keys - offset, num_keys, group)
    specs = [
        PatternSpec.make("block_sparse", top_k=1 + i % 5, mass=0.0 if i % 3 else 0.3 + 0.04 * i)
        for i in range(2 if shared else 2 * group)
    ]
    blocks = select(q, k, specs, shared=shared, q_offset=offset)
    assert (blocks.block_rows, blocks.block_keys, blocks.first_row) == (block, block, offset // block * block)
    for s, spec in enumerate(specs):
        heads = range(s * group, (s + 1) * group) if shared else [s]
        wanted = []
        for own in range(offset // block, -(-num_keys // block)):
            scores = []
            for head in heads:
                query = means(q[:, head], offset, block)[own]
                keys = means(k[:, head // group], 0, block)
                scores.append([float(query @ keys[key]) for key in range(own + 1)])
            shares = [sum(column) / len(heads) for column in zip(*map(softmax, scores), strict=True)]
            if spec["mass"]:
                wanted.append(chosen_by_mass(shares, own, spec.count("top_k"), spec["mass"]))
            else:
                wanted.append(chosen_by_scores(shares if shared else scores[0], own, spec.count("top_k")))
        assert rows_of(blocks, s) == wanted


@pytest.mark.parametrize("num_keys", [1, 63, 64, 65, 191, 320])
@pytest.mark.parametrize("top_k", [1, 2, 100])
def test_minferences_zero_padding_picks_the_same(num_keys: int, top_k: int) -> None:
    """Upstream pads with zeros before it pools; only the last block's mean differs, which no other row sees."""
    q, k = inputs(num_keys, num_keys, 1, num_kv=1)
    blocks = select(q, k, [PatternSpec.make("block_sparse", top_k=top_k)], shared=False, q_offset=0)
    pad = (64 - num_keys % 64) % 64
    pooled = [torch.nn.functional.pad(x[:, 0], (0, 0, 0, pad)).unflatten(0, (-1, 64)).mean(1) for x in (q, k)]
    scores = pooled[0] @ pooled[1].T
    for own, found in enumerate(rows_of(blocks, 0)):
        assert found == chosen_by_scores(scores[own].tolist(), own, top_k)


@pytest.mark.parametrize("mass", [0.01, 0.5, 0.9, 1.0])
def test_mass_is_reached_and_not_exceeded_by_a_whole_block(mass: float) -> None:
    q, k = inputs(500, 500, 1, num_kv=1)
    blocks = select(q, k, [PatternSpec.make("block_sparse", top_k=1 << 20, mass=mass)], shared=False, q_offset=0)
    keys = means(k[:, 0], 0, 64)
    for own, found in enumerate(rows_of(blocks, 0)):
        query = means(q[:, 0], 0, 64)[own]
        shares = softmax([float(query @ keys[key]) for key in range(own + 1)])
        held = sum(shares[key] for key in found)
        assert own in found
        assert held >= mass - 1e-9
        others = [shares[key] for key in found if key != own]
        assert not others or held - min(others) < mass


def test_blocks_far_behind_in_score_are_still_in_order() -> None:
    """Shares that underflow to 0 are told apart by their scores."""
    k = torch.zeros(64 * 6, 1, 1, dtype=torch.float32)
    k[:, 0, 0] = torch.tensor([5000.0, 1000.0, 3000.0, 2000.0, 4000.0, 9000.0]).repeat_interleave(64)
    q = torch.ones(64 * 6, 1, 1)
    blocks = select(q, k, [PatternSpec.make("block_sparse", top_k=3)], shared=False, q_offset=0)
    assert rows_of(blocks, 0)[5] == [0, 4, 5]
    blocks = select(q, k, [PatternSpec.make("block_sparse", top_k=4)], shared=True, q_offset=0)
    assert rows_of(blocks, 0)[5] == [0, 2, 4, 5]


def test_a_summary_of_the_keys_changes_nothing() -> None:
    q, k = inputs(70, 300, 2)
    specs = [PatternSpec.make("block_sparse", top_k=2), PatternSpec.make("block_sparse", top_k=2, block=128)] * 2
    summaries = summarize_keys(k, specs)
    assert [None if summary is None else summary.shape for summary in summaries] == [(5, 2, 8), (3, 2, 8)]
    arguments = {"shared": False, "scale": SCALE, "q_offset": 230}
    with_summary = select_tile(q, k, specs, summaries=summaries, **arguments)
    without = select_tile(q, k, specs, **arguments)
    assert [one.selections for one in without] == [(0, 2), (1, 3)]
    for one, other in zip(with_summary, without, strict=True):
        assert torch.equal(one.selected.indices, other.selected.indices)
        assert torch.equal(one.selected.counts, other.selected.counts)


@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize("selections", [[0], [5], [2, 3], [4, 1], [5, 0, 3]])
@pytest.mark.parametrize("name", ["block_sparse", "antidiagonal", "strided"])
def test_some_selections_alone_are_as_among_all(name: str, shared: bool, selections: list[int]) -> None:
    q, k = inputs(130, 400, 2, num_kv=6 if shared else 3)
    parameters = {
        "block_sparse": {"top_k": 2},
        "antidiagonal": {"threshold": 0.7},
        "strided": {"stride": 2, "local": 1},
    }
    spec = PatternSpec.make(name, **parameters[name])
    arguments = {"shared": shared, "scale": SCALE, "q_offset": 270}
    pattern = tile_pattern(name)
    everything = pattern.select(q, k, [spec] * 6, **arguments)
    some = pattern.select(q, k, [spec] * len(selections), selections=selections, **arguments)
    for place, s in enumerate(selections):
        assert rows_of(some, place) == rows_of(everything, s)


def test_patterns_of_several_kinds_answer_apart() -> None:
    """A layer of all patterns of this kind: selections with like blocks together, each as it is alone."""
    q, k = inputs(200, 500, 3, num_kv=2)
    specs = [
        PatternSpec.make("strided", stride=2, local=1),
        PatternSpec.make("antidiagonal", stride=8, threshold=0.6),
        PatternSpec.make("block_sparse", top_k=3),
        PatternSpec.make("antidiagonal", stride=16, threshold=0.6),
        PatternSpec.make("antidiagonal", stride=8, threshold=0.9),
        PatternSpec.make("strided", stride=3, local=2),
    ]
    arguments = {"shared": False, "scale": SCALE, "q_offset": 300}
    found = select_tile(q, k, specs, **arguments)
    assert [one.selections for one in found] == [(0, 5), (1, 4), (3,), (2,)]
    for one in found:
        for place, s in enumerate(one.selections):
            (alone,) = select_tile(q, k, [specs[s]], selections=[s], **arguments)
            assert alone.selections == (s,)
            assert rows_of(alone.selected, 0) == rows_of(one.selected, place)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
def test_the_device_is_not_waited_for(shared: bool) -> None:
    q, k = (x.to("cuda", torch.bfloat16) for x in inputs(1000, 3000, 4, dim=64))
    patterns = [
        PatternSpec.make("block_sparse", top_k=5),
        PatternSpec.make("block_sparse", top_k=20, mass=0.5),
        PatternSpec.make("antidiagonal", threshold=0.7),
        PatternSpec.make("strided"),
    ]
    specs = [patterns[i % 4] for i in range(2 if shared else 8)]
    arguments = {"shared": shared, "scale": 0.125, "q_offset": 2000}
    select_tile(q, k, specs, **arguments)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = select_tile(q, k, specs, **arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = select_tile(q.cpu().float(), k.cpu().float(), specs, **arguments)
    for one, want in zip(found, wanted, strict=True):
        assert one.selections == want.selections
        # Two roundings of the same scores may swap the last block of a list.
        pairs = one.selected.pairs(2000, 3000, 3000).cpu()
        assert torch.allclose(pairs, want.selected.pairs(2000, 3000, 3000), rtol=0.05)
