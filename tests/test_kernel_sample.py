"""The sampling kernels against their reference, token by token: interpreted on a CPU, compiled where there is a GPU."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from longbatch_kernels.sample import (
    WEIGHT_BITS,
    sample_by_kernel,
    sample_ref,
    uniform_by_kernel,
    uniform_ref,
    weights_ref,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# (temperature, top-k, top-p, min-p)
SETTINGS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "greedy-filtered": (0.0, 5, 0.5, 0.1),
    "plain": (1.0, 0, 1.0, 0.0),
    "cold": (0.05, 0, 1.0, 0.0),
    "hot": (30.0, 0, 1.0, 0.0),
    "top-k": (1.0, 7, 1.0, 0.0),
    "top-k-1": (1.0, 1, 1.0, 0.0),
    "top-k-beyond": (1.0, 1000, 1.0, 0.0),
    "top-p": (1.0, 0, 0.9, 0.0),
    "top-p-wide": (5.0, 0, 0.999, 0.0),
    "top-p-tiny": (1.0, 0, 1e-6, 0.0),
    "min-p": (1.0, 0, 1.0, 0.05),
    "min-p-1": (1.0, 0, 1.0, 1.0),
    "top-k-p": (2.0, 20, 0.7, 0.0),
    "all": (1.3, 40, 0.95, 0.02),
}


def columns(settings: list[tuple[float, int, float, float]], seed: int = 0) -> tuple[Tensor, ...]:
    """slopes, top_k, top_p, min_p and points of some rows."""
    temperature, top_k, top_p, min_p = zip(*settings, strict=True)
    slopes = torch.tensor([math.log2(math.e) / t if t else 0.0 for t in temperature], dtype=torch.float32)
    points = torch.rand(len(settings), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return slopes, torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p), points


def check(logits: Tensor, settings: list[tuple[float, int, float, float]], seed: int = 0) -> tuple[Tensor, Tensor]:
    """The same tokens by both; what the reference found."""
    arguments = columns(settings, seed)
    expected = sample_ref(logits, *arguments)
    moved = [x.to(DEVICE) for x in (logits, *arguments)]
    # Several tiles per row, and more lists than one.
    found = sample_by_kernel(moved[0], *moved[1:], block=256, draw_block=128)
    assert found[0].tolist() == expected[0].tolist()
    assert found[1].tolist() == expected[1].tolist()
    return expected


def random_logits(num_rows: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("name", SETTINGS)
def test_equals_reference(name: str) -> None:
    check(random_logits(4, 700), [SETTINGS[name]] * 4)


@pytest.mark.parametrize("name", ["top-k", "top-p", "top-k-p", "all"])
def test_ties(name: str) -> None:
    """Logits of few values: each limit falls among many equal ones, of which the first are kept."""
    check(random_logits(4, 300).round(), [SETTINGS[name]] * 4)
    check(torch.zeros(4, 300), [SETTINGS[name]] * 4)


def test_all_kinds_in_one_batch() -> None:
    settings = list(SETTINGS.values())
    logits = random_logits(len(settings), 300)
    tokens, _ = check(logits, settings)
    for b, one in enumerate(settings):
        arguments = columns(settings)
        alone = sample_ref(logits[b : b + 1], *(x[b : b + 1] for x in arguments))
        assert int(alone[0]) == int(tokens[b]), one


def test_the_likeliest_and_ties_to_the_lower_token() -> None:
    logits = random_logits(3, 600)
    logits[1, [400, 50, 599]] = 30.0
    tokens, _ = check(logits, [SETTINGS["greedy"]] * 3)
    assert tokens.tolist() == [int(logits[0].argmax()), 50, int(logits[2].argmax())]


@pytest.mark.parametrize("name", ["greedy", "plain", "all"])
def test_rows_that_cannot_be_used(name: str) -> None:
    logits = random_logits(6, 300)
    logits[1, 3] = float("nan")
    logits[2] = float("nan")
    logits[3, 299] = float("inf")
    logits[4] = float("-inf")
    tokens, found = check(logits, [SETTINGS[name]] * 6)
    assert (found >= 0).tolist() == [True, False, False, False, False, True]
    assert tokens[1:5].tolist() == [0] * 4


@pytest.mark.parametrize("name", ["greedy", "plain", "hot", "top-k", "top-p", "min-p"])
def test_tokens_at_minus_infinity_are_never_chosen(name: str) -> None:
    logits = torch.full((8, 300), float("-inf"))
    logits[:, 17], logits[:, 270] = -4.0, -4.5
    tokens, _ = check(logits, [SETTINGS[name]] * 8)
    assert set(tokens.tolist()) <= {17, 270}


def test_no_row_draws() -> None:
    logits = random_logits(3, 300)
    arguments = [x.to(DEVICE) for x in columns([SETTINGS["greedy"]] * 3)]
    tokens, found = sample_by_kernel(logits.to(DEVICE), *arguments, warm=False)
    assert tokens.tolist() == found.tolist() == logits.argmax(1).tolist()


def test_lists_for_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longbatch_kernels.sample._LISTED", 2 * 300)
    monkeypatch.setattr("longbatch_kernels.sample._SORTED", 3 * 300)
    check(random_logits(5, 300), [SETTINGS["all"]] * 5)


def test_weights() -> None:
    """Those of the softmax, in proportion to the largest; none is larger than one of a larger logit."""
    logits = random_logits(2, 4000).sort(dim=1, descending=True).values
    weights = weights_ref(logits, torch.tensor([math.log2(math.e), math.log2(math.e) / 0.7]))
    assert weights[:, 0].tolist() == [1 << WEIGHT_BITS] * 2
    assert (weights.diff(dim=1) <= 0).all()
    for row, temperature in ((0, 1.0), (1, 0.7)):
        exact = ((logits[row].double() - logits[row, 0].double()) / temperature).exp() * 2.0**WEIGHT_BITS
        assert ((weights[row] - exact).abs() <= exact * 4e-6 + 1).all()


def test_the_same_numbers_on_every_device() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (500,), generator=generator)
    steps = torch.arange(500)
    points = uniform_ref(seeds, steps)
    assert torch.equal(uniform_by_kernel(seeds.to(DEVICE), steps.to(DEVICE)).cpu(), points)
    assert ((points >= 0) & (points < 1)).all()


def test_the_hash_is_splitmix64() -> None:
    """The first numbers of the published generator with seed 1234567, whose upper 53 bits these are."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    points = uniform_ref(torch.full((3,), 1234567), torch.arange(3))
    assert points.tolist() == [(number >> 11) * 2.0**-53 for number in published]


def test_draws_follow_the_weights() -> None:
    """20,000 points on a grid: each token as often as its weight says."""
    logits, count = random_logits(1, 40), 20_000
    slopes, top_k, top_p, min_p, _ = columns([SETTINGS["plain"]] * count)
    points = (torch.arange(count) + 0.5).double() / count
    tokens, _ = sample_ref(logits.expand(count, -1), slopes, top_k, top_p, min_p, points)
    found = np.bincount(tokens.numpy(), minlength=40) / count
    assert np.abs(found - logits[0].softmax(-1).numpy()).max() <= 1.5 / count


@pytest.mark.gpu
@pytest.mark.parametrize("size", [32_000, 128_256, 262_144])
def test_real_sizes(size: int) -> None:
    """As launched in a run; the reference on the CPU."""
    settings = list(SETTINGS.values()) * 2
    logits = random_logits(len(settings), size)
    arguments = columns(settings)
    expected = sample_ref(logits, *arguments)
    found = sample_by_kernel(logits.cuda(), *(x.cuda() for x in arguments))
    assert found[0].tolist() == expected[0].tolist()
    assert found[1].tolist() == expected[1].tolist()
