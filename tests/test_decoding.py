"""Steps that begin before the one before them is read give the same results; what surplus steps computed shows nowhere.

On a CPU nothing is asynchronous, but what runs when is the same as on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_rows import new_engine, random_ids, request, run_rows, tiny_decoder, word_tokenizer

from longbatch.core import Prompt, Request, Result
from longbatch.engine.decode import DecodeBatch
from longbatch.engine.decoding import Decoding
from longbatch.models.decoder import Decoder
from longbatch.prompt import Tokenizer

Row = tuple[Request, Prompt]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return word_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Watch:
    """The rows of every step, and how many tokens the host had read of each of them when it began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[dict[int, int]] = []
        forward = DecodeBatch.forward

        def watched(batch: DecodeBatch) -> torch.Tensor:
            self.steps.append({s.request.row: s.stop.num_tokens for s in batch.sequences if s.stop is not None})
            return forward(batch)

        monkeypatch.setattr(DecodeBatch, "forward", watched)


def rows_of(ends: frozenset[int] = frozenset(), **fields: Any) -> list[Row]:
    """Sixteen rows of 1 to 330 tokens with answers of 1 to 30, of which every third draws and some share a beginning;
    some stop at `ends`, by token or by string."""
    rows, shared = [], random_ids(130, 99)
    for row in range(16):
        ids = random_ids((1, 5, 63, 64, 65, 128, 200, 330)[row % 8], row)
        ids = np.concatenate([shared, ids]) if row % 4 == 3 else ids
        own: dict[str, Any] = {"max_tokens": 1 + 7 * row % 30, **fields}
        if row % 3 == 2:
            own |= {"temperature": 0.9, "top_p": 0.95, "top_k": 150}
        if row % 3 == 0:
            own |= {"stop_token_ids": tuple(ends)}
        elif row % 3 == 1:
            own |= {"stop": tuple(f"w{id} " for id in ends)}
        rows.append((request(row, **own), Prompt(ids)))
    return rows


def answers(results: dict[Any, Result]) -> dict[int, tuple[Any, ...]]:
    """All that a row's result says but times."""
    return {
        r.row: (r.text, r.finish_reason, r.usage.completion_tokens, r.notes, r.error and r.error.type, r.logprobs)
        for r in results.values()
    }


def both(model: Decoder, tokenizer: Tokenizer, waves: list[list[Row]], **limits: Any) -> dict[int, tuple[Any, ...]]:
    """The answers, which must be the same whether steps begin ahead or not, and so must the counts."""
    found, counted = [], []
    for is_ahead in (False, True):
        engine = new_engine(model, tokenizer, **limits)
        engine._decoding.is_ahead = is_ahead
        results = run_rows(engine, *waves)
        found.append(answers(results))
        counted.append((engine.counters.decode_tokens, engine.counters.prefill_tokens))
        shares = sum(result.usage.gpu_seconds for result in results.values())
        assert shares == pytest.approx(engine.counters.busy_seconds, rel=0.02)
    assert found[0] == found[1]
    assert counted[0] == counted[1]
    if not any(answer[4] for answer in found[0].values()):
        assert counted[0][0] == sum(answer[2] for answer in found[0].values()) - len(found[0])
    return found[0]


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({}, id="together"),
        pytest.param({"decode_rows": 3}, id="few-decode"),
        pytest.param({"num_pages": 8}, id="small-cache"),
        pytest.param({"kv": "fp8"}, id="fp8"),
        pytest.param({"kv": "fp8", "decode_rows": 2, "num_pages": 10}, id="fp8-small"),
    ],
)
def test_rows_that_end_by_their_limit(model: Decoder, tokenizer: Tokenizer, limits: dict[str, Any]) -> None:
    rows = rows_of()
    found = both(model, tokenizer, [rows[:9], rows[9:]], **limits)
    assert {answer[1] for answer in found.values()} == {"length"}
    assert [found[row][2] for row in range(16)] == [1 + 7 * row % 30 for row in range(16)]


@pytest.mark.parametrize("limits", [{}, {"decode_rows": 3}, {"num_pages": 10, "kv": "fp8"}])
def test_rows_that_end_by_themselves(model: Decoder, tokenizer: Tokenizer, limits: dict[str, Any]) -> None:
    """Found out one step late; their pages go to others at once."""
    rows = rows_of(frozenset(range(3, 40)), max_tokens=60)
    found = both(model, tokenizer, [rows], **limits)
    assert sum(answer[1] == "stop" for answer in found.values()) >= 8
    assert len({answer[2] for answer in found.values()}) > 4


def test_the_last_step_is_known_and_any_other_end_is_one_late(
    model: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(40, 0)
    (plain,) = run_rows(new_engine(model, tokenizer), [(request(0, max_tokens=12), Prompt(ids))]).values()
    assert plain.text is not None
    end = int(plain.text.split()[6][1:])
    length = plain.text.split().index(f"w{end}") + 1
    for stop, num_steps in (((), 11), ((end,), length)):
        watch = Watch(monkeypatch)
        engine = new_engine(model, tokenizer)
        engine._decoding.is_ahead = True
        (result,) = run_rows(engine, [(request(0, max_tokens=12, stop_token_ids=stop), Prompt(ids))]).values()
        assert result.usage.completion_tokens == (length if stop else 12)
        assert len(watch.steps) == num_steps
        assert [step[0] for step in watch.steps] == [1, *range(1, num_steps)], "the host is one token behind"
        monkeypatch.undo()


def test_rows_that_ask_for_more_are_not_overtaken(
    model: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)
    both(model, tokenizer, [rows_of(logprobs=2)])
    both(model, tokenizer, [rows_of(repetition_penalty=1.5)])
    for step, following in zip(watch.steps, watch.steps[1:], strict=False):
        for row in step.keys() & following.keys():
            assert following[row] in (1, step[row] + 1)


def test_the_same_token_with_and_without_logprobs(model: Decoder, tokenizer: Tokenizer) -> None:
    rows = rows_of(temperature=1.2)
    plain = both(model, tokenizer, [rows])
    asking = both(model, tokenizer, [rows_of(temperature=1.2, logprobs=1)])
    assert {row: answer[0] for row, answer in plain.items()} == {row: answer[0] for row, answer in asking.items()}


def test_numbers_that_cannot_be_used(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Token 20's embedding is NaN; rows that sample it fail, and leave NaN in pages that others take over."""
    model = tiny_decoder(tmp_path)
    rows = rows_of(max_tokens=50, temperature=3.0)
    model._embed[20] = float("nan")
    found = both(model, tokenizer, [rows], num_pages=14)
    failed = [answer for answer in found.values() if answer[4] == "nonfinite_logits"]
    assert 0 < len(failed) < 16


@pytest.mark.parametrize("step", [0, 1, 2, 5])
def test_a_step_that_fails(model: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Memory runs out in a step and in the next one: half of the rows wait. What is read late is not lost."""
    rows = rows_of(frozenset(range(3, 20)), max_tokens=20)
    expected = both(model, tokenizer, [rows])
    forward, asked = DecodeBatch.forward, []

    def failing(batch: DecodeBatch) -> torch.Tensor:
        asked.append(len(batch))
        if step < len(asked) <= step + 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(batch)

    monkeypatch.setattr(DecodeBatch, "forward", failing)
    engine = new_engine(model, tokenizer)
    engine._decoding.is_ahead = True
    found = answers(run_rows(engine, rows))
    assert any("halved" in note for answer in found.values() for note in answer[3])
    assert {row: (*a[:3], *a[4:]) for row, a in found.items()} == {row: (*a[:3], *a[4:]) for row, a in expected.items()}


def test_tokens_that_cannot_be_fetched_are_not_drawn_again(
    model: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are past them by then: going on would leave a token out of the answer."""

    def fails(decoding: Decoding) -> None:
        raise RuntimeError("no page-locked memory")

    monkeypatch.setattr(Decoding, "_event", fails)
    with pytest.raises(RuntimeError, match="no page-locked memory"):
        run_rows(new_engine(model, tokenizer), rows_of(frozenset(range(3, 20)), max_tokens=20))


@pytest.mark.parametrize("question", [3, 6])
def test_a_stop_while_a_step_is_under_way(model: Decoder, tokenizer: Tokenizer, question: int) -> None:
    engine = new_engine(model, tokenizer, kv="fp8")
    engine._decoding.is_ahead = True
    asked = []

    def should_stop() -> bool:
        asked.append(True)
        return len(asked) >= question

    list(engine.run([rows_of(max_tokens=20)], should_stop))
    assert engine.cache.pool.num_free == engine.cache.pool.num_pages
    assert engine.cache.pool.num_free_open == engine.cache.pool.num_open
    expected = answers(run_rows(new_engine(model, tokenizer, kv="fp8"), rows_of()))
    assert answers(run_rows(engine, rows_of())) == expected
