"""How fast a run is, over the last minute, and how long the rest will take."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

WINDOW_SECONDS = 60.0
# Samples closer than this add nothing to a rate; updates may come thousands of times a second.
SPACING_SECONDS = 0.1


class Sample(NamedTuple):
    """Totals at one moment. seconds: monotonic clock. Rows and tokens count from the start of the job."""

    seconds: float
    rows_done: int
    rows_failed: int
    tokens_done: int
    generated_tokens: int


class Rates(NamedTuple):
    """Per second: rows finished, prompt tokens read, tokens generated."""

    rows: float = 0.0
    tokens: float = 0.0
    generated: float = 0.0


class RateWindow:
    """The samples of the last minute; the oldest kept is at least that old, however rare the updates are."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def last(self) -> Sample:
        """The newest sample. Raises IndexError before the first."""
        return self._samples[-1]

    def add(self, sample: Sample) -> None:
        """Add the totals of now."""
        samples = self._samples
        samples.append(sample)
        while len(samples) > 2 and sample.seconds - samples[1].seconds >= WINDOW_SECONDS:
            samples.popleft()
        if len(samples) > 2 and samples[-1].seconds - samples[-3].seconds < SPACING_SECONDS:
            del samples[-2]

    def rates(self) -> Rates | None:
        """The rates over the window; None where no time has passed in it."""
        if not self._samples:
            return None
        first, last = self._samples[0], self._samples[-1]
        seconds = last.seconds - first.seconds
        if seconds <= 0:
            return None
        return Rates(
            (last.rows_done - first.rows_done) / seconds,
            (last.tokens_done - first.tokens_done) / seconds,
            (last.generated_tokens - first.generated_tokens) / seconds,
        )

    def seconds_left(self, total_rows: int, total_tokens: int) -> float | None:
        """By tokens while there are some to read, because rows differ in length; None where nothing moves."""
        rates = self.rates()
        if rates is None:
            return None
        rows, tokens = total_rows - self.last.rows_done, total_tokens - self.last.tokens_done
        if tokens > 0:
            return tokens / rates.tokens if rates.tokens > 0 else None
        return rows / rates.rows if rows > 0 and rates.rows > 0 else None
