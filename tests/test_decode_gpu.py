"""Decode steps as CUDA graphs against the same steps as they are, bit for bit; and that no step waits for the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_rows import new_engine, random_ids, request, run_rows, word_tokenizer

from longbatch.core import Prompt, Request, Result
from longbatch.engine import Engine, graphs
from longbatch.engine.decode_rows import DecodeRows
from longbatch.models import describe, random_weights
from longbatch.models.decoder import Decoder
from longbatch.prompt import Tokenizer

pytestmark = pytest.mark.gpu

BASE: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama-dynamic": {
        "architectures": ["LlamaForCausalLM"],
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
        "max_position_embeddings": 64,
    },
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 64},
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], "num_local_experts": 16, "sliding_window": 64},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "moe_intermediate_size": 128},
}


def decoder(family: str, weights_dtype: str = "auto") -> Decoder:
    spec = describe({**BASE, **FAMILIES[family]})
    return random_weights(spec, torch.bfloat16, torch.device("cuda"), 0, weights_dtype)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return word_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def rows_of(num_rows: int = 24) -> list[tuple[Request, Prompt]]:
    """Prompts of 1 to 3,000 tokens, answers of 1 to 150: joins and leaves, pages that fill, ranges that grow."""
    rows = []
    for row in range(num_rows):
        own: dict[str, Any] = {"max_tokens": 1 + 41 * row % 150, "stop_token_ids": (7,)}
        if row % 3 == 2:
            own |= {"temperature": 0.8, "top_p": 0.9, "top_k": 100}
        rows.append((request(row, **own), Prompt(random_ids((1, 63, 64, 65, 700, 1020, 3000)[row % 7], row))))
    return rows


def answers(results: dict[Any, Result]) -> dict[int, tuple[Any, ...]]:
    return {r.row: (r.text, r.finish_reason, r.usage.completion_tokens, r.notes) for r in results.values()}


def graphs_of(engine: Engine) -> graphs.StepGraphs:
    found = engine._decoding.batch._graphs
    assert found is not None
    return found


def engine_of(model: Decoder, tokenizer: Tokenizer, **limits: Any) -> Engine:
    return new_engine(model, tokenizer, num_pages=600, **{"decode_rows": 10, "max_tokens": 150, **limits})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv", ["auto", "fp8"])
@pytest.mark.parametrize("weights_dtype", ["auto", "fp8"])
def test_answers_with_and_without_graphs(tokenizer: Tokenizer, family: str, kv: str, weights_dtype: str) -> None:
    model = decoder(family, weights_dtype)
    with_graphs = engine_of(model, tokenizer, kv=kv)
    found = answers(run_rows(with_graphs, rows_of()[:14], rows_of()[14:]))
    assert len(graphs_of(with_graphs)) > 3
    without = engine_of(model, tokenizer, kv=kv)
    graphs_of(without)._has_failed = True
    assert answers(run_rows(without, rows_of()[:14], rows_of()[14:])) == found
    behind = engine_of(model, tokenizer, kv=kv)
    behind._decoding.is_ahead = False
    assert answers(run_rows(behind, rows_of()[:14], rows_of()[14:])) == found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_a_graph_gives_the_same_bits(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, family: str, kv: str
) -> None:
    """Every step that a graph runs is run once more as it is: K/V are written to the same places again."""
    compared: list[graphs.StepShape] = []
    run = graphs.StepGraphs.run

    def both(self: graphs.StepGraphs, shape: graphs.StepShape) -> torch.Tensor:
        logits = run(self, shape)
        if shape in self._graphs:
            assert torch.equal(logits, self._forward(shape, None)), shape
            compared.append(shape)
        return logits

    monkeypatch.setattr(graphs.StepGraphs, "run", both)
    run_rows(engine_of(decoder(family), tokenizer, kv=kv), rows_of())
    assert len(set(compared)) > 3


@pytest.mark.parametrize("kv", ["auto", "fp8"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_step_waits_for_the_host(tokenizer: Tokenizer, kv: str, temperature: float) -> None:
    """Neither as it is nor as a graph, and neither where a row leaves: only the tokens of the step before are read."""
    engine = engine_of(decoder("llama"), tokenizer, kv=kv)
    rows = [
        (request(row, max_tokens=200, temperature=temperature, top_p=0.9), Prompt(random_ids(50 + row, row)))
        for row in range(5)
    ]
    results = engine.run([rows, []])
    decoding, steps = engine._decoding, []
    launch = decoding._launch

    def watched() -> Any:
        steps.append(len(decoding.batch))
        if len(steps) == 60:
            # A row leaves: its place is taken on the device.
            decoding.batch.sequences[1].release(engine.cache.pool)
            decoding.batch.keep([True, False, True, True, True])
        # Captures wait; by now all shapes have come twice, but for that of four rows.
        torch.cuda.set_sync_debug_mode("error" if 10 < len(steps) < 60 or len(steps) > 70 else "default")
        try:
            return launch()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    decoding._launch = watched  # type: ignore[method-assign]
    list(results)
    assert len(steps) > 150
    assert steps[-1] == 4


def test_rows_move_without_waiting(tokenizer: Tokenizer) -> None:
    engine = engine_of(decoder("llama"), tokenizer)
    rows, logits = DecodeRows(engine.cache, 8), torch.zeros(2, 200, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows.take([3, 1], 4)
        rows.writes(4)
        rows.draw(logits, warm=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_capture_that_fails_costs_nothing_but_graphs(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The host asks for a number while a step is captured."""
    model = decoder("llama")
    expected = answers(run_rows(engine_of(model, tokenizer), rows_of()))
    norm = model.final_norm

    def waiting(x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            float(x.sum())
        return norm(x)

    monkeypatch.setattr(model, "final_norm", waiting)
    engine = engine_of(model, tokenizer)
    assert answers(run_rows(engine, rows_of())) == expected
    assert len(graphs_of(engine)) == 0
    assert sum("without CUDA graphs" in record.message for record in caplog.records) == 1


def test_few_graphs_at_a_time(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("llama")
    expected = answers(run_rows(engine_of(model, tokenizer), rows_of()))
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    engine = engine_of(model, tokenizer)
    assert answers(run_rows(engine, rows_of())) == expected
    assert len(graphs_of(engine)) == 2


def test_memory_comes_back(tokenizer: Tokenizer) -> None:
    engine = engine_of(decoder("llama"), tokenizer)
    run_rows(engine, rows_of())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    engine._decoding.batch.release_graphs()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < held
    found = answers(run_rows(engine, rows_of()))
    assert found == answers(run_rows(engine_of(engine.model, tokenizer), rows_of()))


def test_a_model_with_capped_scores_is_not_captured(tokenizer: Tokenizer) -> None:
    spec = describe({**BASE, **FAMILIES["gemma3"], "attn_logit_softcapping": 50.0})
    model = random_weights(spec, torch.bfloat16, torch.device("cuda"), 0)
    engine = engine_of(model, tokenizer)
    assert engine._decoding.batch._graphs is None
    found = run_rows(engine, [row for row in rows_of(4) if len(row[1].ids) < 1000])
    assert {result.status for result in found.values()} == {"ok"}
