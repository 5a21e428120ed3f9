"""The sampler against transformers' own logits processors, and the distribution of its draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from longbatch_kernels import sample as sample_kernel
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from longbatch.core import RowKey, Sampling
from longbatch.engine import sampler
from longbatch.engine.sampler import Draw, row_seed, sample, uniform

VOCABULARY = 50


def random_logits(rows: int, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def draw(step: int = 0, seed: int = 1, seen: Tensor | None = None, **sampling: Any) -> Draw:
    return Draw(Sampling(**sampling), seed, step, seen)


def mask(ids: list[int]) -> Tensor:
    seen = torch.zeros(VOCABULARY, dtype=torch.bool)
    seen[ids] = True
    return seen


def expected_probabilities(logits: Tensor, prompt: list[int], sampling: Sampling) -> Tensor:
    """What transformers samples from: its processors in the order in which `generate` applies them."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        processors.append(MinPLogitsWarper(sampling.min_p))
    return processors(torch.tensor([prompt]), logits[None].clone())[0].softmax(-1)


FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.5},
    "top-k": {"top_k": 7},
    "top-k-1": {"top_k": 1},
    "top-k-beyond": {"top_k": 1000},
    "top-p": {"top_p": 0.8},
    "top-p-tiny": {"top_p": 1e-6},
    "min-p": {"min_p": 0.1},
    "min-p-1": {"min_p": 1.0},
    "penalty": {"repetition_penalty": 1.7},
    "reward": {"repetition_penalty": 0.6},
    "all": {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.03, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("name", FILTERS)
def test_the_distribution_is_that_of_transformers(name: str) -> None:
    """4,000 draws: only kept tokens, each as often as its probability says (five standard deviations)."""
    settings = {"temperature": 1.0, **FILTERS[name]}
    logits, prompt, count = random_logits(1, 3), [4, 9, 9, 30, 41], 4000
    expected = expected_probabilities(logits[0], prompt, Sampling(**settings))
    seen = mask(prompt) if "repetition_penalty" in settings else None
    draws = [draw(step, seen=seen, **settings) for step in range(count)]
    found = sample(logits.expand(count, -1), draws).tokens.bincount(minlength=VOCABULARY)
    assert not found[expected == 0].any(), "a token was drawn that transformers filters out"
    deviation = (expected * (1 - expected) * count).sqrt()
    assert ((found - expected * count).abs() <= 5 * deviation + 1).all()


@pytest.mark.parametrize("name", FILTERS)
def test_the_kept_set_is_that_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draw inverts the cumulative distribution: a fine grid of points finds every kept token and its width."""
    settings = {"temperature": 1.0, **FILTERS[name]}
    logits, prompt, count = random_logits(1, 5), [1, 2, 3, 44], 20_000
    expected = expected_probabilities(logits[0], prompt, Sampling(**settings))
    seen = mask(prompt) if "repetition_penalty" in settings else None
    monkeypatch.setattr(sampler, "uniform", lambda seeds, steps: (steps + 0.5) / count)
    draws = [draw(step, seen=seen, **settings) for step in range(count)]
    found = sample(logits.expand(count, -1), draws).tokens.bincount(minlength=VOCABULARY) / count
    assert (found - expected).abs().max() <= 1.5 / count
    assert not found[expected == 0].any()


def test_the_last_point_takes_a_kept_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sampler, "uniform", lambda seeds, steps: torch.full_like(seeds, 1 - 2.0**-53, dtype=torch.double)
    )
    logits = random_logits(1)
    chosen = int(sample(logits, [draw(temperature=1.0, top_k=5)]).tokens)
    assert chosen in logits[0].topk(5).indices.tolist()


def test_greedy_takes_the_largest_logit() -> None:
    logits = random_logits(20)
    assert sample(logits, [draw(step) for step in range(20)]).tokens.equal(logits.argmax(-1))


def test_greedy_with_a_penalty() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[:, 7], logits[:, 8] = 3.0, 2.0
    draws = [draw(repetition_penalty=2.0, seen=mask([7])), draw()]
    assert sample(logits, draws).tokens.tolist() == [8, 7]
    assert logits[0, 7] == 3.0, "the caller's logits are untouched"
    negative = torch.full((1, VOCABULARY), -2.0)
    negative[0, 7] = -1.5
    assert int(sample(negative, [draw(repetition_penalty=2.0, seen=mask([7]))]).tokens) != 7


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(8) * 50
    draws = [draw(step, temperature=temperature) for step in range(8)]
    assert sample(logits, draws).tokens.equal(logits.argmax(-1))


def test_the_same_token_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(24, 9, 1000)
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 40, "top_p": 0.9}]
    draws = [draw(step, seed=step * 77, logprobs=2, **settings[step % 3]) for step in range(24)]
    together = sample(logits, draws)
    alone = [sample(logits[b : b + 1], draws[b : b + 1]) for b in range(24)]
    backwards = sample(logits.flip(0), draws[::-1])
    assert together.tokens.tolist() == [int(choice.tokens) for choice in alone]
    assert together.tokens.tolist() == backwards.tokens.tolist()[::-1]
    assert together.logprobs == [choice.logprobs[0] for choice in alone]
    monkeypatch.setattr(sample_kernel, "_SORTED", 3000)
    assert sample(logits, draws).tokens.equal(together.tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_are_told_row_by_row(temperature: float) -> None:
    logits = random_logits(6)
    clean = sample(logits, [draw(step, temperature=temperature) for step in range(6)])
    logits[1, 3] = float("nan")
    logits[2] = float("nan")
    logits[3, 5] = float("inf")
    logits[4] = float("-inf")
    choice = sample(logits, [draw(step, temperature=temperature, logprobs=1) for step in range(6)])
    assert choice.finite == [True, False, False, False, False, True]
    assert choice.tokens[[0, 5]].equal(clean.tokens[[0, 5]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_at_minus_infinity_are_never_chosen(temperature: float) -> None:
    logits = torch.full((50, VOCABULARY), float("-inf"))
    logits[:, 17] = -4.0
    choice = sample(logits, [draw(step, temperature=temperature) for step in range(50)])
    assert all(choice.finite)
    assert choice.tokens.tolist() == [17] * 50


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    logits = random_logits(4)
    expected = logits.log_softmax(-1)
    draws = [
        draw(logprobs=3),
        draw(),
        draw(temperature=0.5, logprobs=0),
        draw(repetition_penalty=3.0, seen=mask([int(logits[3].argmax())]), logprobs=500),
    ]
    choice = sample(logits, draws)
    assert choice.logprobs[1] is None
    for b, count in ((0, 3), (2, 0), (3, VOCABULARY)):
        found = choice.logprobs[b]
        assert found is not None
        chosen, top = found
        assert chosen == pytest.approx(float(expected[b, choice.tokens[b]]), abs=1e-6)
        values, ids = expected[b].topk(count)
        assert [id for id, _ in top] == ids.tolist()
        assert [value for _, value in top] == pytest.approx(values.tolist(), abs=1e-6)


def test_numbers_are_uniform_and_differ_by_seed_and_step() -> None:
    numbers = uniform(torch.arange(50).repeat_interleave(100), torch.arange(100).repeat(50))
    assert len(numbers.unique()) == 5000
    assert 0 <= numbers.min() < 0.002
    assert 0.998 < numbers.max() < 1
    histogram = torch.histc(numbers, 20, 0, 1)
    assert ((histogram - 250).abs() < 5 * 250**0.5).all()


def test_seeds() -> None:
    key, plain = RowKey("a", None, 0), Sampling()
    assert row_seed(0, key, plain) == row_seed(0, key, plain)
    others = [
        row_seed(1, key, plain),
        row_seed(0, RowKey("b", None, 0), plain),
        row_seed(0, RowKey(None, 7, 0), plain),
        row_seed(0, RowKey("7", None, 0), plain),
        row_seed(0, RowKey("a", None, 1), plain),
        row_seed(0, key, Sampling(seed=0)),
    ]
    assert len({row_seed(0, key, plain), *others}) == 7
    own = Sampling(seed=5)
    assert row_seed(0, key, own) == row_seed(9, RowKey("b", None, 0), own), "a row's own seed is all that counts"
    assert row_seed(0, key, own) != row_seed(0, RowKey("a", None, 1), own)
