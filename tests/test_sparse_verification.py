"""The gap between sparse and dense prefill, measured by the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_rows import new_engine, random_ids, request, run_rows
from sparse_engines import (
    EVERYTHING,
    SOME,
    Row,
    logprobs,
    model,
    models,
    only,
    score,
    sparse_engine,
    tokenizer,
)

from longbatch.core import Prompt, Result
from longbatch.engine import Engine
from longbatch.engine.verification import VerifyingEngine
from longbatch.models.decoder import Decoder
from longbatch.prompt import Tokenizer

__all__ = ["model", "models", "tokenizer"]


def verified(engine: Engine, rows: list[Row]) -> dict[Any, Result]:
    return {result.key: result for result in VerifyingEngine(engine).run([rows])}


def test_the_gap_is_that_of_the_log_probabilities(model: Decoder, tokenizer: Tokenizer) -> None:
    """Scored tokens, the tokens of an answer under both, and the sums of labels."""
    prompt = random_ids(200, 3)
    branches = (np.array([5], np.int32), np.array([6, 7], np.int32))
    rows = [
        score(0, 150),
        (request(1, max_tokens=5), Prompt(prompt)),
        (request(2, "classify", labels=("w5", "w6 w7")), Prompt(prompt, branches=branches)),
        (request(3, "embed"), Prompt(prompt)),
    ]
    found = verified(sparse_engine(model, tokenizer, SOME[0]), rows)
    with_logprobs = [(replace(r, sampling=replace(r.sampling, logprobs=0)), p) for r, p in rows]
    sparse = [next(iter(run_rows(sparse_engine(model, tokenizer, SOME[0]), [row]).values())) for row in with_logprobs]
    answer = np.array([entry.id for entry in sparse[1].logprobs or ()], dtype=np.int32)
    given = request(1, "score"), Prompt(np.concatenate([prompt, answer]), scored=(200, 205))
    dense_rows = [rows[0], given, rows[2]]
    dense = [next(iter(run_rows(new_engine(model, tokenizer), [row]).values())) for row in dense_rows]
    for (own, _), one, other in zip(rows, sparse, dense, strict=False):
        gap = np.abs(logprobs(one) - logprobs(other)).mean()
        assert gap > 1e-3
        assert found[own.key].attention_gap == pytest.approx(gap, abs=1e-6)
    assert found[rows[3][0].key].attention_gap is None
    for result in found.values():
        assert (result.text, result.label, result.embedding, result.logprobs) == (None, None, None, None)
        assert result.attention_mode == "sparse"


def test_a_gap_does_not_depend_on_what_else_is_measured(model: Decoder, tokenizer: Tokenizer) -> None:
    """Rows that begin alike are measured each by itself."""
    beginning, text = random_ids(128, 1), "vertical_slash:vertical=10,slash=70"
    rows = [(request(i), Prompt(np.concatenate([beginning, random_ids(70 + i, 50 + i)]))) for i in range(3)]
    together = verified(sparse_engine(model, tokenizer, text), rows)
    for row in rows:
        alone = only(verified(sparse_engine(model, tokenizer, text), [row]))
        assert together[row[0].key].attention_gap == alone.attention_gap
        assert together[row[0].key].usage.cached_tokens == 0


def test_everything_selected_has_no_gap(model: Decoder, tokenizer: Tokenizer) -> None:
    rows = [score(0, 150), (request(1, max_tokens=20), Prompt(random_ids(70, 1)))]
    for result in verified(sparse_engine(model, tokenizer, EVERYTHING[2]), rows).values():
        assert (result.attention_gap or 0) < 1e-5


def test_long_rotations_go_by_the_length_that_the_row_might_have_had(
    models: Callable[[str], Decoder], tokenizer: Tokenizer
) -> None:
    """The answer ends below the length at which the frequencies change, the row could have gone beyond it."""
    model = models("phi3-longrope-long")
    rows = [(request(0, max_tokens=60, stop_token_ids=tuple(range(3, 200))), Prompt(random_ids(100, 1)))]
    result = only(verified(sparse_engine(model, tokenizer, EVERYTHING[0]), rows))
    assert result.usage.completion_tokens < 28
    assert (result.attention_gap or 0) < 1e-5


def test_a_stop_gives_no_half_measured_row(model: Decoder, tokenizer: Tokenizer) -> None:
    for allowed in range(4):
        asked = iter([False] * allowed + [True] * 9)
        engine = VerifyingEngine(sparse_engine(model, tokenizer, SOME[0]))
        results = list(engine.run([[score(0, 100)]], lambda asked=asked: next(asked)))
        assert [result.attention_gap is not None for result in results] == [True] * len(results)
        assert len(results) == (allowed >= 2)


def test_a_row_that_fails_dense_is_an_error(
    model: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sparse_engine(model, tokenizer, SOME[0])
    steps = 0

    def failing(*arguments: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if engine.attention is None:
            raise RuntimeError("a fault of the dense run")
        return prefill(*arguments)

    from longbatch.engine.prefill import prefill

    monkeypatch.setattr("longbatch.engine.engine.prefill", failing)
    result = only(verified(engine, [score(0, 100)]))
    assert result.error is not None
    assert (result.error.type, result.attention_gap) == ("internal", None)
