"""`longbatch bench prefill` at small size: the workload is what runs, and every figure is there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longbatch.attention.selection import merged_ranges
from longbatch.bench import prefill, vs_workload
from longbatch.bench.attention_inputs import selections
from longbatch.bench.limits import Limits
from longbatch.bench.llama import LlamaShape
from longbatch.bench.prefill_workload import workload_layers
from longbatch.errors import DeviceError

SHAPE = LlamaShape(
    hidden=64, intermediate=96, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=16, vocab=97, max_length=4096
)
MODEL = prefill.Model(SHAPE, torch.float32)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "CHECK_TOKENS", 256)
    monkeypatch.setattr(prefill, "WARM_TOKENS", 64)
    monkeypatch.setattr(prefill, "LIMIT_SECONDS", 0.01)
    # Budgets that leave something out at a few hundred tokens.
    classes = ((40, 120), (30, 100), (35, 110), (100, 100), (60, 105))
    monkeypatch.setattr(vs_workload, "CLASSES", classes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_needs_a_gpu() -> None:
    with pytest.raises(DeviceError, match="CUDA"):
        list(prefill.measure())


@pytest.mark.parametrize("shared", [False, True])
def test_what_runs_is_the_workload(shared: bool) -> None:
    layers = workload_layers(MODEL.spec, 500, CPU, shared=shared)
    assert [len(layer.patterns.heads) for layer in layers] == [2 if shared else 8] * 3
    layer = layers[0]
    assert layer.patterns.shared == shared
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(500, heads, 16, generator=generator) for heads in (8, 2))
    selection = layer.select(q[-64:], k, k, q_offset=436, rows=(0, 500))
    ((ranges, _),) = selection.ranges
    mix = (vs_workload.shared_layers() if shared else vs_workload.layers())[0]
    wanted = selections(mix[: len(layer.patterns.heads)], 500)
    for place, one in enumerate(wanted):
        assert ranges.columns[place, : ranges.column_counts[place]].tolist() == one.columns.tolist()
        starts, _, counts = merged_ranges(torch.from_numpy(one.distances)[None])
        assert ranges.starts[place, : ranges.counts[place]].tolist() == starts[0, : counts[0]].tolist()
    assert 0 < float(selection.pairs) < 8 * 500 * 501 / 2


def test_a_prompt_of_another_length_is_refused() -> None:
    (layer, *_) = workload_layers(MODEL.spec, 500, CPU, shared=False)
    q, k = torch.zeros(64, 8, 16), torch.zeros(400, 2, 16)
    with pytest.raises(ValueError, match="500 tokens"):
        layer.select(q, k, k, q_offset=336, rows=(0, 400))


def test_the_estimate_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs time, so it is part of what is timed, though its sums are not used."""
    asked = []
    monkeypatch.setattr("longbatch_kernels.last_query.last_query_ref", lambda *args, **rest: asked.append(rest))
    (layer, *_) = workload_layers(MODEL.spec, 300, CPU, shared=True)
    q, k = torch.zeros(64, 8, 16), torch.zeros(300, 2, 16)
    layer.select(q, k, k, q_offset=236, rows=(0, 300))
    assert [rest["q_offset"] for rest in asked] == [236]


@pytest.mark.parametrize("weights_dtype", ["auto", "fp8"])
def test_every_figure_is_there(weights_dtype: str) -> None:
    model = replace(MODEL, weights_dtype=weights_dtype)
    rows = list(prefill.compare(model, [300], CPU, repeats=1))
    assert all(row.checked for row in rows)
    assert rows[0].metric == "hidden state"
    # Both sides are float32 by masks here; one of them rounds the inputs of its products to e4m3.
    assert (1e-3 < rows[0].value < 0.1) if weights_dtype == "fp8" else rows[0].value < 1e-5
    for mode in prefill.MODES.values():
        own = [row for row in rows if row.case == f"longbatch, {mode}, {model.name}, 300 tokens"]
        assert [(row.metric, row.against) for row in own] == [
            ("prefill", prefill.PRODUCTS),
            ("prefill", prefill.DENSE),
            ("density", None),
        ]
        assert own[0].value > 0
        assert 0 < own[2].value < 1
    assert any(row.case.startswith(prefill.DENSE) and row.value > 0 for row in rows)


def test_a_wrong_result_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the way of a long prompt, which is not run before."""
    monkeypatch.setattr(prefill, "LONG", 100)
    monkeypatch.setattr(prefill, "MOST_ERROR", {"auto": -1.0})
    monkeypatch.setattr(prefill, "measure_limits", lambda *_, **__: Limits(128, (1e-5,) * 4, 1e10))
    rows = list(prefill.compare(MODEL, [300], CPU, repeats=1))
    assert {row.checked for row in rows if row.case.startswith("longbatch")} == {False}


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("range_attention_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_knob_7_128x128", "attention"),
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopA_NTT", "GEMM"),
        ("column_bits_kernel", "index"),
        ("last_query_sums_kernel", "index"),
        ("void at::native::elementwise_kernel<128, 4>", "elementwise"),
    ],
)
def test_kernels_are_told_apart(kernel: str, part: str) -> None:
    assert prefill.part_of(kernel) == part
