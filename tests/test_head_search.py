"""Which candidates a head tries, in which order, and which wins."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from longbatch.engine.head_rule import LEAST_SAVING, Limited
from longbatch.engine.head_search import DENSE, HeadSearch, Pricing
from longbatch.models.spec import LayerSpec
from longbatch.plan.candidates import budget, candidates, covers, grid
from longbatch.plan.sparse_cost import density
from longbatch.plan.sparse_rates import REFERENCE
from longbatch.sparsity import PATTERNS, PatternSpec

LAYER = LayerSpec(8, 2, 64, None, 0.125)
A_SHAPE = PatternSpec.make("a_shape", sinks=16, window=64)


def spec_of(text: str) -> PatternSpec:
    return PatternSpec.parse(text)


# ------------------------------------------------------------------------------------------- candidates


def test_the_grid_holds_every_pattern_and_minferences_menu() -> None:
    found = list(grid())
    assert len(set(found)) == len(found)
    assert {spec.name for spec in found} == set(PATTERNS) - {"dense"}
    menu = [(30, 800), (100, 750), (500, 700), (3500, 100), (100, 800), (1000, 4096), (1000, 6096)]
    for vertical, slash in menu:
        assert PatternSpec.make("vertical_slash", vertical=vertical, slash=slash) in found
    assert spec_of("a_shape:sinks=100,window=800") in found
    assert spec_of("block_sparse:top_k=100") in found


def test_budgets_that_reach_the_longest_document_are_left_out() -> None:
    useful, num_left_out = candidates([500, 3000])
    assert num_left_out + len(useful) == len(list(grid()))
    assert num_left_out > 0
    assert all(budget(spec) < 3000 for spec in useful)
    assert spec_of("vertical_slash:vertical=30,slash=3200") not in useful
    assert spec_of("vertical_slash:vertical=2000,slash=2400") in useful
    assert all(density(spec, 3000) < 1 for spec in useful if budget(spec))
    assert candidates([1 << 20])[1] == 0


@pytest.mark.parametrize(
    ("larger", "smaller", "expected"),
    [
        ("vertical_slash:vertical=100,slash=800", "vertical_slash:vertical=30,slash=800", True),
        ("vertical_slash:vertical=100,slash=800", "vertical_slash:vertical=100,slash=800", True),
        ("vertical_slash:vertical=100,slash=800", "vertical_slash:vertical=30,slash=1000", False),
        ("a_shape:sinks=128,window=512", "a_shape:sinks=16,window=512", True),
        ("a_shape:sinks=128,window=512", "vertical_slash:vertical=30,slash=100", False),
        ("block_sparse:top_k=8", "block_sparse:top_k=4", True),
        ("block_sparse:top_k=8,block=128", "block_sparse:top_k=4", False),
        ("block_sparse:top_k=1000,mass=0.9", "block_sparse:top_k=100", False),
        ("block_sparse:top_k=100", "block_sparse:top_k=100,mass=0.9", False),
        ("block_sparse:top_k=100,mass=0.95", "block_sparse:top_k=100,mass=0.9", True),
        ("antidiagonal:stride=8,threshold=0.95", "antidiagonal:stride=8,threshold=0.9", True),
        ("antidiagonal:stride=8,threshold=0.95", "antidiagonal:stride=16,threshold=0.9", False),
        ("strided:stride=8,local=16", "strided:stride=8,local=4", True),
        ("strided:stride=4,local=16", "strided:stride=8,local=4", False),
        ("dense", "strided", True),
        ("strided", "dense", False),
    ],
)
def test_what_covers_what(larger: str, smaller: str, expected: bool) -> None:
    assert covers(spec_of(larger), spec_of(smaller)) is expected


# ---------------------------------------------------------------------------------------- order of trials

Error = Callable[[PatternSpec], float]


def by_budget(vertical: float, slash: float, window: float) -> Error:
    """Errors that fall with every budget; infinite for patterns that no head here can use."""

    def error(spec: PatternSpec) -> float:
        if spec.name == "vertical_slash":
            return vertical / spec["vertical"] + slash / spec["slash"]
        if spec.name in ("a_shape", "tri_shape"):
            return window / spec["window"] + 0.1 / (1 + spec["sinks"])
        return math.inf

    return error


def run_search(search: HeadSearch, error: Error, lengths: tuple[int, ...]) -> list[PatternSpec]:
    """Play a search whose densities are those predicted; the candidates tried."""
    tried = []
    while (spec := search.next()) is not None:
        assert spec == search.next()
        search.record(spec, [error(spec)], [density(spec, length) for length in lengths])
        tried.append(spec)
    return tried


@pytest.mark.parametrize(
    "error",
    [
        by_budget(1, 1, math.inf),
        by_budget(20, 3, math.inf),
        by_budget(2, 200, math.inf),
        by_budget(math.inf, 0, 30),
        by_budget(5, 5, 400),
        by_budget(math.inf, math.inf, math.inf),
        by_budget(0, 0, 0),
    ],
)
def test_the_cheapest_that_is_good_enough_is_found_in_few_trials(error: Error) -> None:
    lengths = (32768, 8192)
    pricing = Pricing(lengths, LAYER, REFERENCE, shared=False)
    useful, _ = candidates(lengths)
    search = HeadSearch(useful, pricing, Limited((0.05,)))
    tried = run_search(search, error, lengths)
    good = [pricing.expected(spec) for spec in useful if error(spec) <= 0.05]
    best = min([*good, pricing.expected(DENSE)])
    assert best <= search.best.seconds <= best / (1 - LEAST_SAVING)
    assert search.best.error <= 0.05
    assert len(set(tried)) == len(tried) <= 40


def test_nothing_covered_by_a_failure_or_covering_a_success_is_tried() -> None:
    lengths = (65536,)
    useful, _ = candidates(lengths)
    search = HeadSearch(useful, Pricing(lengths, LAYER, REFERENCE, shared=False), Limited((0.05,)))
    error = by_budget(20, 3, 30)
    passed: list[PatternSpec] = []
    failed: list[PatternSpec] = []
    while (spec := search.next()) is not None:
        assert not any(covers(other, spec) for other in failed)
        assert not any(covers(spec, other) for other in passed)
        search.record(spec, [error(spec)], [density(spec, 65536)])
        (passed if error(spec) <= 0.05 else failed).append(spec)
    assert passed
    assert failed


def test_a_head_whose_keys_scatter_is_priced_by_its_own_density() -> None:
    """Where a pattern selects far more than predicted, another one wins."""
    lengths = (65536,)
    pricing = Pricing(lengths, LAYER, REFERENCE, shared=False)
    specs = [spec_of("vertical_slash:vertical=30,slash=800"), spec_of("a_shape:sinks=128,window=3968")]
    assert pricing.expected(specs[0]) < pricing.expected(specs[1])
    for share, winner in ((density(specs[0], 65536), specs[0]), (0.9, specs[1])):
        search = HeadSearch(specs, pricing, Limited((0.05,)))
        while (spec := search.next()) is not None:
            search.record(spec, [0.01], [share if spec == specs[0] else density(spec, 65536)])
        assert search.best.spec == winner


def test_a_candidate_must_pass_on_every_document() -> None:
    lengths = (8192, 4096)
    search = HeadSearch([A_SHAPE], Pricing(lengths, LAYER, REFERENCE, shared=False), Limited((0.05, 0.05)))
    search.record(A_SHAPE, [0.01, 0.01], [0.1])
    assert search.best.spec == DENSE
    assert search.runner_up is not None
    assert search.runner_up.spec == A_SHAPE


@pytest.mark.parametrize("errors", [[0.01, 0.06], [0.01, math.inf]])
def test_the_worst_head_of_a_group_decides(errors: list[float]) -> None:
    search = HeadSearch([A_SHAPE], Pricing((8192,), LAYER, REFERENCE, shared=True), Limited((0.05, 0.05)))
    search.record(A_SHAPE, errors, [0.1])
    assert search.best.spec == DENSE
    search = HeadSearch([A_SHAPE], Pricing((8192,), LAYER, REFERENCE, shared=True), Limited((0.05, 0.05)))
    search.record(A_SHAPE, [0.01, 0.05], [0.1])
    assert search.best.spec == A_SHAPE


def test_the_runner_up_is_the_next_cheapest_that_passed() -> None:
    small, large = spec_of("a_shape:sinks=16,window=64"), spec_of("a_shape:sinks=16,window=1024")
    pricing = Pricing((8192,), LAYER, REFERENCE, shared=False)
    search = HeadSearch([small, large], pricing, Limited((0.05,)))
    assert search.runner_up is None
    search.record(large, [0.01], [density(large, 8192)])
    search.record(small, [0.02], [density(small, 8192)])
    assert search.best.spec == small
    assert search.runner_up is not None
    assert search.runner_up.spec == large
    assert search.runner_up.density((8192,)) == pytest.approx(density(large, 8192))
