"""When a run must have stopped."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from longbatch.errors import UsageError
from longbatch.run import deadline as module
from longbatch.run.deadline import Deadline, parse_duration
from longbatch.run.slurm import parse_time_left


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("45", 45),
        ("0.5", 0.5),
        ("90m", 5400),
        ("2h30m", 9000),
        ("1.5h", 5400),
        ("1d12h", 129600),
        ("1d2h3m4s", 93784),
        (" 2H ", 7200),
        ("30s", 30),
    ],
)
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "m", "soon", "2h 30m", "30m2h", "1h1h", "-5", "-5m", "0", "0m", "1:30", "1e3", "2h30", "nan", "٣m", "1w"],
)
def test_what_is_no_length_of_time(text: str) -> None:
    with pytest.raises(UsageError, match="length of time"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1:30", 90),
        ("9:59", 599),
        ("2:00:05", 7205),
        ("364-23:59:59", 364 * 86400 + 86399),
        ("-0:07", -7),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_slurms_times(text: str, seconds: float | None) -> None:
    assert parse_time_left(text) == seconds


def test_no_deadline() -> None:
    deadline = Deadline.find(None, 20, {})
    assert deadline.seconds_left() is None
    assert deadline.allows(1e12)
    assert deadline.describe() == "no deadline"


def test_max_time_less_grace() -> None:
    deadline = Deadline.find("10m", 20, {})
    left = deadline.seconds_left()
    assert left is not None
    assert 599 < left <= 600
    assert deadline.allows(579)
    assert not deadline.allows(581)
    assert deadline.describe() == "--max-time"


def test_max_time_runs_out() -> None:
    deadline = Deadline.find("0.05", 0, {})
    time.sleep(0.06)
    left = deadline.seconds_left()
    assert left is not None
    assert left < 0
    assert not deadline.allows(0)


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A squeue that prints a file and notes each call; the real one's answers stand in test_slurm_jobs.py."""
    answer = tmp_path / "answer"
    program = tmp_path / "squeue"
    program.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n. {answer}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return answer


JOB = {"SLURM_JOB_ID": "7"}


def test_the_slurm_limit_counts_when_it_is_earlier(squeue: Path) -> None:
    squeue.write_text("printf '9|RUNNING|1:00\\n7|RUNNING|5:00\\n'")
    deadline = Deadline.find("10m", 20, JOB)
    left = deadline.seconds_left()
    assert left is not None
    assert 295 < left <= 300
    assert deadline.describe() == "the time limit of Slurm job 7"
    deadline = Deadline.find("1m", 20, JOB)
    left = deadline.seconds_left()
    assert left is not None
    assert left <= 60
    assert deadline.describe() == "--max-time"


def test_slurm_is_asked_again_every_five_minutes(squeue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue.write_text("echo '7|RUNNING|20:00'")
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    deadline = Deadline.find(None, 20, JOB)
    assert deadline.seconds_left() == 1200
    squeue.write_text("echo '7|RUNNING|1:00:00'")  # somebody raised the limit
    now += 299
    assert deadline.seconds_left() == 901
    assert deadline.allows(0)
    assert len((squeue.parent / "calls").read_text().splitlines()) == 1
    now += 2
    assert deadline.seconds_left() == 3600
    squeue.write_text("exit 1")  # the controller is away: what was known still holds
    now += 301
    assert deadline.seconds_left() == 3299
    squeue.write_text("echo '7|RUNNING|UNLIMITED'")
    now += 301
    assert deadline.seconds_left() is None


def test_without_an_answer_there_is_no_slurm_limit(squeue: Path) -> None:
    squeue.write_text("exit 1")
    assert Deadline.find(None, 20, JOB).seconds_left() is None
    squeue.write_text("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")
    assert Deadline.find(None, 20, JOB).seconds_left() is None


def test_without_squeue_there_is_no_slurm_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Deadline.find(None, 20, JOB).seconds_left() is None
