"""Requests to a run, as files: to stop, and to run failed rows again."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from longbatch.errors import DiskError
from longbatch.run.control import (
    RETRY_FILE,
    STOP_FILE,
    RetryMarks,
    last_stop,
    mark_for_retry,
    request_stop,
    stop_requested,
)


def answers(*keys: bytes) -> np.ndarray:
    """Answers to these keys, each with a fingerprint of its own."""
    return np.array([key.ljust(16, b"\0") + bytes([i + 1] * 16) for i, key in enumerate(keys)], dtype="S32")


def numbers(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


KEYS = (b"a" * 16, b"b" * 15 + b"\0", bytes(16), bytes(range(16)))


def test_a_request_reaches_those_that_run_and_nobody_later(tmp_path: Path) -> None:
    first = last_stop(tmp_path)
    assert first == ""
    assert not stop_requested(tmp_path, first)
    request_stop(tmp_path)
    assert stop_requested(tmp_path, first)
    later = last_stop(tmp_path)
    assert not stop_requested(tmp_path, later)
    assert stop_requested(tmp_path, first), "another supervisor that starts does not hide the request from this one"
    request_stop(tmp_path)
    assert stop_requested(tmp_path, later)


def test_a_request_from_another_process(tmp_path: Path, uninstalled_environment: dict[str, str]) -> None:
    program = "import sys, pathlib; from longbatch.run.control import request_stop; request_stop(pathlib.Path('.'))"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=uninstalled_environment, check=True, timeout=60)
    assert stop_requested(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"time": 1}', b"\xff"])
def test_a_request_that_cannot_be_read_is_one(tmp_path: Path, content: bytes) -> None:
    """Somebody wanted something: a run that stops and saves loses little, one that goes on may waste much."""
    (tmp_path / STOP_FILE).write_bytes(content)
    assert stop_requested(tmp_path)
    assert not stop_requested(tmp_path, last_stop(tmp_path))


def test_no_marks(tmp_path: Path) -> None:
    marks = RetryMarks.load(tmp_path)
    assert len(marks) == 0
    assert marks.wanted(answers(*KEYS), numbers(1, 1, 1, 1)).tolist() == [False] * 4
    mark_for_retry(tmp_path, [], [])
    assert not (tmp_path / RETRY_FILE).exists()


def test_a_mark_holds_until_a_later_answer(tmp_path: Path) -> None:
    mark_for_retry(tmp_path, KEYS[:3], [1, 2, 3])
    marks = RetryMarks.load(tmp_path)
    table = answers(*KEYS)
    assert marks.wanted(table, numbers(1, 2, 3, 1)).tolist() == [True, True, True, False]
    assert marks.wanted(table, numbers(2, 3, 4, 1)).tolist() == [False] * 4
    assert marks.wanted(table, numbers(0, 1, 4, 0)).tolist() == [True, True, False, False]
    assert marks.wanted(answers(), numbers()).tolist() == []


def test_keys_as_numpy_hands_them_out(tmp_path: Path) -> None:
    """Without their trailing zero bytes."""
    short = np.array(KEYS, dtype="S16").tolist()
    assert [len(key) for key in short] == [16, 15, 0, 16]
    mark_for_retry(tmp_path, short, [1] * 4)
    assert RetryMarks.load(tmp_path).wanted(answers(*KEYS), numbers(1, 1, 1, 1)).all()


def test_of_several_marks_the_newest_counts(tmp_path: Path) -> None:
    for attempt in (1, 3, 2):
        mark_for_retry(tmp_path, [KEYS[0]], [attempt])
    marks = RetryMarks.load(tmp_path)
    assert len(marks) == 1
    assert marks.wanted(answers(KEYS[0], KEYS[0]), numbers(3, 4)).tolist() == [True, False]


@pytest.mark.parametrize(
    "line",
    [b'{"key": "61', b'{"key": "zz", "attempt": 1}', b'{"key": "61", "attempt": 1}', b"[]", b'{"attempt": 1}', b"\xff"],
)
def test_a_torn_line_spoils_no_other(tmp_path: Path, line: bytes) -> None:
    mark_for_retry(tmp_path, KEYS[:1], [1])
    with (tmp_path / RETRY_FILE).open("ab") as file:
        file.write(b"\n" + line)
    mark_for_retry(tmp_path, KEYS[3:], [1])
    marks = RetryMarks.load(tmp_path)
    assert marks.wanted(answers(*KEYS), numbers(1, 1, 1, 1)).tolist() == [True, False, False, True]


def test_a_million_marks(tmp_path: Path) -> None:
    count = 100_000
    keys = np.random.default_rng(0).bytes(16 * count)
    table = np.frombuffer(keys, dtype="S16")
    mark_for_retry(tmp_path, table.tolist(), [1] * count)
    marks = RetryMarks.load(tmp_path)
    assert len(marks) == count
    joined = np.zeros((count, 2), dtype="S16")
    joined[:, 0] = table
    assert marks.wanted(joined.view("S32").reshape(-1), np.ones(count, np.int32)).all()


def test_a_full_disk_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / RETRY_FILE).symlink_to("/dev/full")
    with pytest.raises(DiskError, match=os.strerror(errno.ENOSPC)):
        mark_for_retry(tmp_path, KEYS[:1], [1])


def test_the_files_are_private(tmp_path: Path) -> None:
    mark_for_retry(tmp_path, KEYS[:1], [1])
    assert (tmp_path / RETRY_FILE).stat().st_mode & 0o077 == 0
