"""Progress of a run on standard error: a bar on a terminal, sparse plain lines elsewhere.

Knows rows and tokens, not what they hold: nothing printed here comes from a prompt or an answer.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from longbatch.report.rates import RateWindow, Sample
from longbatch.report.units import count_text, rate_text, seconds_text

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

FIRST_LINE_SECONDS = 10.0
LINE_SECONDS = 30.0
LINE_FRACTION = 0.01
BAR_SECONDS = 0.1


class Progress:
    """Shows how far a run is; `update` may be called from any thread and as often as convenient.

    total_tokens: tokens to read over all rows; the share of it that is done decides percentage and ETA, because
    rows differ in length. mode: `bar`, `log`, `none`, or `auto` for a bar when standard error is a terminal.
    quiet: print nothing at all. A standard error that breaks ends the display, never the run.
    """

    def __init__(
        self,
        total_rows: int,
        total_tokens: int,
        mode: str = "auto",
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_rows = total_rows
        self.total_tokens = total_tokens
        self._stream = sys.stderr if stream is None else stream
        self._mode = "none" if quiet else choose_mode(mode, self._stream)
        self._quiet = quiet
        self._clock = clock
        self._lock = threading.Lock()
        self._window = RateWindow()
        self._note = ""
        self._bar: _Bar | None = None
        self._bar_drawn = -math.inf
        self._line_seconds = 0.0
        self._line_fraction = -math.inf

    def start(self, rows_done: int = 0, rows_failed: int = 0, tokens_done: int = 0) -> Progress:
        """Begin, with what an earlier run finished already; rates count only what comes after."""
        now = self._clock()
        self._window.add(Sample(now, rows_done, rows_failed, tokens_done, 0))
        # The first line is due FIRST_LINE_SECONDS from now, however little is done by then.
        self._line_seconds = now + FIRST_LINE_SECONDS - LINE_SECONDS
        if self._mode == "bar":
            self._bar = _Bar(self._stream, self.total_rows)
        return self

    def update(
        self,
        rows_done: int,
        rows_failed: int,
        tokens_done: int,
        generated_tokens: int = 0,
        note: str = "",
    ) -> None:
        """Set the totals so far: rows finished (failed ones included), prompt tokens read, tokens generated."""
        with self._lock:
            now = self._clock()
            self._window.add(Sample(now, rows_done, rows_failed, tokens_done, generated_tokens))
            self._note = note
            if self._bar is not None and now - self._bar_drawn >= BAR_SECONDS:
                self._bar_drawn = now
                self._draw()
            elif self._mode == "log" and self._line_due(now):
                self._line_seconds, self._line_fraction = now, self._fraction()
                self._print(self.line())

    def finish(self, lines: Sequence[str] = ()) -> None:
        """Take the bar away and print the summary."""
        with self._lock:
            if self._bar is not None:
                self._draw()
                with suppress(OSError):
                    self._bar.close()
                self._bar = None
            if not self._quiet:
                for line in lines:
                    self._print(line)
            self._mode = "none"

    def line(self) -> str:
        """The state as one line: `[12:03:11] 421/5000 8.4% ok=419 err=2 3.1 req/s prefill 41k tok/s ETA 24m`."""
        last = self._window.last
        parts = [
            time.strftime("[%H:%M:%S]"),
            f"{last.rows_done}/{self.total_rows}",
            f"{100 * self._fraction():.1f}%",
            f"ok={last.rows_done - last.rows_failed}",
            f"err={last.rows_failed}",
            *self._rates(),
        ]
        return " ".join(parts + ([self._note] if self._note else []))

    def _rates(self) -> list[str]:
        rates = self._window.rates()
        if rates is None:
            return []
        texts = [f"{rate_text(rates.rows)} req/s", f"prefill {rate_text(rates.tokens)} tok/s"]
        if rates.generated > 0:
            texts.append(f"decode {rate_text(rates.generated)} tok/s")
        left = self._window.seconds_left(self.total_rows, self.total_tokens)
        return [*texts, f"ETA {seconds_text(left)}"] if left is not None else texts

    def _fraction(self) -> float:
        last = self._window.last
        if last.rows_done >= self.total_rows:
            return 1.0
        done, total = last.tokens_done, self.total_tokens
        if total == 0:
            done, total = last.rows_done, self.total_rows
        # All tokens may be read while answers are still being written.
        return min(done / total, 0.999)

    def _line_due(self, now: float) -> bool:
        return now - self._line_seconds >= LINE_SECONDS and self._fraction() - self._line_fraction >= LINE_FRACTION

    def _draw(self) -> None:
        if self._bar is None:
            return
        last = self._window.last
        parts = self._rates() + ([f"{last.rows_failed} failed"] if last.rows_failed else [])
        with suppress(OSError):
            self._bar.draw(self._fraction(), last, " ".join(parts + ([self._note] if self._note else [])))
            return
        self._bar = None

    def _print(self, text: str) -> None:
        try:
            print(text, file=self._stream, flush=True)
        except (OSError, ValueError):
            # Closed or broken: whoever watched has gone, the run goes on.
            self._mode, self._quiet = "none", True


class _Bar:
    """The rich bar: share of tokens, rows, then rates as text."""

    def __init__(self, stream: TextIO, total_rows: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as RichBars

        self._total_rows = total_rows
        # highlight and markup off: notes are plain text. A terminal was seen, whatever rich would think of it.
        console = Console(file=stream, force_terminal=True, highlight=False, markup=False)
        self._rich: RichProgress = RichBars(
            TextColumn("{task.fields[rows]} rows", markup=False),
            BarColumn(bar_width=None),
            TaskProgressColumn("{task.percentage:>5.1f}%"),
            TextColumn("{task.fields[rates]}", markup=False),
            console=console,
            transient=True,
            expand=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._rich.add_task("rows", total=1.0, rows=f"0/{count_text(total_rows)}", rates="")
        self._rich.start()

    def draw(self, fraction: float, last: Sample, rates: str) -> None:
        rows = f"{last.rows_done}/{self._total_rows}"
        self._rich.update(self._task, completed=fraction, rows=rows, rates=rates)

    def close(self) -> None:
        self._rich.stop()


def choose_mode(mode: str, stream: TextIO) -> str:
    """What `auto` means: a bar where `stream` is a terminal that can move its cursor, else plain lines.

    FORCE_COLOR and the like do not count: they would write the animation into log files.
    """
    if mode != "auto":
        return mode
    with suppress(ValueError):
        if stream.isatty() and os.environ.get("TERM", "dumb") not in {"dumb", "unknown"}:
            return "bar"
    return "log"
