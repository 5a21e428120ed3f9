"""`longbatch bench attention` at tiny sizes: its workload, its checks, what it makes of rivals, and its table."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longbatch.attention.choice import OWN
from longbatch.attention.selection import Ranges
from longbatch.bench import attention, attention_layers, attention_others, vs_workload
from longbatch.bench.attention import Model, Rivals, compare, crossing, size_name
from longbatch.bench.attention_check import Check, reference, sampled_blocks
from longbatch.bench.attention_inputs import random_inputs, scores_of, selections, structured_inputs
from longbatch.bench.attention_layers import counted, indexed, measure_layers
from longbatch.cli import main
from longbatch.cli.options import parse_lengths
from longbatch.errors import UsageError
from longbatch.sparsity import PatternSpec
from longbatch.timing import median_seconds

CPU = torch.device("cpu")
LAYERS = [[(30, 100), (40, 110), (30, 100), (50, 150)], [(40, 110)] * 4]
TINY = Model(4, 2, 16, torch.float32, LAYERS, [[(30, 100), (50, 150)], [(40, 110)] * 2], most_error=1e-5)
LENGTH = 256


# ------------------------------------------------------------------------------------------ workload


def test_the_mix_is_the_published_one(root: Path) -> None:
    file = root / "recipes" / "minference" / "Llama_3_8B_Instruct_262k_kv_out_v32_fit_o_best_pattern.json"
    published = [[tuple(layer[str(head)][1:3]) for head in range(32)] for layer in json.loads(file.read_text())]
    assert vs_workload.layers() == published
    counts = Counter(budget for layer in published for budget in layer)
    assert counts == {(1000, 6096): 473, (30, 800): 278, (100, 800): 153, (3500, 100): 89, (500, 700): 31}


def test_shared_layers_keep_the_mix() -> None:
    shared, published = vs_workload.shared_layers(), vs_workload.layers()
    assert {len(layer) for layer in shared} == {8}
    groups, heads = (Counter(budget for layer in layers for budget in layer) for layers in (shared, published))
    assert all(abs(groups[budget] - heads[budget] / 4) < 1 for budget in heads)
    # Layer by layer as well: at most one group beside its own heads.
    for own, layer in zip(shared, published, strict=True):
        for budget in vs_workload.CLASSES:
            assert abs(own.count(budget) - layer.count(budget) / 4) <= 1.5


def test_workload_is_clustered_and_repeatable() -> None:
    columns, distances = vs_workload.vertical(1 << 17, 1000), vs_workload.slash(1 << 17, 6096)
    assert len(columns) == 1000 == len(set(columns.tolist()))
    assert columns[:30].tolist() == list(range(30))
    assert len(distances) == 6096 == len(set(distances.tolist()))
    assert distances[: 6096 // 4].tolist() == list(range(6096 // 4))
    # 4,572 distances beyond the band in clusters of 64 to 256, some of which touch.
    assert 15 <= (np.diff(distances) > 1).sum() <= 72
    vs_workload.slash.cache_clear()
    assert (vs_workload.slash(1 << 17, 6096) == distances).all()
    assert (vs_workload.slash(1 << 17, 6096, seed=1) != distances).any()
    # A prompt no longer than the budget keeps every distance.
    for length in (50, 4096, 6096):
        assert vs_workload.slash(length, 6096).tolist() == list(range(length))


@pytest.mark.parametrize("row", [0, 63, 64, 200, 329])
def test_selected_keys_are_those_of_the_definition(row: int) -> None:
    columns, distances = vs_workload.vertical(330, 35, seed=3), np.array([0, 1, 5, 70, 71, 260], dtype=np.int32)
    end = (row // 64 + 1) * 64
    expected = set(columns[columns < end].tolist())
    for distance in distances.tolist():
        expected |= set(range(max(0, end - distance - 64), end - distance))
    assert vs_workload.selected(columns, distances, row, 330).tolist() == sorted(key for key in expected if key < 330)


@pytest.mark.parametrize("shared", [False, True])
def test_given_sums_become_the_workload(shared: bool) -> None:
    inputs = random_inputs(330, 4, 2, 16, torch.float32, CPU)
    budgets = TINY.shared_layers[0] if shared else LAYERS[0]
    chosen = selections(budgets, 330)
    specs = [PatternSpec.make("vertical_slash", vertical=v, slash=s) for v, s in budgets]
    ranges, _ = indexed(inputs, specs, scores_of(chosen, 330, CPU), shared)
    for number, one in enumerate(chosen):
        mask = ranges.mask(number, 0, 330, 330)
        for row in range(0, 330, 13):
            keys = vs_workload.selected(one.columns, one.distances, row, 330)
            assert mask[row].nonzero()[:, 0].tolist() == keys[keys <= row].tolist()
    # The pattern takes its sums from the kernel again.
    other, _ = indexed(random_inputs(330, 4, 2, 16, torch.float32, CPU), specs, scores_of(chosen, 330, CPU), shared)
    assert torch.equal(other.columns, ranges.columns)


@pytest.mark.parametrize("shared", [False, True])
def test_pairs_of_a_selection_are_counted_once(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs(330, 4, 2, 16, torch.float32, CPU)
    layers = TINY.shared_layers if shared else LAYERS
    counts: list[int] = []
    true_pairs = Ranges.pairs

    def pairs(self: Ranges, *rows: int) -> torch.Tensor:
        counts.append(self.num_selections)
        return true_pairs(self, *rows)

    monkeypatch.setattr(Ranges, "pairs", pairs)
    known: dict[attention_layers.Selection, float] = {}
    for layer in layers:
        chosen = selections(layer, 330)
        specs = [PatternSpec.make("vertical_slash", vertical=v, slash=s) for v, s in layer]
        ranges, _ = indexed(inputs, specs, scores_of(chosen, 330, CPU), shared)
        assert counted(ranges, chosen, 330, known) == float(true_pairs(ranges, 0, 330, 330).sum())
        assert counted(ranges, chosen, 330, known) == float(true_pairs(ranges, 0, 330, 330).sum())
    # Of the second layer (40, 110) has been seen in one place.
    assert counts == ([2, 2] if shared else [4, 3])


def test_long_layers_warm_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def median(work: Any, device: torch.device, *, repeats: int, warmups: int = 1) -> float:
        found.append(warmups)
        return median_seconds(work, device, repeats=repeats, warmups=warmups)

    monkeypatch.setattr(attention_layers, "median_seconds", median)
    inputs = random_inputs(LENGTH, 4, 2, 16, torch.float32, CPU)
    for longest, expected in ((LENGTH, [1, 1, 1, 1, 1]), (LENGTH - 1, [1, 1, 1, 1, 0])):
        found.clear()
        monkeypatch.setattr(attention_layers, "LONGEST_WARM_UP", longest)
        measure_layers(inputs, LAYERS, shared=False, repeats=1, most_error=1e-5, pairs={})
        assert found == expected


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_own_dense_attention_is_dense(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(200, 4, 64, generator=generator)
    k, v = (torch.randn(200, kv_heads, 64, generator=generator) for _ in range(2))
    ((_, torch_sdpa),) = attention_others.dense_kernels(CPU).items()
    found = attention_others.engine_dense(OWN)(q, k, v, 0.125)
    torch.testing.assert_close(found, torch_sdpa(q, k, v, 0.125), atol=1e-5, rtol=1e-5)


def test_long_dense_attention_warms_up_on_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_others, "LONGEST_WARM_UP", 128)
    ((_, kernel),) = attention_others.dense_kernels(CPU).items()
    for length, expected in ((256, [128, 256, 256]), (128, [128, 128, 128])):
        lengths: list[int] = []

        def work(q: torch.Tensor, *rest: Any) -> torch.Tensor:
            lengths.append(len(q))  # noqa: B023
            return kernel(q, *rest)

        assert attention_others.measure_dense(
            work, random_inputs(length, 4, 2, 16, torch.float32, CPU), 1, repeats=2
        ).holds
        assert lengths == expected


# ------------------------------------------------------------------------------------------ checks


def test_check_measures_the_error() -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(8, 16), torch.randn(100, 16), torch.randn(100, 16)
    keys = torch.arange(0, 100, 3)
    exact = reference(q, k, v, 60, keys, 0.25)
    scores = (q.double() @ k.double().T) * 0.25
    mask = torch.zeros(8, 100, dtype=torch.bool)
    mask[:, keys] = True
    mask &= torch.arange(100)[None] <= torch.arange(60, 68)[:, None]
    assert torch.allclose(exact, scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v.double(), atol=1e-12)
    check = Check(most=0.01)
    assert not check.holds  # nothing compared
    check.rows(q, k, v, (exact * 1.005).float(), 60, keys, 0.25)
    assert check.error == pytest.approx(0.005, rel=1e-3)
    assert check.holds
    check.rows(q, k, v, (exact * 1.1).float(), 60, keys, 0.25)
    assert not check.holds


def test_check_fails_on_numbers_that_are_none() -> None:
    q, k, v = torch.randn(1, 16), torch.randn(9, 16), torch.randn(9, 16)
    check = Check()
    check.rows(q, k, v, torch.full((1, 16), math.nan), 8, torch.arange(9), 0.25)
    assert check.error == math.inf
    assert not check.holds


def test_rows_without_keys_give_zero() -> None:
    q, k, v = torch.randn(1, 16), torch.randn(9, 16), torch.randn(9, 16)
    assert reference(q, k, v, 2, torch.tensor([5, 6]), 0.25).abs().max() == 0


def test_sampled_blocks_hold_the_last() -> None:
    assert max(sampled_blocks(330, 3, seed=1)) == 320
    assert sampled_blocks(330, 3, seed=1) == sampled_blocks(330, 3, seed=1)
    assert sampled_blocks(1, 3, seed=1) == [0]


def test_median_leaves_warm_ups_out() -> None:
    calls: list[int] = []
    assert 0 <= median_seconds(lambda: calls.append(1), CPU, repeats=3, warmups=2) < 1
    assert len(calls) == 5


# ------------------------------------------------------------------------------------------ table


@pytest.fixture(scope="module")
def table() -> dict[tuple[str, str, str | None], Any]:
    rows = compare(TINY, Rivals(), [LENGTH], (), 1, CPU)
    return {(row.case, row.metric, row.against): row for row in rows}


def test_whole_comparison(table: dict[tuple[str, str, str | None], Any]) -> None:
    assert all(row.checked for row in table.values())
    for mode in attention.MODES.values():
        case = f"longbatch, {mode}, {LENGTH}"
        whole = table[case, attention.WHOLE, f"torch SDPA, {LENGTH}"]
        parts = [table[case, name, None].value for name in ("estimate", "index", "attention")]
        assert whole.value == pytest.approx(sum(parts))
        dense = table[f"torch SDPA, {LENGTH}", attention.WHOLE, None].value
        assert whole.ratio == pytest.approx(dense / whole.value)
        assert table[case, "estimate and index", "the whole"].ratio == pytest.approx(sum(parts[:2]) / sum(parts))
        assert table[case, "error of the worst layer", attention.EXACT].value < 1e-5


def test_density_and_rate_count_the_selection(table: dict[tuple[str, str, str | None], Any]) -> None:
    pairs = 0
    for layer in LAYERS:
        for one in selections(layer, LENGTH):
            for row in range(LENGTH):
                keys = vs_workload.selected(one.columns, one.distances, row, LENGTH)
                pairs += int((keys <= row).sum())
    case = f"longbatch, one selection per head, {LENGTH}"
    causal = 2 * 4 * LENGTH * (LENGTH + 1) / 2
    assert table[case, "density", None].value == pytest.approx(pairs / causal)
    seconds = table[case, "attention", None].value
    assert table[case, "executed rate", None].value == pytest.approx(4 * 16 * pairs / seconds / 1e12)


def test_no_speed_for_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from longbatch_kernels import range_attention as module

    true_attention = module.range_attention

    def off(*arguments: Any, out: torch.Tensor, **named: Any) -> Any:
        result = true_attention(*arguments, out=out, **named)
        out[-3:] *= 1.01
        return result

    monkeypatch.setattr(module, "range_attention", off)
    rows = [row for row in compare(TINY, Rivals(), [LENGTH], (), 1, CPU) if row.case.startswith("longbatch")]
    assert [(row.metric, row.checked) for row in rows] == [("error of the worst layer", False)] * 2


def test_break_even_rows() -> None:
    rows = list(compare(TINY, Rivals(), [], (64, 128), 1, CPU))
    # Interpreted kernels are never faster than dense attention.
    last = [row for row in rows if row.metric.startswith("break-even")]
    assert [(row.metric, row.value, row.checked) for row in last] == [("break-even lies above", 128, False)] * 2
    assert sum(row.metric == "speed" for row in rows) == 4


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([(4096, 0.5), (8192, 2.0)], 4096 * math.sqrt(2)),
        ([(4096, 0.5), (8192, 1.0)], 8192),
        ([(4096, 1.5), (8192, 0.5), (16384, 2.0)], 8192 * math.sqrt(2)),
        ([(4096, 1.5), (8192, 2.5)], 4096),
        ([(4096, 1.5), (8192, 0.9)], None),
    ],
    ids=["between", "at a length", "after a dip", "always", "never"],
)
def test_crossing(ratios: list[tuple[int, float]], expected: float | None) -> None:
    found = crossing(ratios)
    assert found is None if expected is None else found == pytest.approx(expected)


def test_lines_hold_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {(row.case, row.metric): row.value for row in compare(TINY, Rivals(), [LENGTH], (64,), 1, CPU)}
    lines = [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]
    for mode in attention.MODES.values():
        case = f"longbatch, {mode}, {LENGTH}"
        (line,) = (line for line in lines if line.startswith(f"{case}: "))
        for metric in (attention.WHOLE, "estimate", "index", "attention", "executed rate", "density"):
            assert f"{rows[case, metric]:.4g}" in line
        assert line.endswith(f"error {rows[case, 'error of the worst layer']:.2g}")
        ratio = rows[f"longbatch, {mode}, 64 tokens", "speed"]
        assert any(line.startswith(f"break-even: 64 tokens, {mode}: {ratio:.3f} times torch SDPA") for line in lines)
    dense = f"torch SDPA, {LENGTH}"
    assert f"{dense}: {rows[dense, attention.WHOLE]:.4g} s, error {rows[dense, 'error']:.2g}" in lines


def test_rows_come_as_they_are_measured() -> None:
    rows = compare(TINY, Rivals(), [LENGTH, 10**9], (), 1, CPU)
    assert next(rows).case == f"torch SDPA, {LENGTH}"
    rows.close()


def test_size_names() -> None:
    assert [size_name(length) for length in (1 << 20, 1 << 17, 330)] == ["1M", "128K", "330"]


def test_structured_inputs_look_near_and_at_the_first_keys() -> None:
    inputs = structured_inputs(4096, 2, 128, torch.float32, CPU)
    mass = torch.zeros(4096)
    for row in range(3000, 4096, 50):
        mass[: row + 1] += ((inputs.q[row, 0] @ inputs.k[: row + 1, 0].T) * inputs.scale).softmax(-1).flip(0)
    near = float(mass[:64].sum() / mass.sum())
    first = float(mass[2900:].sum() / mass.sum())  # distances that lead to the first keys
    assert near > 0.05
    assert near + first > 0.8


# ------------------------------------------------------------------------------------------ command


def test_lengths_are_read() -> None:
    assert parse_lengths("32K, 1m,700") == (32768, 1 << 20, 700)
    for text in ("", "32G", "0", "1,,2", "-5", "9" * 5000):
        with pytest.raises(UsageError, match="is no length"):
            parse_lengths(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention"]) == 5
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "shown"), [(["--rivals", "x"], "--rivals"), (["some-model"], "MODEL"), (["--quick"], "--quick")]
)
def test_options_of_another_benchmark(flags: list[str], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "manifest", *flags]) == 2
    assert f"bench manifest takes no {shown}" in capsys.readouterr().err
