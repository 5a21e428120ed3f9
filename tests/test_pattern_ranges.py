"""Patterns of which positions alone decide: dense, A-shape, tri-shape; and layers whose heads have several."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from longbatch.attention.patterns import last_queries, ranges_pattern, select_ranges
from longbatch.attention.selection import Ranges
from longbatch.sparsity import PatternSpec

LENGTHS = (1, 63, 64, 65, 129, 300)
make = PatternSpec.make


def select(
    specs: list[PatternSpec], num_keys: int, rows: tuple[int, int], *, shared: bool = False
) -> tuple[Ranges, ...]:
    """As a layer with one key head calls it: no pattern here looks at queries."""
    return select_ranges(
        torch.empty(0, len(specs), 8),
        torch.empty(num_keys, 1, 8),
        specs,
        shared=shared,
        scale=1.0,
        q_offset=rows[1],
        rows=rows,
    )


def mask_of(found: tuple[Ranges, ...], s: int, rows: tuple[int, int], num_keys: int) -> Tensor:
    """The intervals' masks below one another; they must cover the rows in order."""
    assert [row for one in found for row in one.rows][1:-1:2] == [one.rows[1] for one in found][:-1]
    assert (found[0].rows[0], found[-1].rows[1]) == rows
    return torch.cat([one.mask(s, *one.rows, num_keys) for one in found])


def wanted(sees: Callable[[int, int], bool], rows: tuple[int, int], num_keys: int) -> Tensor:
    return torch.tensor([[key <= q and sees(q, key) for key in range(num_keys)] for q in range(*rows)])


@pytest.mark.parametrize("num_keys", LENGTHS)
@pytest.mark.parametrize("chunk", [False, True], ids=["whole", "chunk"])
def test_positions_decide(num_keys: int, chunk: bool) -> None:
    rows = (num_keys // 2 if chunk else 0, num_keys)
    specs = [
        make("dense"),
        make("a_shape", sinks=3, window=40),
        make("a_shape", sinks=0, window=1),
        make("tri_shape", sinks=2, window=5, last=70),
        make("tri_shape", sinks=400, window=5, last=0),
        make("tri_shape", sinks=0, window=7, last=33),
    ]
    rules: list[Callable[[int, int], bool]] = [
        lambda q, key: True,
        lambda q, key: key < 3 or q - key < 40,
        lambda q, key: q == key,
        lambda q, key: key < 2 or q - key < 5 or q >= num_keys - 70,
        lambda q, key: True,
        lambda q, key: q - key < 7 or q >= num_keys - 33,
    ]
    found = select(specs, num_keys, rows)
    for s, rule in enumerate(rules):
        assert torch.equal(mask_of(found, s, rows, num_keys), wanted(rule, rows, num_keys)), specs[s]


def test_tri_shape_has_one_interval_where_one_will_do() -> None:
    (dense,) = select([make("tri_shape", last=100)], 80, (0, 80))
    assert torch.equal(dense.mask(0, 0, 80, 80), torch.ones(80, 80, dtype=torch.bool).tril())
    assert [one.rows for one in select([make("tri_shape", last=100), make("tri_shape", last=30)], 500, (0, 500))] == [
        (0, 400),
        (400, 470),
        (470, 500),
    ]
    assert [one.rows for one in select([make("a_shape"), make("dense")], 500, (64, 500))] == [(64, 500)]


def test_what_the_patterns_ask_of_the_queries() -> None:
    positions = [make(name) for name in ("dense", "a_shape", "tri_shape")]
    assert last_queries(positions) == 0
    assert last_queries([*positions, make("vertical_slash")]) == 64
    assert last_queries([make("antidiagonal"), make("strided")]) == 0
    assert ranges_pattern("a_shape") is ranges_pattern("a_shape")


@pytest.mark.parametrize("num_keys", [65, 300])
@pytest.mark.parametrize("shared", [False, True])
def test_a_mixed_layer_gives_each_head_its_own_pattern(num_keys: int, shared: bool) -> None:
    """Heads of five patterns in one call select as they do alone."""
    torch.manual_seed(num_keys)
    rows = (num_keys - 65, num_keys)
    specs = [
        make("vertical_slash", vertical=31, slash=55),
        make("tri_shape", sinks=1, window=4, last=10),
        make("dense"),
        make("vertical_slash", vertical=40, slash=110),
        make("a_shape", sinks=2, window=9),
        make("tri_shape", sinks=1, window=4, last=10),
    ]
    q = torch.randn(64, 12 if shared else 6, 8, dtype=torch.float64)
    k = torch.randn(num_keys, 6 if shared else 3, 8, dtype=torch.float64)
    arguments = {"shared": shared, "scale": 0.5, "q_offset": num_keys - 64, "rows": rows}
    found = select_ranges(q, k, specs, **arguments)
    assert [one.rows for one in found] == [(rows[0], num_keys - 10), (num_keys - 10, num_keys)]
    for s, spec in enumerate(specs):
        alone = select_ranges(q, k, [spec], selections=[s], **arguments)
        assert torch.equal(mask_of(found, s, rows, num_keys), mask_of(alone, 0, rows, num_keys)), spec
