"""When so many rows fail that going on would be waste."""

from __future__ import annotations

import logging

import pytest

from longbatch.run.failures import FIRST_ROWS, Failures


def after(rule: str, *results: str | None) -> Failures:
    failures = Failures(rule)
    for error in results:
        failures.add(error)
    return failures


def test_half_of_the_first_hundred() -> None:
    good, bad = [None] * 50, ["internal"] * 50
    assert not after("50%", *bad, *good[1:]).too_many
    found = after("50%", *bad, *good)
    assert found.too_many
    assert found.reason == f"stopped: 50 of the first {FIRST_ROWS} rows failed (50 internal)"
    assert not after("50%", *bad[1:], *good, None).too_many


def test_what_comes_after_the_first_hundred_does_not_count() -> None:
    assert not after("50%", *[None] * 100, *["internal"] * 1000).too_many


@pytest.mark.parametrize(("rule", "limit"), [("1", 1), ("3", 3), ("0", 1)])
def test_a_number_counts_from_start_to_end(rule: str, limit: int) -> None:
    assert not after(rule, *[None] * 500, *["internal"] * (limit - 1)).too_many
    assert after(rule, *[None] * 500, *["internal"] * limit).too_many


def test_a_small_percentage_takes_one_failed_row_at_least() -> None:
    assert not after("0.1%", *[None] * 100).too_many
    assert after("0.1%", "internal", *[None] * 99).too_many


def test_off() -> None:
    found = after("off", *["internal"] * 1000)
    assert not found.too_many
    assert found.counts == {"internal": 1000}


def test_the_reason_names_the_most_frequent_kinds_and_stays() -> None:
    found = after("6", *["a"] * 1, *["b"] * 2, *["c"] * 2, "d", "d")
    assert found.reason == "stopped: 6 rows failed (2 b, 2 c, 1 a)"


def test_a_kind_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="longbatch"):
        after("off", *["internal"] * 5, *["row_timeout"] * 5)
    assert len(caplog.records) == 2
