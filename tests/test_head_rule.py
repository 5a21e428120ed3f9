"""Errors traded against time: costs, how near a search comes to the best of the grid, in how many trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from longbatch.engine.head_rule import SAVING_PER_TRIAL, UNSEEN, Limited, Rule, Traded
from longbatch.engine.head_search import DENSE, HeadSearch, Pricing
from longbatch.models.spec import LayerSpec
from longbatch.plan.candidates import budget, candidates, covers
from longbatch.plan.sparse_cost import density
from longbatch.plan.sparse_rates import REFERENCE
from longbatch.sparsity import PatternSpec

LAYER = LayerSpec(32, 8, 128, None, 0.088)
LENGTHS = (65536, 16384)
GRID, _ = candidates(LENGTHS)
ALONE = Pricing(LENGTHS, LAYER, REFERENCE, shared=False)
UNIT = ALONE.seconds(DENSE, (1.0, 1.0))
SMALL, LARGE = (PatternSpec.make("a_shape", sinks=16, window=window) for window in (64, 1024))

Error = Callable[[PatternSpec], float]
Share = Callable[[PatternSpec, int], float]

FALLS: dict[str, Callable[[float], float]] = {
    "exponential": lambda x: math.exp(-x),
    "stretched": lambda x: math.exp(-math.sqrt(x)),
    "power": lambda x: 1 / (1 + x),
}


def surface(shape: str, keys: float, size: float) -> Error:
    """Weighted errors that fall with every budget. keys: how many a head needs. size: what it errs with none."""
    fall = FALLS[shape]

    def error(spec: PatternSpec) -> float:
        has = dict(spec.parameters)
        if spec.is_dense:
            return 0.0
        if spec.name == "vertical_slash":
            return size * (fall(has["vertical"] / keys) + fall(has["slash"] / (3 * keys))) / 2
        if spec.name in ("a_shape", "tri_shape"):
            return size * (0.1 + 0.9 * fall(has["window"] / (9 * keys)) + 0.1 * fall(has["sinks"] / 8))
        if has.get("mass"):
            return size * (1 - has["mass"])
        if spec.name == "antidiagonal":
            return size * (1 - has["threshold"]) * (1 + has["stride"] / 50)
        if spec.name == "block_sparse":
            return size * fall(has["top_k"] * 64 / (9 * keys))
        return size

    return error


def as_predicted(spec: PatternSpec, length: int) -> float:
    return density(spec, length)


def of_its_own(spec: PatternSpec, length: int) -> float:
    """A head whose keys scatter, and whose mass lies in few of them."""
    return min(1.0, density(spec, length) * (1.4 if budget(spec) else 0.2))


def play(search: HeadSearch, errors: Sequence[Error], share: Share = as_predicted) -> list[PatternSpec]:
    """A whole search; what it tried. A trial beyond the limits ends with the first document, as in a real one."""
    tried = []
    while (spec := search.next()) is not None:
        assert spec == search.next()
        found = [error(spec) for error in errors]
        failed = any(error > limit for error, limit in zip(found, search.limits, strict=True))
        search.record(spec, found, [share(spec, length) for length in LENGTHS[: 1 if failed else None]])
        tried.append(spec)
    return tried


def least_cost(rule: Rule, pricing: Pricing, errors: Sequence[Error], share: Share) -> float:
    """Over the whole grid."""
    return min(
        rule.cost([error(spec) for error in errors], pricing.seconds(spec, [share(spec, length) for length in LENGTHS]))
        for spec in GRID
    )


def test_dense_costs_one_and_errors_add_their_squares() -> None:
    rule = Traded((10.0, 20.0), unit=4.0)
    assert rule.of(slice(0, 1)).cost([0.0], 4.0) == 1
    assert rule.cost([0.03, 0.02], 2.0) == pytest.approx(0.3**2 + 0.4**2 + 0.5)
    # The root mean square of 0.5 and 1.3 is below 1, that of 0.5 and 1.4 above.
    assert rule.cost([0.05, 0.065], 0.0) == pytest.approx(0.25 + 1.69)
    assert rule.cost([0.05, 0.07], 0.0) == math.inf
    assert rule.cost([math.inf, 0.0], 0.0) == math.inf


@pytest.mark.parametrize("best", [0.3, 1.0, 1.7])
def test_beyond_the_limits_nothing_can_win(best: float) -> None:
    rule = Traded((10.0, 20.0), unit=4.0)
    for head, limit in enumerate(rule.largest(best)):
        errors = [0.0, 0.0]
        errors[head] = limit * 0.999
        assert rule.cost(errors, 0.0) < best
        errors[head] = limit * 1.001
        assert rule.cost(errors, 0.0) >= best


@pytest.mark.parametrize("share", [as_predicted, of_its_own])
@pytest.mark.parametrize("shape", FALLS)
def test_a_head_comes_near_the_best_of_the_grid_in_few_trials(shape: str, share: Share) -> None:
    for keys in (20, 200, 2000):
        for size in (0.3, 2, 10, 50):
            error = surface(shape, keys, size)
            rule = Traded((1.0,), UNIT)
            search = HeadSearch(GRID, ALONE, rule)
            tried = play(search, [error], share)
            best = min(1.0, least_cost(rule, ALONE, [error], share))
            assert best <= search.best.cost <= best * 1.1
            assert search.best.error <= 1
            assert len(set(tried)) == len(tried) <= 40


@pytest.mark.parametrize("share", [as_predicted, of_its_own])
def test_a_group_comes_near_the_best_of_the_grid_in_few_trials(share: Share) -> None:
    together = Pricing(LENGTHS, LAYER, REFERENCE, shared=True)
    for shape in FALLS:
        for keys in (20, 200, 1000):
            errors = [surface(shape, keys * scale, 2 * scale) for scale in (1, 0.3, 3, 2)]
            rule = Traded((1.0,) * 4, UNIT)
            search = HeadSearch(GRID, together, rule)
            tried = play(search, errors, share)
            best = min(together.expected(DENSE) / UNIT, least_cost(rule, together, errors, share))
            assert best <= search.best.cost <= best * 1.1
            assert len(set(tried)) == len(tried) <= 40


def test_nothing_that_its_bounds_rule_out_is_tried() -> None:
    error = surface("power", 200, 10)
    search = HeadSearch(GRID, ALONE, Traded((1.0,), UNIT))
    known: list[tuple[PatternSpec, float]] = []
    while (spec := search.next()) is not None:
        least = max((found for other, found in known if covers(other, spec)), default=0.0)
        assert least * least < search.best.cost * (1 - SAVING_PER_TRIAL * len(known))
        known.append((spec, error(spec)))
        search.record(spec, [error(spec)], [density(spec, length) for length in LENGTHS])


def test_equal_limits_cost_more_than_a_trade() -> None:
    """At no limit for all heads do they come to less error in the same time."""
    errors = [surface(shape, keys, size) for shape in FALLS for keys in (30, 300) for size in (0.5, 3, 20)]
    rule = Traded((1.0,), UNIT)
    searches = [HeadSearch(GRID, ALONE, rule) for _ in errors]
    for search, error in zip(searches, errors, strict=True):
        play(search, [error])
    traded, limited = sum(search.best.cost for search in searches), math.inf
    for limit in (0.2, 0.3, 0.4, 0.5, 0.7, 1.0):
        others = [HeadSearch(GRID, ALONE, Limited((limit,))) for _ in errors]
        for search, error in zip(others, errors, strict=True):
            play(search, [error])
        limited = min(limited, sum(rule.cost(search.best.errors, search.best.seconds) for search in others))
    assert traded < limited * 0.95


def test_what_the_data_decide_is_tried_even_where_much_is_predicted() -> None:
    mass = PatternSpec.make("block_sparse", top_k=1 << 20, mass=0.9)
    top_k = PatternSpec.make("block_sparse", top_k=8)
    cheap = PatternSpec.make("vertical_slash", vertical=1000, slash=4800)
    # Of a device on which choosing blocks costs little, and running them no more than ranges.
    rates = replace(REFERENCE, pooled_seconds=1e-14, blocks_flops=REFERENCE.ranges_flops)
    alone = Pricing(LENGTHS, LAYER, rates, shared=False)
    assert alone.expected(cheap) < alone.expected(mass) < alone.expected(cheap) / UNSEEN
    for share, winner in ((0.01, mass), (density(mass, LENGTHS[0]), cheap)):
        search = HeadSearch([mass, top_k, cheap], alone, Traded((1.0,), UNIT))
        search.record(cheap, [0.0], [density(cheap, length) for length in LENGTHS])
        # What is known of blocks by number says nothing of blocks by mass.
        search.record(top_k, [2.0], [1.0])
        assert search.next() == mass
        search.record(mass, [0.0], [share] * 2)
        assert search.next() is None
        assert search.best.spec == winner


def test_the_order_of_the_grid_decides_nothing() -> None:
    error = surface("stretched", 200, 5)
    tried = [play(HeadSearch(order, ALONE, Traded((1.0,), UNIT)), [error], of_its_own) for order in (GRID, GRID[::-1])]
    assert tried[0] == tried[1]


def test_a_candidate_must_go_through_all_documents() -> None:
    search = HeadSearch([SMALL], ALONE, Traded((1.0,), UNIT))
    assert search.limits == (1.0,)
    search.record(SMALL, [0.1], [0.01])
    assert search.best.spec == DENSE
    search = HeadSearch([SMALL], ALONE, Traded((1.0,), UNIT))
    search.record(SMALL, [0.1], [0.01] * 2)
    assert search.best.spec == SMALL
    assert search.limits == pytest.approx([math.sqrt(search.best.cost)])


def test_the_runner_up_is_the_second_least_cost() -> None:
    search = HeadSearch([SMALL, LARGE], ALONE, Traded((1.0,), UNIT))
    for spec, error in ((SMALL, 0.7), (LARGE, 0.1)):
        search.record(spec, [error], [density(spec, length) for length in LENGTHS])
    assert search.best.spec == LARGE
    assert search.runner_up is not None
    assert search.runner_up.spec == SMALL
    assert search.best.cost < search.runner_up.cost < 1
    assert search.best.seconds > search.runner_up.seconds
