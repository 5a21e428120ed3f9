"""Selecting the largest against sorting: interpreted on a CPU, compiled where there is a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from longbatch_kernels import top_places as module
from longbatch_kernels.top_places import joined, joined_ref, most_ranges, top_places, top_places_ref
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def scores_of(rows: int, size: int, kind: str) -> Tensor:
    """Scores like sums of softmax rows, of few distinct values (many ties), or all alike."""
    torch.manual_seed(size)
    found = torch.rand(rows, size, device=DEVICE) ** 8
    if kind == "ties":
        found = (found * 5).floor() / 5
    return torch.full_like(found, 0.25) if kind == "alike" else found


def numbers(values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("kind", ["sums", "ties", "alike"])
@pytest.mark.parametrize(
    ("size", "budgets", "forced"),
    [
        (1, (1, 1), (1, 0)),
        (50, (50, 3), (30, 30)),
        (129, (1, 128), (0, 100)),
        (1000, (30, 31, 999), (30, 30, 30)),
        (9001, (2000, 700), (100, 30)),
    ],
)
def test_equals_sorting(
    size: int, budgets: tuple[int, ...], forced: tuple[int, ...], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several chunks of several blocks at these sizes too.
    monkeypatch.setattr(module, "BLOCK", 512)
    monkeypatch.setattr(module, "MOST_CHUNKS", 8)
    scores, most = scores_of(len(budgets), size, kind), max(budgets) + 3
    expected = top_places_ref(scores, numbers(budgets), numbers(forced), most)
    places = top_places(scores, numbers(budgets), numbers(forced), most)
    assert torch.equal(places, expected)
    for gap in (0, 1, 64):
        found = joined(places[:, : max(budgets)], size, gap=gap)
        for a, b in zip(found, joined_ref(places, most_ranges(size, gap), gap), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [131_072, 1_048_577])
def test_at_real_sizes(size: int) -> None:
    scores = scores_of(32, size, "sums")
    budgets, forced = numbers((6096, 800, 100, 700) * 8), numbers((100, 30) * 16)
    places = top_places(scores, budgets, forced, 6096)
    assert torch.equal(places, top_places_ref(scores, budgets, forced, 6096))
    for a, b in zip(joined(places, size, gap=64), joined_ref(places, most_ranges(size, 64), 64), strict=True):
        assert torch.equal(a, b)
