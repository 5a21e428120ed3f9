"""Packing, prices and the stored plan."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from longbatch.core import RowSize
from longbatch.device import Rates
from longbatch.models.spec import LayerSpec, ModelSpec, RopeSpec
from longbatch.plan import Budget, CostModel, Plan, make_plan

ROPE = RopeSpec("default", 10_000.0, 64, 8192, 8192)
LAYER = LayerSpec(8, 2, 64, ROPE, 0.125, intermediate_size=1024)
SPEC = ModelSpec("llama", "LlamaForCausalLM", 1000, 512, (LAYER,) * 4, 1e-5, 8192, True)
COST = CostModel(SPEC, Rates(gemm_flops=1e12, attention_flops=5e11, bandwidth=1e11))
BUDGET = Budget(wave_tokens=1000, kv_tokens=4096, tile_tokens=64)


def sizes(*prompts: int, generated: int = 10) -> list[RowSize]:
    return [RowSize(row, 0, prompt, generated) for row, prompt in enumerate(prompts)]


def plan_of(rows: list[RowSize], budget: Budget = BUDGET, **options: float) -> Plan:
    return make_plan(rows, SPEC, budget, COST, **options)


# ---------------------------------------------------------------------------------------------- packing


def test_longest_first_and_none_lost() -> None:
    lengths = np.random.default_rng(0).integers(1, 900, 500).tolist()
    plan = plan_of(sizes(*lengths))
    ran = [row for wave in plan.waves for row in wave.rows]
    assert sorted(ran) == sizes(*lengths)
    assert all(first.prompt >= second.prompt for first, second in pairwise(ran))
    assert [wave.index for wave in plan.waves] == list(range(len(plan.waves)))
    for wave in plan.waves:
        assert wave.tokens == sum(row.prompt for row in wave.rows) <= 1000
        assert wave.width == 1
    # Greedy filling: what comes next would not have fitted.
    for wave, following in pairwise(plan.waves):
        assert wave.tokens + following.rows[0].prompt > 1000


def test_equal_lengths_keep_the_manifests_order() -> None:
    rows = [RowSize(row, sample, 5, 1) for row in range(50) for sample in range(2)]
    assert [row for wave in plan_of(rows).waves for row in wave.rows] == rows


def test_a_long_row_is_a_wave_alone() -> None:
    plan = plan_of(sizes(10, 3000, 1001, 1000, 10))
    assert [[row.prompt for row in wave.rows] for wave in plan.waves] == [[3000], [1001], [1000], [10, 10]]


def test_a_wave_may_be_exactly_full() -> None:
    assert [wave.tokens for wave in plan_of(sizes(400, 300, 300, 1)).waves] == [1000, 1]


def test_branches_count() -> None:
    rows = [RowSize(row, 0, 400, 0, branch_tokens=200) for row in range(2)]
    plan = plan_of(rows)
    assert [wave.tokens for wave in plan.waves] == [600, 600]


def test_waves_are_bounded_in_time() -> None:
    rows = sizes(*[100] * 20)
    whole = plan_of(rows, Budget(100_000, 100_000, 64))
    assert len(whole.waves) == 1
    limit = whole.waves[0].seconds / 3
    plan = plan_of(rows, Budget(100_000, 100_000, 64), max_wave_seconds=limit)
    assert len(plan.waves) > 2
    assert all(wave.seconds <= limit * 1.0001 for wave in plan.waves)
    # A row that takes longer by itself still runs.
    assert len(plan_of(rows, Budget(100_000, 100_000, 64), max_wave_seconds=1e-12).waves) == 20


def test_nothing_to_do() -> None:
    plan = plan_of([])
    assert len(plan.waves) == 0
    assert list(plan.waves) == []
    assert plan.histogram == ()
    assert (plan.totals.num_rows, plan.totals.seconds) == (0, 0.0)


def test_waves_are_a_sequence() -> None:
    waves = plan_of(sizes(*[600] * 5)).waves
    assert waves[-1] == waves[4]
    assert list(waves[1:3]) == [waves[1], waves[2]]
    with pytest.raises(IndexError):
        waves[5]


# ---------------------------------------------------------------------------------------------- refusals


def test_rows_that_exceed_the_cache_are_refused() -> None:
    rows = [RowSize(0, 0, 4000, 96), RowSize(1, 0, 4000, 97), RowSize(2, 0, 5000, 1)]
    plan = plan_of(rows)
    assert [row.row for wave in plan.waves for row in wave.rows] == [0]
    (first, lower), (second, shorten) = plan.refused
    assert (first, second) == (rows[1], rows[2])
    assert {lower.type, shorten.type} == {"does_not_fit"}
    assert "lower max_tokens to 96" in lower.message
    assert lower.field == "max_tokens"
    assert "max_tokens" not in shorten.message
    assert "GiB" in shorten.message
    # What the message says lets the row run.
    assert not plan_of([rows[1]._replace(generated=96)]).refused
    assert plan.totals.num_refused == 2


def test_rows_that_keep_nothing_need_no_cache() -> None:
    """A prompt that is only read, in one piece, never enters the pages."""
    small = Budget(wave_tokens=1000, kv_tokens=64, tile_tokens=64)
    assert not plan_of([RowSize(0, 0, 900, 0)], small).refused
    assert plan_of([RowSize(0, 0, 1001, 0)], small).refused
    assert plan_of([RowSize(0, 0, 900, 0, branch_tokens=3)], small).refused


# ---------------------------------------------------------------------------------------------- prices


def test_prefill_of_one_token_by_hand() -> None:
    # Each layer: q and out 512x512, k and v 512x128, three of 512x1024; one head of 512x1000 at the end.
    matrices = 4 * (2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 1024) + 512 * 1000
    attention = 4 * 4 * 8 * 64
    expected = 2 * matrices / 1e12 + attention / 5e11
    assert COST.prefill(np.array([1]))[0] == pytest.approx(expected)


def test_attention_grows_with_the_square_and_a_window_stops_it() -> None:
    lengths = np.array([100_000, 200_000])
    full = COST.prefill(lengths)
    assert 3 < full[1] / full[0] < 4
    window = CostModel(replace(SPEC, layers=(replace(LAYER, window=128),) * 4), COST.rates)
    cut = window.prefill(lengths)
    assert cut[1] / cut[0] == pytest.approx(2, rel=1e-3)
    short = np.array([128])
    assert window.prefill(short)[0] == pytest.approx(COST.prefill(short)[0])


def test_branches_cost_what_their_attention_reads() -> None:
    prompt, branch = np.array([5000]), np.array([10])
    extra = COST.prefill(prompt, branch)[0] - COST.prefill(prompt)[0]
    matrices = 10 * (SPEC.matmul_flops_per_token + 2 * 512 * 1000) / 1e12
    assert extra == pytest.approx(matrices + 10 * 5000 * 4 * 4 * 8 * 64 / 5e11)


def test_decode_is_bound_by_reading_weights_when_few_rows_share_them() -> None:
    one = COST.decode(np.array([100]), np.array([50]), 10_000)
    weights = 50 * SPEC.num_parameters * 2 / 1e11
    cache = SPEC.kv_entries_per_token * (50 * 100 + 50 * 50 / 2) * 2 / 1e11
    assert one == pytest.approx(weights + cache)
    many = COST.decode(np.full(64, 100), np.full(64, 50), 10**6)
    assert many < 64 * one / 3
    # Rows that the cache cannot hold together take turns.
    assert COST.decode(np.full(64, 100), np.full(64, 50), 600) > many
    assert COST.decode(np.array([100]), np.array([0]), 10_000) == 0.0


def test_totals() -> None:
    plan = plan_of([*sizes(5, 7, 900), RowSize(9, 0, 9000, 5)])
    totals = plan.totals
    assert (totals.num_rows, totals.num_refused, totals.num_waves) == (3, 1, 1)
    assert (totals.prompt_tokens, totals.longest_prompt, totals.generated_tokens) == (912, 900, 30)
    assert totals.prefill_seconds == pytest.approx(sum(wave.seconds for wave in plan.waves))
    assert totals.seconds == totals.prefill_seconds + totals.decode_seconds


def test_histogram() -> None:
    buckets = plan_of(sizes(1, 2, 3, 4, 900, 1000, 4000)).histogram
    filled = [(b.low, b.high, b.num_rows, b.num_tokens) for b in buckets if b.num_rows]
    assert filled == [(1, 1, 1, 1), (2, 3, 2, 5), (4, 7, 1, 4), (512, 1023, 2, 1900), (2048, 4095, 1, 4000)]
    assert all(second.low == first.high + 1 for first, second in pairwise(buckets))


# ---------------------------------------------------------------------------------------------- scale


@pytest.mark.slow
def test_a_million_rows() -> None:
    lengths = np.exp(np.random.default_rng(0).normal(5, 1.5, 1_000_000)).astype(np.int64) + 1
    start = time.monotonic()
    plan = plan_of(
        [RowSize(row, 0, length, 10) for row, length in enumerate(lengths.tolist())], Budget(262_144, 10**6, 64)
    )
    assert time.monotonic() - start < 20
    assert plan.totals.num_rows == 1_000_000
    assert plan.table.nbytes < 50_000_000
    assert sum(len(wave.rows) for wave in plan.waves) == 1_000_000


@pytest.mark.parametrize("seconds", [1e-6, 0.001, 0.01, 0.1, 1e6])
def test_chunks_stay_under_a_time(seconds: float) -> None:
    """Even the last chunk of the longest prompt, unless it is as short as a chunk can be; twice as many tokens would
    take too long."""
    chunk = COST.chunk_tokens(8000, seconds, 64)

    def last(tokens: int) -> float:
        whole, before = COST.prefill(np.array([8000])), COST.prefill(np.array([8000 - tokens]))
        return float(whole[0] - before[0])

    assert chunk in [64 * 2**power for power in range(7)]
    assert last(chunk) <= seconds or chunk == 64
    assert 2 * chunk > 8000 or last(2 * chunk) > seconds


def test_chunks_of_a_short_prompt() -> None:
    assert COST.chunk_tokens(10, 1.0, 64) == 64
