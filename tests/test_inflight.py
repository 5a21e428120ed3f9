"""Rows under way, and the strikes that they get, on the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from longbatch.errors import DiskError
from longbatch.run.inflight import (
    INTERRUPTED,
    Begun,
    Strike,
    StrikeBook,
    clear_begun,
    find_begun,
    read_begun,
    write_begun,
)

ROWS = [Begun(3, 0, "ab" * 16, 1), Begun(4, 2, "cd" * 16, 2)]


def test_rows_under_way_are_found_until_they_are_cleared(tmp_path: Path) -> None:
    folder = tmp_path / "w0"
    folder.mkdir()
    assert read_begun(folder) == []
    write_begun(folder, ROWS)
    assert read_begun(folder) == ROWS
    write_begun(folder, ROWS[:1])
    assert read_begun(folder) == ROWS[:1]
    assert os.listdir(folder) == ["inflight.json"]
    assert find_begun(tmp_path) == [folder]
    clear_begun(folder)
    clear_begun(folder)
    assert find_begun(tmp_path) == []


def test_only_the_workers_of_one_share_are_found(tmp_path: Path) -> None:
    for name in ("s1-w0", "s10-w0", "w0"):
        (tmp_path / name).mkdir()
        write_begun(tmp_path / name, ROWS)
    (tmp_path / "index.parquet").touch()
    assert [path.name for path in find_begun(tmp_path, "s1-")] == ["s1-w0"]
    assert len(find_begun(tmp_path)) == 3


@pytest.mark.parametrize("content", ["", "[[1,", "[[1, 2]]", "{}", "null"])
def test_a_damaged_file_names_no_row(tmp_path: Path, content: str) -> None:
    (tmp_path / "inflight.json").write_text(content)
    assert read_begun(tmp_path) == []


def test_a_folder_that_is_gone_is_a_disk_error(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="rows under way"):
        write_begun(tmp_path / "gone", ROWS)
    with pytest.raises(DiskError, match="strikes-run"):
        StrikeBook(tmp_path / "gone", "run").add([Strike("ab", 1, INTERRUPTED)])


def test_strikes_last_and_belong_to_an_attempt(tmp_path: Path) -> None:
    book = StrikeBook(tmp_path, "run")
    assert not book
    first, second = Strike("ab", 1, "crashed_engine"), Strike("ab", 2, INTERRUPTED)
    book.add([first, Strike("cd", 1, "row_timeout")])
    book.add([second])
    for found in (book, StrikeBook(tmp_path, "s0")):
        assert found
        assert found.against("ab", 1) == [first, second]
        assert found.against("ab", 2) == [second]
        assert found.against("ab", 3) == []
        assert found.against("ef", 1) == []


def test_strikes_of_all_supervisors_count(tmp_path: Path) -> None:
    for name in ("run", "s0"):
        StrikeBook(tmp_path, name).add([Strike("ab", 1, name)])
    assert [strike.reason for strike in StrikeBook(tmp_path, "s1").against("ab", 1)] == ["run", "s0"]


def test_no_strikes_leave_no_file(tmp_path: Path) -> None:
    StrikeBook(tmp_path, "run").add([])
    assert os.listdir(tmp_path) == []


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    book = StrikeBook(tmp_path, "run")
    book.add([Strike("ab", 1, INTERRUPTED)])
    with (tmp_path / "strikes-run.jsonl").open("a") as file:
        file.write('["cd", 1, "crash')
    StrikeBook(tmp_path, "run").add([Strike("ef", 1, INTERRUPTED)])
    found = StrikeBook(tmp_path, "run")
    assert found.against("ab", 1)
    assert found.against("ef", 1)
    assert not found.against("cd", 1)
