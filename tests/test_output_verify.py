"""Verify finds every harm to a run folder, says which file, and with `mend` lets the next run repair it."""

from pathlib import Path

import pytest
from output_rows import make_folder, make_request, make_result

from longbatch.core import Request
from longbatch.errors import InterruptedRun
from longbatch.output import KeyTable, ResultWriter, RunFolder, merge, result_files, verify

REQUESTS = [make_request(row) for row in range(60)]


def put(folder: RunFolder, requests: list[Request], worker: str) -> None:
    with ResultWriter(folder, worker, reserve_bytes=0) as writer:
        writer.append(*(make_result(request) for request in requests))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A finished run of two parts."""
    folder = make_folder(tmp_path)
    put(folder, REQUESTS[:30], "w0")
    put(folder, REQUESTS[30:], "w1")
    merge(folder, KeyTable.of(REQUESTS))
    return folder


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 16
    path.write_bytes(content)


def test_a_finished_run_is_whole(folder: RunFolder) -> None:
    report = verify(folder, KeyTable.of(REQUESTS))
    assert report.as_dict() == {
        "num_parts": 2,
        "num_journals": 0,
        "num_answers": 60,
        "num_ok": 60,
        "num_missing": 0,
        "num_results": 60,
        "complete": True,
        "damage": [],
    }
    assert report.lines() == ["60 answers (60 ok) in 2 parts", "0 answers missing", "60 rows in results/"]


def test_an_unfinished_run_is_not_complete(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    put(folder, REQUESTS[:30], "w0")
    writer = ResultWriter(folder, "w1", reserve_bytes=0)
    writer.append(make_result(REQUESTS[30]))
    writer.close(publish=False)
    report = verify(folder, KeyTable.of(REQUESTS))
    assert (report.num_answers, report.num_journals, report.num_missing, report.complete) == (31, 1, 29, False)
    assert report.damage == ()
    assert report.lines()[0] == "31 answers (31 ok) in 1 parts and 1 journals"


def test_a_flipped_bit_anywhere_in_a_part_is_found_and_mended(folder: RunFolder) -> None:
    part = folder.parts / "part-w1-1-0.parquet"
    content = part.read_bytes()
    for place in range(0, len(content), 211):
        flip(part, place)
        assert [found.path for found in verify(folder).damage] == [part]
        part.write_bytes(content)
    flip(part, 100)
    verify(folder, mend=True)
    assert not part.exists()
    assert verify(folder, KeyTable.of(REQUESTS)).num_missing == 30
    with pytest.raises(InterruptedRun, match="30 rows"):
        merge(folder, KeyTable.of(REQUESTS))
    put(folder, REQUESTS[30:], "w1")
    merge(folder, KeyTable.of(REQUESTS))
    report = verify(folder, KeyTable.of(REQUESTS))
    assert (report.complete, report.damage) == (True, ())


@pytest.mark.parametrize("place", [0, 10, 500, -5, -60])
def test_a_flipped_bit_in_the_results_is_found_and_mended(folder: RunFolder, place: int) -> None:
    (path,) = result_files(folder)
    flip(path, place)
    report = verify(folder)
    assert [found.path for found in report.damage] == [path]
    assert not report.complete
    verify(folder, mend=True)
    merge(folder, KeyTable.of(REQUESTS))
    assert verify(folder).complete


def test_a_page_with_a_flipped_bit_is_found_without_a_ledger(folder: RunFolder) -> None:
    part = folder.parts / "part-w0-1-0.parquet"
    (folder.worker("w0") / "published.jsonl").unlink()
    assert verify(folder).damage == ()
    text = part.read_bytes().index(b"answer") if b"answer" in part.read_bytes() else 600
    flip(part, text)
    assert [found.path for found in verify(folder).damage] == [part]


def test_missing_files_are_found(folder: RunFolder) -> None:
    part = folder.parts / "part-w0-1-0.parquet"
    part.unlink()
    (result,) = result_files(folder)
    result.unlink()
    report = verify(folder, KeyTable.of(REQUESTS))
    assert [str(found) for found in report.damage] == [f"{part}: the file is missing", f"{result}: the file is missing"]
    assert (report.num_missing, report.num_results, report.complete) == (30, 0, False)


def test_a_stray_result_file_is_found(folder: RunFolder) -> None:
    (path,) = result_files(folder)
    stray = path.with_name("results-00001.parquet")
    stray.write_bytes(path.read_bytes())
    assert [found.path for found in verify(folder).damage] == [stray]
    assert "not complete" in "\n".join(verify(folder).lines())


def test_rows_that_are_there_twice_are_found(folder: RunFolder) -> None:
    (path,) = result_files(folder)
    folder.success.unlink()
    path.with_name("results-00001.parquet").write_bytes(path.read_bytes())
    assert [found.reason for found in verify(folder).damage] == ["rows are out of order, or twice there"]
