"""The predicted peak of a wave against the one measured: all tensors of a real run, watched operation by operation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from test_plan_memory import LLAMA_8B, SMALL

from longbatch import models
from longbatch.attention import dense
from longbatch.bench import live_bytes, memory, vs_workload
from longbatch.bench.llama import SHAPES, LlamaShape
from longbatch.bench.memory import Case
from longbatch.config.kv_formats import kv_format, plain_format
from longbatch.models.spec import ModelSpec
from longbatch.plan import budget
from longbatch.plan.layer_memory import Formats
from longbatch.plan.peak import Work, predict

CPU = torch.device("cpu")
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
LLAMA = LlamaShape(128, 384, 3, 8, 2, 16, vocab=200, max_length=1 << 16)
QWEN = LlamaShape(192, 512, 3, 6, 2, 32, vocab=500, max_length=1 << 16, family="qwen2")
# Everything is small beside one matrix, or beside the logits.
WIDE = LlamaShape(128, 2048, 2, 8, 8, 16, vocab=200, max_length=1 << 16)
WORDS = LlamaShape(64, 96, 2, 4, 2, 16, vocab=20_000, max_length=1 << 16)

CASES: list[tuple[LlamaShape, Case, int, torch.dtype]] = [
    (LLAMA, Case("long", (4096,)), 512, FLOAT32),
    (LLAMA, Case("long", (4096,), "fp8"), 512, FLOAT32),
    (LLAMA, Case("long", (4096,), kv_dtype="fp8"), 512, FLOAT32),
    (LLAMA, Case("long", (4096,)), 512, BFLOAT16),
    (LLAMA, Case("one tile", (400,)), 512, FLOAT32),
    (LLAMA, Case("one tile", (400,), "fp8"), 512, BFLOAT16),
    (LLAMA, Case("packed", (128,) * 32), 512, FLOAT32),
    (LLAMA, Case("packed", (100,) * 32, "fp8", "fp8"), 512, FLOAT32),
    (LLAMA, Case("chunks", (4000,), chunk=1024), 512, FLOAT32),
    (LLAMA, Case("chunks", (4000,), "fp8", "fp8", chunk=2048), 512, BFLOAT16),
    (LLAMA, Case("chunks", (4000,), kv_dtype="bf16", chunk=1024), 512, FLOAT32),
    (QWEN, Case("long", (4096,)), 512, FLOAT32),
    (QWEN, Case("chunks", (3000,), kv_dtype="fp8", chunk=512), 256, FLOAT32),
    (LLAMA, Case("all read", (3000,), task="embed"), 512, FLOAT32),
    (LLAMA, Case("all read", (300,) * 8, task="embed"), 512, BFLOAT16),
    (LLAMA, Case("sparse", (2048,), sparse=True), 512, FLOAT32),
    (QWEN, Case("sparse", (2048,), "fp8", sparse=True), 512, FLOAT32),
    (WIDE, Case("sparse masks", (4096,), sparse=True), 1024, FLOAT32),
    (LLAMA, Case("sparse chunks", (3000,), kv_dtype="fp8", chunk=1024, sparse=True), 512, FLOAT32),
    (WORDS, Case("logits", (60,) * 40), 512, FLOAT32),
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    # Budgets that leave something out at a few thousand tokens.
    monkeypatch.setattr(vs_workload, "CLASSES", ((300, 900), (30, 800), (100, 800), (400, 100), (200, 300)))
    dense._band.cache_clear()


def ratios(case: Case, spec: ModelSpec, tile_rows: int, dtype: torch.dtype) -> tuple[float, float]:
    """The measured peak over the predicted one: as a whole, and without weights and pages."""
    peak = memory.predicted(case, spec, dtype, CPU, tile_rows)
    measured, results = memory.run(case, spec, dtype, CPU, tile_rows)
    assert [result.error for result in results] == [None] * len(case.lengths)
    known = sum(num_bytes for part, num_bytes in peak.parts if part in memory.KNOWN)
    assert known < 0.9 * peak.num_bytes
    return measured / peak.num_bytes, (measured - known) / (peak.num_bytes - known)


@pytest.mark.parametrize(
    ("shape", "case", "tile_rows", "dtype"), CASES, ids=[f"{case.shape}-{i}" for i, (_, case, *_) in enumerate(CASES)]
)
def test_the_peak_is_what_was_predicted(shape: LlamaShape, case: Case, tile_rows: int, dtype: torch.dtype) -> None:
    whole, beside = ratios(case, models.describe(shape.config()), tile_rows, dtype)
    assert whole == pytest.approx(1, abs=0.05)
    assert beside == pytest.approx(1, abs=0.05)


def family(case: str, **changes: Any) -> ModelSpec:
    """A model of a family, a little larger than in the parity tests."""
    config_class, settings = tiny_models.CASES[case]
    larger = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "max_position_embeddings": 4096}
    config = getattr(transformers, config_class)(**{**tiny_models.SIZES, **larger, **settings, **changes})
    architecture = config_class.replace("TextConfig", "ForCausalLM").replace("Config", "ForCausalLM")
    return models.describe({**config.to_dict(), "architectures": [architecture]})


@pytest.mark.parametrize(
    ("name", "changes", "weights_dtype"),
    [
        ("qwen3", {}, "auto"),
        ("qwen3_moe", {}, "fp8"),
        ("mistral-window", {"sliding_window": 256}, "auto"),
        ("phi3", {}, "fp8"),
        ("gemma3", {"sliding_window": 512}, "auto"),
        ("gpt_oss", {"layer_types": None, "sliding_window": 300}, "auto"),
    ],
)
def test_families(name: str, changes: dict[str, Any], weights_dtype: str) -> None:
    whole, beside = ratios(Case(name, (3000,), weights_dtype), family(name, **changes), 512, FLOAT32)
    assert whole == pytest.approx(1, abs=0.05)
    assert beside == pytest.approx(1, abs=0.05)


def test_scores_count_what_their_sum_takes_inside() -> None:
    """As much as the logits themselves, which is not seen from outside the operation."""
    spec = models.describe(WORDS.config())
    case = Case("scores", (1000,), task="score")
    peak = memory.predicted(case, spec, FLOAT32, CPU, 512)
    measured, _ = memory.run(case, spec, FLOAT32, CPU, 512)
    assert peak.moment == "scores"
    assert measured + dict(peak.parts)["logits"] / 2 == pytest.approx(peak.num_bytes, rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case("smollm2-135m", (20_000,)),
        Case("smollm2-135m", (40_000,), "fp8", "fp8", chunk=16_384),
        Case("smollm2-135m", (700,) * 40),
        Case("smollm2-135m", (50_000,), sparse=True),
        Case("smollm2-135m", (30_000,), weights="host"),
    ],
    ids=lambda case: case.name,
)
def test_the_allocators_peak_on_a_gpu(case: Case) -> None:
    rows = memory.compare(case, SHAPES[case.shape], BFLOAT16, torch.device("cuda", 0), 8192)
    assert rows[-1].checked
    assert rows[-1].ratio == pytest.approx(1, abs=0.15)


def test_a_case_is_a_few_rows_of_a_table() -> None:
    case = Case("llama", (600, 500), "fp8", "fp8")
    rows = memory.compare(case, LLAMA, FLOAT32, CPU, 512)
    assert all(row.checked for row in rows)
    found = {row.metric: row for row in rows}
    parts = [row.value for row in rows if row.metric.startswith("predicted: ")]
    assert sum(parts) == pytest.approx(found["predicted"].value)
    assert found["measured"].ratio == pytest.approx(1, abs=0.05)
    assert found["measured"].against == "predicted"
    assert found["measured beside weights and pages"].value < found["measured"].value


def test_a_wave_that_fails_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*_: object, **__: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("longbatch.engine.engine.prefill", torn)
    rows = memory.compare(Case("llama", (600,)), LLAMA, FLOAT32, CPU, 512)
    assert not rows[-1].checked


def test_the_benchmarks_cases_are_enough_and_fit() -> None:
    assert len(memory.CASES) >= 12
    assert len({case.shape for case in memory.CASES}) == 3
    for case in memory.CASES:
        spec = models.describe(SHAPES[case.shape].config())
        formats = Formats(2, case.weights_dtype, kv_format(case.kv_dtype, "bfloat16"), True, multiplies_fp8=True)
        patterns = memory.patterns_of(spec) if case.sparse else None
        work = Work(case.lengths, 8192, case.chunk or sum(case.lengths), 64, patterns=patterns, max_tokens=4)
        assert predict(spec, formats, work, 0).num_bytes < 10 << 30


# ------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize("weights_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("spec", [LLAMA_8B, replace(SMALL, layers=SMALL.layers * 4)], ids=["8b", "small"])
def test_a_budget_holds_what_is_predicted(spec: ModelSpec, on_gpu: bool, kv_dtype: str, weights_dtype: str) -> None:
    """The longest wave, whatever it is made of, in what the budget set aside for it."""
    width = 2 if on_gpu else 4
    kv = kv_format(kv_dtype, "bfloat16" if on_gpu else "float32")
    shares = budget(
        spec, 141 << 30, width, kv, on_gpu, decode_rows=64, weights_dtype=weights_dtype, multiplies_fp8=on_gpu
    )
    formats = Formats(width, weights_dtype, kv, on_gpu, multiplies_fp8=on_gpu)
    parts = dict(shares.parts)
    pages, wave, tile = shares.kv_tokens, shares.wave_tokens, shares.tile_tokens
    waves = [(wave,), (tile,), (wave // 64,) * 64, (tile - 1,) * (wave // tile), (3 * wave,)]
    for lengths in waves:
        if max(lengths) > spec.max_length or sum(lengths) > pages:
            continue
        for reads_all in (False, True):
            work = Work(lengths, tile, wave, pages, num_open=64, max_tokens=8, reads_all=reads_all)
            found = predict(spec, formats, work, parts["weights"])
            own = found.num_bytes - dict(found.parts).get("cuBLAS", 0)
            assert own <= shares.used_bytes - parts["reserve"]


def test_what_is_known_is_summed() -> None:
    formats = Formats(2, "auto", plain_format("bfloat16"), True)
    peak = predict(LLAMA_8B, formats, Work((100,), 8192, 8192, 640), 1000)
    parts = dict(peak.parts)
    assert parts["weights"] == 1000
    assert parts["K/V pages"] == (640 + 64) * 2 * 8 * 128 * 32 * 2
    assert sum(parts.values()) == peak.num_bytes
    longer = predict(LLAMA_8B, formats, Work((100_000,), 8192, 8192, 640), 1000)
    chunked = predict(LLAMA_8B, formats, Work((100_000,), 8192, 100_000, 640), 1000)
    assert peak.num_bytes < longer.num_bytes < chunked.num_bytes


# ------------------------------------------------------------------------------------- watching tensors


def test_bytes_are_counted_while_they_are_held() -> None:
    before = torch.zeros(500)
    with live_bytes.watched(CPU) as watch:
        first = torch.ones(1000)
        view = first[10:].view(-1, 2)
        assert watch.peak == 4000
        # A storage that was there counts from its first use on.
        before.add_(1)
        assert watch.peak == 6000
        del first
        second = view * 2
        assert watch.peak == 6000 + 3960
        del view, second
        watch.reset()
        assert watch.peak == 2000
        torch.ones(10)
        torch.ones(10)
        assert watch.peak == 2040


@pytest.mark.gpu
def test_a_gpu_is_asked() -> None:
    device = torch.device("cuda", 0)
    with live_bytes.watched(device) as watch:
        watch.reset()
        start = watch.peak
        held = torch.empty(1 << 22, dtype=torch.uint8, device=device)
        assert watch.peak - start == held.nbytes
