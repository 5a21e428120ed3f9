"""What patterns are predicted to cost, and the rates that this is predicted from."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from longbatch.bench import vs_workload
from longbatch.device import DeviceInfo, cpu_info
from longbatch.errors import DeviceError
from longbatch.models.spec import LayerSpec
from longbatch.plan import sparse_rates as rates_module
from longbatch.plan.sparse_cost import (
    break_even,
    causal_pairs,
    dense_seconds,
    density,
    layer_seconds,
    selection_seconds,
    window_pairs,
)
from longbatch.plan.sparse_rates import REFERENCE, read_rates, remember, sparse_rates
from longbatch.sparsity import PATTERNS, LayerPatterns, PatternSpec

DENSE = PatternSpec.make("dense")
SMALL = PatternSpec.make("vertical_slash", vertical=30, slash=800)
LARGE = PatternSpec.make("vertical_slash", vertical=1000, slash=6096)
LAYER = LayerSpec(8, 2, 64, None, 0.125)
GPU = DeviceInfo("cuda", 0, "NVIDIA Test", 80 << 30, (9, 0))


def brute_share(length: int, sees) -> float:  # type: ignore[no-untyped-def]
    rows, keys = np.arange(length)[:, None], np.arange(length)[None]
    return float((sees(rows, keys) & (keys <= rows)).sum() / causal_pairs(length))


# ---------------------------------------------------------------------------------------------- density


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_has_a_share(name: str) -> None:
    spec = PatternSpec.make(name)
    shares = [density(spec, length) for length in (1, 64, 5000, 65536, 1 << 20)]
    assert all(0 < share <= 1 for share in shares)
    assert shares == sorted(shares, reverse=True)
    assert (shares[-1] < 0.6) == (name != "dense")


@pytest.mark.parametrize("length", [1, 63, 300, 1001])
@pytest.mark.parametrize(("sinks", "window"), [(0, 1), (16, 100), (128, 40), (600, 700)])
def test_window_shares_are_exact(length: int, sinks: int, window: int) -> None:
    a_shape = PatternSpec.make("a_shape", sinks=sinks, window=window)
    exact = brute_share(length, lambda q, k: (q - k < window) | (k < sinks))
    assert density(a_shape, length) == pytest.approx(exact)
    tri_shape = PatternSpec.make("tri_shape", sinks=sinks, window=window, last=77)
    exact = brute_share(length, lambda q, k: (q - k < window) | (k < sinks) | (q >= length - 77))
    assert density(tri_shape, length) == pytest.approx(exact)


def test_block_shares_are_close() -> None:
    strided = PatternSpec.make("strided", stride=8, local=4)
    exact = brute_share(4096, lambda q, k: (q // 64 - k // 64 < 4) | ((q // 64 - k // 64) % 8 == 0))
    assert density(strided, 4096) == pytest.approx(exact, rel=0.15)
    top = PatternSpec.make("block_sparse", top_k=10)
    exact = window_pairs(4096, 640) / causal_pairs(4096)
    assert density(top, 4096) == pytest.approx(exact)


@pytest.mark.parametrize("length", [32768, 131072])
@pytest.mark.parametrize(("vertical", "slash"), [(30, 800), (500, 700), (1000, 6096), (3500, 100)])
def test_vertical_slash_is_close_to_a_clustered_workload(length: int, vertical: int, slash: int) -> None:
    """Each distance stands for 64 keys of a block, which the workload's own density does not count."""
    columns, distances = vs_workload.vertical(length, vertical), vs_workload.slash(length, slash)
    covered = np.zeros(length + 128, dtype=bool)
    for distance in distances:
        covered[distance : distance + 64] = True
    seen = 0
    rows = np.random.default_rng(0).integers(0, length, 400)
    for row in rows:
        end = 64 * (row // 64 + 1)
        keys = covered[end - np.arange(row + 1) - 1]
        keys[columns[columns <= row]] = True
        seen += int(keys.sum())
    exact = seen / float((rows + 1).sum())
    spec = PatternSpec.make("vertical_slash", vertical=vertical, slash=slash)
    assert 0.6 < density(spec, length) / exact < 1.7


@pytest.mark.parametrize("spec", [LARGE, PatternSpec.make("vertical_slash", vertical=7000, slash=100)], ids=str)
def test_a_budget_that_reaches_the_prompt_is_dense(spec: PatternSpec) -> None:
    assert density(spec, 6000) == 1.0
    assert density(spec, 60000) < 1.0


# ---------------------------------------------------------------------------------------------- seconds


def test_seconds_add_up() -> None:
    pairs = 0.25 * causal_pairs(65536)
    seconds = selection_seconds(SMALL, 65536, 64, REFERENCE, share=0.25)
    expected = 4 * 64 * pairs / REFERENCE.ranges_flops + 65536 * REFERENCE.estimate_seconds
    assert seconds == pytest.approx(expected)
    together = selection_seconds(SMALL, 65536, 64, REFERENCE, heads=4, shared=True, share=0.25)
    expected = 4 * (4 * 64 * pairs / REFERENCE.shared_flops + 65536 * REFERENCE.shared_estimate_seconds)
    assert together == pytest.approx(expected)


def test_patterns_without_an_estimate_cost_their_pairs_alone() -> None:
    spec = PatternSpec.make("a_shape", sinks=16, window=64)
    slow = replace(REFERENCE, estimate_seconds=1.0, pooled_seconds=1.0)
    assert selection_seconds(spec, 4096, 64, slow) == selection_seconds(spec, 4096, 64, REFERENCE)


@pytest.mark.parametrize("name", ["vertical_slash", "block_sparse", "antidiagonal", "stripes"])
def test_estimates_are_counted(name: str) -> None:
    spec = PatternSpec.make(name)
    slow = replace(REFERENCE, estimate_seconds=1.0, pooled_seconds=1.0, antidiagonal_flops=1.0, sampled_flops=1.0)
    assert selection_seconds(spec, 4096, 64, slow, share=0.1) > selection_seconds(spec, 4096, 64, REFERENCE, share=0.1)


def test_a_layer_is_its_selections_or_the_dense_path() -> None:
    mixed = LayerPatterns((SMALL, DENSE) * 4)
    total = REFERENCE.layer_seconds + 4 * sum(selection_seconds(s, 9000, 64, REFERENCE) for s in (SMALL, DENSE))
    assert layer_seconds(mixed, 9000, LAYER, REFERENCE) == pytest.approx(total)
    assert layer_seconds(mixed, 9000, LAYER, REFERENCE, [0.1] * 8) < total
    dense = dense_seconds(9000, LAYER, REFERENCE)
    assert layer_seconds(LayerPatterns((DENSE,) * 8), 9000, LAYER, REFERENCE) == dense
    assert dense_seconds(9000, replace(LAYER, window=512), REFERENCE) < dense / 4
    shared = LayerPatterns((SMALL,) * 2, shared=True)
    one = selection_seconds(SMALL, 9000, 64, REFERENCE, heads=4, shared=True)
    assert layer_seconds(shared, 9000, LAYER, REFERENCE) == pytest.approx(REFERENCE.layer_seconds + 2 * one)


def test_break_even_is_where_sparse_becomes_faster() -> None:
    layers = [(LAYER, LayerPatterns((LARGE,) * 8)), (LAYER, LayerPatterns((DENSE,) * 8))]
    found = break_even(layers, REFERENCE)
    assert found is not None

    def sparse_wins(length: int) -> bool:
        return layer_seconds(layers[0][1], length, LAYER, REFERENCE) < dense_seconds(length, LAYER, REFERENCE)

    assert sparse_wins(found)
    assert sparse_wins(4 * found)
    assert not sparse_wins(int(found / 1.1))
    later = break_even(layers, replace(REFERENCE, layer_seconds=10 * REFERENCE.layer_seconds))
    assert later is not None
    assert later > found


def test_break_even_is_none_where_sparse_never_wins() -> None:
    dense = [(LAYER, LayerPatterns((DENSE,) * 8))]
    assert break_even(dense, REFERENCE) is None
    hopeless = replace(REFERENCE, ranges_flops=1e9)
    assert break_even([(LAYER, LayerPatterns((LARGE,) * 8))], hopeless) is None


# ------------------------------------------------------------------------------------------------ rates


@pytest.mark.parametrize(("info", "dtype"), [(cpu_info(), "bfloat16"), (cpu_info(), "float32"), (GPU, "float32")])
def test_where_selections_are_masks_there_are_no_rates(info: DeviceInfo, dtype: str, tmp_path: Path) -> None:
    said: list[str] = []
    assert sparse_rates(info, dtype, tmp_path, said.append) is None
    assert list(tmp_path.iterdir()) == said == []


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_are_positive_numbers(value: float) -> None:
    with pytest.raises(ValueError, match="blocks_flops"):
        replace(REFERENCE, blocks_flops=value)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}', '{"a": {"device": "x"}}', "\xff"])
def test_a_damaged_file_is_measured_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sparse-rates.json"
    path.write_bytes(text.encode("latin-1"))
    assert read_rates(path) == {}
    remember(path, "b", REFERENCE)
    assert read_rates(path) == {"b": REFERENCE}


def measuring(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let a program of the test's measure."""
    (folder / "measure_for_a_test.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(rates_module, "MEASURE_MODULE", "measure_for_a_test")


def test_rates_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = replace(REFERENCE, device="NVIDIA Test", dense_flops=1e12)
    answer = json.dumps(asdict(measured))
    measuring(tmp_path, monkeypatch, f"import sys\nassert sys.argv[1:] == ['cuda:0', 'bfloat16']\nprint({answer!r})")
    said: list[str] = []
    assert sparse_rates(GPU, "bfloat16", tmp_path / "cache", said.append) == measured
    measuring(tmp_path, monkeypatch, "raise SystemExit('measured twice')")
    assert sparse_rates(GPU, "bfloat16", tmp_path / "cache", said.append) == measured
    assert said == ["measuring sparse attention on NVIDIA Test in bfloat16, once, for some seconds"]
    with pytest.raises(DeviceError, match="NVIDIA Test: measured twice"):
        sparse_rates(GPU, "float16", tmp_path / "cache")


def test_a_home_that_cannot_be_written_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    measuring(tmp_path, monkeypatch, f"print({json.dumps(asdict(REFERENCE))!r})")
    assert sparse_rates(GPU, "bfloat16", tmp_path / "file") == REFERENCE


def test_the_measuring_module_is_there() -> None:
    """It is named as text, because the plan must not import the engine."""
    import importlib.util

    assert importlib.util.find_spec(rates_module.MEASURE_MODULE) is not None
