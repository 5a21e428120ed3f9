"""Progress: sparse lines off a terminal, a bar on one, and numbers that add up."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from longbatch.report.progress import Progress, choose_mode
from longbatch.report.units import bytes_text, count_text, rate_text, seconds_text


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class BrokenStream(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def log(total_rows: int, total_tokens: int) -> tuple[Progress, io.StringIO, Clock]:
    stream, clock = io.StringIO(), Clock()
    return Progress(total_rows, total_tokens, "log", stream=stream, clock=clock), stream, clock


def test_lines_come_at_ten_seconds_then_every_thirty() -> None:
    progress, stream, clock = log(1000, 1_000_000)
    progress.start()
    printed = []
    for second in range(1, 101):
        clock.now = 1000.0 + second
        before = stream.tell()
        progress.update(second, 0, second * 1000)
        if stream.tell() > before:
            printed.append(second)
    assert printed == [10, 40, 70, 100]


def test_a_slow_run_prints_a_line_per_percent() -> None:
    progress, stream, clock = log(1_000, 1_000_000)
    progress.start()
    for second in range(0, 3000, 10):  # a percent of the tokens takes 1000 seconds
        clock.now = 1000.0 + second
        progress.update(0, 0, second * 10)
    assert [line.split()[2] for line in stream.getvalue().splitlines()] == ["0.0%", "1.0%", "2.0%"]


def test_the_line_has_the_documented_form() -> None:
    progress, stream, clock = log(5000, 10_000_000)
    progress.start()
    clock.now += 20
    progress.update(421, 2, 840_000, 24_000, note="wave 2/9")
    (line,) = stream.getvalue().splitlines()
    # 42,000 tokens a second and 9,160,000 to go: 218 seconds.
    form = "421/5000 8.4% ok=419 err=2 21 req/s prefill 42k tok/s decode 1.2k tok/s ETA 3m38s wave 2/9"
    assert re.fullmatch(r"\[\d\d:\d\d:\d\d\] " + re.escape(form), line), line


def test_rates_count_only_this_run_and_the_last_minute() -> None:
    progress, stream, clock = log(100, 100_000)
    progress.start(rows_done=50, rows_failed=1, tokens_done=50_000)
    clock.now += 20
    progress.update(60, 1, 60_000)
    assert "0.5 req/s prefill 500 tok/s ETA 1m20s" in stream.getvalue()
    for _ in range(20):  # ten minutes at a tenth of the speed
        clock.now += 30
        progress.update(60, 1, progress._window.last.tokens_done + 1500)
    assert "prefill 50 tok/s" in progress.line()


def test_no_tokens_and_no_rows_are_no_division_by_zero() -> None:
    progress, _, clock = log(0, 0)
    progress.start()
    clock.now += 30
    progress.update(0, 0, 0)
    assert "0/0 100.0% ok=0 err=0" in progress.line()


def test_rows_decide_where_all_tokens_are_read() -> None:
    progress, _, clock = log(10, 1000)
    progress.start()
    clock.now += 10
    progress.update(5, 0, 1000, 400)
    assert " 5/10 99.9% " in progress.line()
    assert progress.line().endswith("decode 40 tok/s ETA 10s")


def test_quiet_prints_nothing_and_none_prints_the_summary() -> None:
    for quiet, printed in ((True, ""), (False, "done\n")):
        stream, clock = io.StringIO(), Clock()
        progress = Progress(10, 10, "none", quiet=quiet, stream=stream, clock=clock).start()
        clock.now += 100
        progress.update(5, 0, 5)
        progress.finish(["done"])
        assert stream.getvalue() == printed


def test_a_broken_stderr_ends_the_display_and_not_the_run() -> None:
    clock = Clock()
    progress = Progress(10, 10, "log", stream=BrokenStream(), clock=clock).start()
    clock.now += 100
    progress.update(5, 0, 5)
    progress.finish(["done"])


def test_a_file_gets_lines_even_with_force_color(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with open(tmp_path / "log", "w") as stream:
        assert choose_mode("auto", stream) == "log"
        assert choose_mode("bar", stream) == "bar"
    assert choose_mode("auto", stream) == "log"  # closed


PROGRAM = """
import sys, time
from longbatch.report.progress import Progress
progress = Progress(20, 20_000).start()
for row in range(21):
    progress.update(row, 1, row * 1000, row * 10, note="wave [1/2]")
    time.sleep(0.06)
progress.finish(["20 rows: 19 ok, 1 failed"])
"""


def on_terminal(root: Path, **variables: str) -> str:
    """What the program writes to a real terminal of 100 columns."""
    main, child = pty.openpty()
    inherited = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "FORCE_COLOR"}}
    environment = {**inherited, "TERM": "xterm", "COLUMNS": "100", "PYTHONPATH": str(root), **variables}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=child, env=environment)
    os.close(child)
    written = b""
    try:
        while block := os.read(main, 65536):
            written += block
    except OSError:  # Linux reports the end of a terminal so
        pass
    os.close(main)
    assert process.wait(timeout=30) == 0
    return written.decode()


def test_a_terminal_gets_a_bar_that_goes_away(root: Path) -> None:
    written = on_terminal(root)
    assert "20/20 rows" in written
    assert "100.0%" in written
    assert "1 failed" in written
    assert "wave [1/2]" in written
    assert "\x1b[" in written
    assert written.rstrip().endswith("20 rows: 19 ok, 1 failed")


def test_no_color_leaves_out_colour(root: Path) -> None:
    assert re.search(r"\x1b\[(\d+;)*[39]\d(;\d+)*m", on_terminal(root))
    assert not re.search(r"\x1b\[(\d+;)*[39]\d(;\d+)*m", on_terminal(root, NO_COLOR="1"))


def test_a_dumb_terminal_gets_lines(root: Path) -> None:
    written = on_terminal(root, TERM="dumb")
    assert "\x1b" not in written
    assert written == "20 rows: 19 ok, 1 failed\r\n"  # over in less than ten seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (950, "950"), (999.6, "1.0k"), (1234, "1.2k"), (41_000, "41k"), (999_950, "1.0M"), (3.1e9, "3.1G")],
)
def test_counts(value: float, text: str) -> None:
    assert count_text(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.031, "0.031"), (3.14, "3.1"), (9.97, "10"), (41_000, "41k")])
def test_rates(value: float, text: str) -> None:
    assert rate_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (80 << 30, "80.0 GiB"),
        (141 << 30, "141 GiB"),
        (1 << 50, "1024 TiB"),
    ],
)
def test_bytes(value: int, text: str) -> None:
    assert bytes_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.42, "0.4s"), (9.96, "10s"), (59.6, "1m00s"), (185, "3m05s"), (7800, "2h10m"), (273_600, "3d04h")],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds_text(value) == text
