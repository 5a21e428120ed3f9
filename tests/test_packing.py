"""Packing: where rows are cut, which tokens are kept, and where each segment finds its earlier keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longbatch.cache.writes import slots_of
from longbatch.engine.packing import Branch, Family, PackedStep, pack

CPU = torch.device("cpu")


def ids(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100, length).astype(np.int32)


def table(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def alone(owner: str, length: int, pages: np.ndarray | None = None, reads: object = None) -> Family[str]:
    wanted = ((length - 1, length),) if reads is None else reads
    return Family([Branch(owner, ids(length), wanted, length, pages)])  # type: ignore[arg-type]


def steps(families: list[Family[str]], step_tokens: int, tile_rows: int) -> list[PackedStep[str]]:
    return list(pack(families, step_tokens=step_tokens, tile_rows=tile_rows, device=CPU))


def spans(packed: PackedStep[str]) -> list[tuple[int, int]]:
    return [(segment.offset, segment.stop) for segment in packed.step.segments]


def test_rows_share_a_step_without_padding() -> None:
    (packed,) = steps([alone("a", 5), alone("b", 1), alone("c", 9)], 15, 4)
    step = packed.step
    assert [segment.base for segment in step.segments] == [0, 5, 6]
    assert step.ids.tolist() == [*ids(5), *ids(1), *ids(9)]
    assert step.positions.tolist() == [*range(5), 0, *range(9)]
    assert step.rope_lengths.tolist() == [5] * 5 + [1] + [9] * 9
    assert step.writes is None
    assert [(branch.owner, start, stop) for branch, start, stop in packed.reads] == [
        ("a", 4, 5),
        ("b", 0, 1),
        ("c", 8, 9),
    ]


@pytest.mark.parametrize(("step_tokens", "tile_rows"), [(64, 64), (100, 32), (128, 48), (7, 16), (130, 64)])
def test_chunks_are_cut_at_tile_boundaries(step_tokens: int, tile_rows: int) -> None:
    pages = table(0, 5)
    found = steps([alone("a", 300, pages)], step_tokens, tile_rows)
    assert len(found) > 1
    at = 0
    for packed in found:
        ((start, stop),) = spans(packed)
        assert start == at
        assert stop - start <= max(step_tokens, tile_rows)
        assert stop == 300 or stop % tile_rows == 0
        assert packed.step.writes is not None
        assert packed.step.writes.slots.tolist() == slots_of(pages, start, stop).tolist()
        (segment,) = packed.step.segments
        assert [(e.start, e.stop, e.base) for e in segment.context] == ([(0, start, None)] if start else [])
        at = stop
    assert at == 300
    assert [read for packed in found for read in packed.reads] == [(found[-1].reads[0][0], 299, 300)]


def test_a_row_that_starts_in_a_filled_step_is_cut_at_its_own_tile() -> None:
    found = steps([alone("a", 40, table(0, 1)), alone("b", 200, table(1, 4))], 128, 32)
    assert [spans(packed) for packed in found] == [[(0, 40), (0, 64)], [(64, 192)], [(192, 200)]]


def test_no_room_for_a_whole_tile_starts_the_next_step() -> None:
    found = steps([alone("a", 120, table(0, 2)), alone("b", 60, table(2, 1))], 128, 32)
    assert [spans(packed) for packed in found] == [[(0, 120)], [(0, 60)]]


def test_a_last_token_alone() -> None:
    found = steps([alone("a", 129, table(0, 3), reads=((127, 129),))], 64, 64)
    assert [spans(packed) for packed in found] == [[(0, 64)], [(64, 128)], [(128, 129)]]
    assert [(start, stop) for packed in found for _, start, stop in packed.reads] == [(127, 128), (128, 129)]


def test_a_step_of_lone_tokens() -> None:
    (packed,) = steps([alone(name, 1) for name in "abc"], 16, 2)
    assert packed.step.positions.tolist() == [0, 0, 0]
    assert [tile.num_rows for tile in packed.step.tiles] == [2, 1]


def test_branches_see_the_trunk_in_their_own_step() -> None:
    family = Family([Branch("x", ids(3), ((66, 67),), 67), Branch("y", ids(5), ((68, 69),), 69)], ids(64))
    (packed,) = steps([alone("a", 10), family], 1000, 16)
    trunk, x, y = packed.step.segments[1:]
    assert trunk.reads == ()
    assert trunk.rope_length == 69
    for segment in (x, y):
        assert segment.offset == 64
        assert [(e.start, e.stop, e.base) for e in segment.context] == [(0, 64, trunk.base)]


def test_branches_see_a_trunk_of_earlier_steps() -> None:
    shared = table(0, 3)
    branches = [
        Branch(name, ids(56), ((247, 248),), 248, np.concatenate([shared, table(at, 1)]))
        for name, at in (("x", 3), ("y", 4), ("z", 5))
    ]
    found = steps([Family(branches, ids(192), shared)], 96, 32)
    assert [spans(packed) for packed in found] == [
        [(0, 96)],
        [(96, 192)],
        [(192, 248), (192, 224)],
        [(224, 248), (192, 248)],
    ]
    for segment in found[2].step.segments:
        assert [(e.start, e.stop, e.base) for e in segment.context] == [(0, 192, None)]
    rest, _ = found[3].step.segments
    assert [(e.start, e.stop) for e in rest.context] == [(0, 192), (192, 224)]
    assert rest.context[0].pages is shared
    assert rest.context[1].pages is branches[1].pages


def test_a_trunk_cut_in_the_step_of_its_branches() -> None:
    shared = table(0, 1)
    branch = Branch("x", ids(10), ((73, 74),), 74, np.concatenate([shared, table(1, 1)]))
    found = steps([alone("a", 50, table(2, 1)), Family([branch], ids(64), shared)], 96, 32)
    assert [spans(packed) for packed in found] == [[(0, 50), (0, 32)], [(32, 64), (64, 74)]]
    trunk, tail = found[1].step.segments
    assert [(e.start, e.stop, e.base) for e in tail.context] == [(0, 32, None), (32, 64, trunk.base)]


def test_only_the_rows_with_pages_are_kept() -> None:
    families = [alone("a", 5), alone("b", 7, table(3, 1)), alone("c", 2), alone("d", 4, table(1, 1))]
    (packed,) = steps(families, 100, 100)
    writes = packed.step.writes
    assert writes is not None
    assert writes.rows is not None
    assert writes.rows.tolist() == [*range(5, 12), *range(14, 18)]
    assert writes.slots.tolist() == [*range(192, 199), *range(64, 68)]


def test_all_rows_are_kept_without_an_index() -> None:
    (packed,) = steps([alone("a", 5, table(0, 1)), alone("b", 7, table(3, 1))], 100, 100)
    assert packed.step.writes is not None
    assert packed.step.writes.rows is None


def test_whole_pages_and_open_blocks() -> None:
    """Of what follows its last whole page, only a row with an open block keeps anything."""
    rows = [
        Branch(name, ids(n), ((n - 1, n),), n, table(at, 3), open_block=o)
        for name, n, at, o in (("a", 150, 0, 2), ("b", 64, 3, 0), ("c", 70, 6, None), ("d", 9, 9, 1))
    ]
    families = [Family([branch]) for branch in rows]
    (packed,) = pack(families, step_tokens=1000, tile_rows=100, device=CPU, whole_pages=True)
    writes = packed.step.writes
    assert writes is not None
    assert writes.blocks is not None
    assert writes.rows is not None
    assert writes.blocks.rows.tolist() == [0, 64, 150, 214]
    assert writes.blocks.pages.tolist() == [0, 1, 3, 6]
    assert writes.rows.tolist() == [*range(128, 150), *range(284, 293)]
    assert writes.slots.tolist() == [*range(128, 150), *range(64, 73)]
    assert writes.filled is None


@pytest.mark.parametrize(("step_tokens", "tile_rows"), [(64, 64), (100, 32), (128, 48), (7, 16), (130, 64)])
def test_chunks_of_whole_pages_end_at_tiles_and_pages(step_tokens: int, tile_rows: int) -> None:
    family = Family([Branch("a", ids(500), ((499, 500),), 500, table(0, 8), open_block=0)])
    found = list(pack([family], step_tokens=step_tokens, tile_rows=tile_rows, device=CPU, whole_pages=True))
    stops = [spans(packed)[0][1] for packed in found]
    assert len(stops) > 1
    assert stops[-1] == 500
    assert all(stop % tile_rows == stop % 64 == 0 for stop in stops[:-1])
    pages = [page for packed in found for page in packed.step.writes.blocks.pages.tolist()]  # type: ignore[union-attr]
    assert pages == [*range(7)]


def test_a_chunk_inside_a_page_is_refused_where_only_whole_pages_are_stored() -> None:
    family = alone("a", 200, table(0, 4))
    with pytest.raises(ValueError, match="page boundary"):
        list(pack([family], step_tokens=1000, tile_rows=64, device=CPU, start=100, whole_pages=True))


def test_several_steps_need_pages() -> None:
    with pytest.raises(ValueError, match="pages for every token"):
        steps([alone("a", 50, table(0, 1)), alone("b", 60)], 100, 10)


def test_a_trunk_ends_at_a_page() -> None:
    with pytest.raises(ValueError, match="page boundary"):
        Family([Branch("x", ids(3), (), 68)], ids(65))
