"""Rates over the last minute, and what is left."""

from __future__ import annotations

import pytest

from longbatch.report.rates import Rates, RateWindow, Sample


def window(*samples: tuple[float, int, int, int]) -> RateWindow:
    """Samples of (seconds, rows, tokens read, tokens generated)."""
    found = RateWindow()
    for seconds, rows, tokens, generated in samples:
        found.add(Sample(seconds, rows, 0, tokens, generated))
    return found


def test_nothing_is_known_before_time_has_passed() -> None:
    for samples in ([], [(5.0, 1, 1, 1)], [(5.0, 1, 1, 1), (5.0, 2, 2, 2)]):
        assert window(*samples).rates() is None
        assert window(*samples).seconds_left(10, 10) is None


def test_rates_between_first_and_last() -> None:
    assert window((5.0, 1, 100, 0), (6.0, 3, 100, 7), (9.0, 9, 300, 20)).rates() == Rates(2.0, 50.0, 5.0)


def test_only_the_last_minute_counts() -> None:
    samples = [(float(second), second, 10 * second, 0) for second in range(100)]
    samples += [(100.0 + second, 99, 990 + 500 * second, 0) for second in range(1, 70)]
    assert window(*samples).rates() == Rates(0.0, 500.0, 0.0)


def test_rare_updates_still_have_a_rate() -> None:
    found = window((0.0, 0, 0, 0), (1000.0, 10, 1000, 0), (3000.0, 30, 5000, 0))
    assert found.rates() == Rates(0.01, 2.0, 0.0)


@pytest.mark.parametrize(
    ("rows", "tokens", "total_rows", "total_tokens", "seconds"),
    [
        (2, 100, 10, 600, 50.0),
        (2, 100, 10, 100, 40.0),
        (0, 100, 10, 100, None),
        (2, 0, 10, 100, None),
        (10, 100, 10, 100, None),
    ],
)
def test_what_is_left(rows: int, tokens: int, total_rows: int, total_tokens: int, seconds: float | None) -> None:
    """By tokens while there are some to read, then by rows; nothing where nothing moves or all is done."""
    found = window((0.0, 0, 0, 0), (10.0, rows, tokens, 0))
    assert found.seconds_left(total_rows, total_tokens) == seconds


def test_many_updates_keep_few_samples() -> None:
    found = RateWindow()
    for step in range(100_000):
        found.add(Sample(0.001 * step, 0, 0, step, 0))
    assert len(found) < 2500
    assert found.last.tokens_done == 99_999
