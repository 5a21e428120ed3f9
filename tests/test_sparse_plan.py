"""What sparse rows cost in the plan: only long ones, only layers without a window, in time and in memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from longbatch.config.kv_formats import plain_format
from longbatch.core import RowSize
from longbatch.device import Rates
from longbatch.models.spec import LayerSpec, ModelSpec
from longbatch.plan import Budget, CostModel, budget, make_plan
from longbatch.plan.sparse_cost import layer_seconds
from longbatch.plan.sparse_rates import REFERENCE
from longbatch.plan.sparse_rows import SparseRows
from longbatch.sparsity import LayerPatterns, PatternSpec

LAYER = LayerSpec(num_heads=8, num_kv_heads=2, head_dim=64, rope=None, scale=0.125, intermediate_size=1024)
BF16 = plain_format("bfloat16")
SPEC = ModelSpec("llama", "Llama", 1000, 512, (LAYER,) * 4, 1e-5, 1 << 21, False)
RATES = Rates(gemm_flops=6e14, attention_flops=REFERENCE.dense_flops, bandwidth=4e12)
NARROW = PatternSpec.parse("a_shape:sinks=64,window=1024")
PATTERNS = (
    LayerPatterns((NARROW,) * 8),
    LayerPatterns((PatternSpec.parse("vertical_slash"),) * 2, shared=True),
    LayerPatterns((PatternSpec.parse("dense"),) * 8),
    LayerPatterns((NARROW, PatternSpec.parse("block_sparse:top_k=20")) * 4),
)
SPARSE = SparseRows(tuple(zip(SPEC.layers, PATTERNS, strict=True)), 10_000, REFERENCE)
DENSE_COST = CostModel(SPEC, RATES)
SPARSE_COST = CostModel(SPEC, RATES, sparse=SPARSE)


@pytest.mark.parametrize("length", [1, 700, 4096, 9000, 131_072, 1 << 20])
def test_many_rows_cost_what_their_layers_cost(length: int) -> None:
    expected = sum(
        layer_seconds(own, length, layer, REFERENCE) for layer, own in zip(SPEC.layers, PATTERNS, strict=True)
    )
    assert SPARSE.seconds(np.array([length, length]))[1] == pytest.approx(expected, rel=0.02)
    assert SPARSE.seconds(np.array([0]))[0] == 0.0


def test_only_long_rows_are_cheaper() -> None:
    lengths = np.array([100, 9_999, 10_000, 200_000])
    dense, sparse = DENSE_COST.prefill(lengths), SPARSE_COST.prefill(lengths)
    assert (sparse[:2] == dense[:2]).all()
    attention = dense[3] - 6e14**-1 * SPEC.matmul_flops_per_token * 200_000
    assert sparse[3] < dense[3] - 0.5 * attention
    assert sparse[2] != dense[2]


def test_layers_with_a_window_cost_the_same() -> None:
    spec = replace(SPEC, layers=(LAYER, replace(LAYER, window=512)) * 2)
    rows = SparseRows(((LAYER, PATTERNS[0]),) * 2, 10_000, REFERENCE)
    length = np.array([100_000])
    alone = replace(spec, layers=(LAYER,) * 2)
    saved = CostModel(spec, RATES).prefill(length) - CostModel(spec, RATES, sparse=rows).prefill(length)
    expected = CostModel(alone, RATES).prefill(length) - CostModel(alone, RATES, sparse=rows).prefill(length)
    assert saved == pytest.approx(expected)
    assert saved > 0


def test_waves_hold_more_sparse_rows() -> None:
    rows = [RowSize(i, 0, 100_000, 0) for i in range(64)]
    memory = Budget(wave_tokens=1 << 24, kv_tokens=1 << 24, tile_tokens=8192)
    plans = [make_plan(rows, SPEC, memory, cost, max_wave_seconds=0.5) for cost in (DENSE_COST, SPARSE_COST)]
    assert plans[1].totals.prefill_seconds < 0.7 * plans[0].totals.prefill_seconds
    assert len(plans[1].waves) < len(plans[0].waves)


def test_chunks_of_a_sparse_row_are_longer() -> None:
    """By the length of the whole row: a piece of it that is short is sparse all the same."""
    longest, seconds = 1 << 20, 0.3
    dense, sparse = (cost.chunk_tokens(longest, seconds, 4096) for cost in (DENSE_COST, SPARSE_COST))
    assert sparse > dense
    all_sparse = CostModel(SPEC, RATES, sparse=replace(SPARSE, min_length=0))
    assert sparse == all_sparse.chunk_tokens(longest, seconds, 4096)
    assert SPARSE_COST.chunk_tokens(8192, 1e-9, 4096) == DENSE_COST.chunk_tokens(8192, 1e-9, 4096) == 4096


@pytest.mark.parametrize("on_gpu", [True, False])
def test_selections_have_their_place_in_memory(on_gpu: bool) -> None:
    without = budget(SPEC, 16 << 30, 2, BF16, on_gpu)
    beside = budget(SPEC, 16 << 30, 2, BF16, on_gpu, sparse_heads=8)
    parts = dict(beside.parts)
    assert "selection" not in dict(without.parts)
    assert parts["selection"] >= 200 << 20
    assert beside.used_bytes <= 16 << 30
    if on_gpu:
        assert beside.kv_tokens < without.kv_tokens
        # Two float32 scores for each key and head at the very least.
        assert parts["selection"] > 8 * 8 * min(SPEC.max_length, beside.kv_tokens)
