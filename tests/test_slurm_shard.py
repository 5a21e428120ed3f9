"""Shares of a run: what --shard means, and how rows are dealt out."""

from __future__ import annotations

import time

import numpy as np
import pytest

from longbatch.errors import UsageError
from longbatch.run.shard import Shard, deal


def array(task: int, first: int, last: int, step: int = 1, count: int | None = None) -> dict[str, str]:
    """The variables of an array element; Slurm 22.05 was seen to set all five."""
    values = {"ID": task, "MIN": first, "MAX": last, "STEP": step, "COUNT": count or (last - first) // step + 1}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("text", "environ", "shard"),
    [
        ("0/4", {}, Shard(0, 4)),
        ("3/4", {}, Shard(3, 4)),
        ("0/1", {}, Shard(0, 1)),
        ("auto", array(2, 0, 3), Shard(2, 4)),
        ("auto", array(5, 5, 5), Shard(0, 1)),
        ("auto", array(9, 0, 9, step=3), Shard(3, 4)),
        ("auto", array(2, 1, 4), Shard(1, 4)),
        # An explicit share wins over the array's.
        ("1/2", array(2, 0, 3), Shard(1, 2)),
    ],
)
def test_shares(text: str, environ: dict[str, str], shard: Shard) -> None:
    assert Shard.parse(text, environ) == shard
    assert Shard.parse(text, environ).name == f"s{shard.index}"  # type: ignore[union-attr]


def test_no_share() -> None:
    assert Shard.parse(None, array(2, 0, 3)) is None


@pytest.mark.parametrize(
    ("text", "environ", "message", "hint"),
    [
        ("4/4", {}, "no share 4 of 4", "0/4 to --shard 3/4"),
        ("0/0", {}, "no share 0 of 0", ""),
        ("1", {}, "is no share", "0/4"),
        ("-1/4", {}, "is no share", "0/4"),
        ("auto", {}, "needs a Slurm job array", "--array=0-3"),
        ("auto", {"SLURM_ARRAY_TASK_ID": "0"}, "TASK_MIN is not set", "--array"),
        ("auto", array(4, 1, 4, count=2), "has 2 of 1-4", "--array=1-4"),
    ],
)
def test_what_is_no_share(text: str, environ: dict[str, str], message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Shard.parse(text, environ)
    assert hint in (caught.value.hint or "")


def work(kind: str, size: int) -> np.ndarray:
    generator = np.random.default_rng(size)
    if kind == "equal":
        return np.full(size, 3.25)
    if kind == "nothing":
        return np.zeros(size)
    if kind == "giant":
        return np.concatenate([generator.random(size - 1), [1e6]])
    if kind == "heavy tail":
        return generator.pareto(1.2, size) + 0.01
    return generator.random(size)


@pytest.mark.parametrize("kind", ["equal", "nothing", "giant", "heavy tail", "uniform"])
@pytest.mark.parametrize("size", [1, 3, 64, 1000])
@pytest.mark.parametrize("count", [1, 2, 4, 31])
def test_shares_are_level(kind: str, size: int, count: int) -> None:
    amounts = work(kind, size)
    shares = deal(amounts, count)
    assert shares.shape == (size,)
    assert shares.min() >= 0
    assert shares.max() < count
    loads = np.bincount(shares, weights=amounts, minlength=count)
    largest = amounts.max(initial=0.0)
    assert loads.max() - loads.min() <= max(largest, 0.02 * loads.mean()) * (1 + 1e-6)
    rows = np.bincount(shares, minlength=count)
    if kind in {"equal", "nothing"}:
        assert rows.max() - rows.min() <= 1


def test_no_rows() -> None:
    assert deal(np.zeros(0), 4).tolist() == []


def test_a_giant_row_does_not_take_others_along() -> None:
    shares = deal(work("giant", 1000), 4)
    giant = shares[-1]
    assert np.count_nonzero(shares == giant) == 1
    loads = np.bincount(shares, weights=work("giant", 1000), minlength=4)
    others = np.delete(loads, giant)
    assert others.max() - others.min() < 0.02 * others.mean()


def test_dealing_is_the_same_everywhere() -> None:
    """Elements compute it alone: the unit does not matter, nor do a last bit's differences."""
    amounts = work("heavy tail", 5000)
    shares = deal(amounts, 7)
    assert (deal(amounts * 1024, 7) == shares).all()
    assert (deal(amounts.astype(np.float64)[:], 7) == shares).all()
    assert (deal(np.nextafter(amounts, np.inf), 7) == shares).mean() > 0.99


def test_a_million_rows_are_dealt_quickly() -> None:
    amounts = work("heavy tail", 1_000_000)
    begin = time.perf_counter()
    shares = deal(amounts, 32)
    seconds = time.perf_counter() - begin
    loads = np.bincount(shares, weights=amounts, minlength=32)
    assert loads.max() - loads.min() <= amounts.max()
    assert seconds < 10
