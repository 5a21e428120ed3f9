"""The writer's thread: the engine never waits for the disk, and what is flushed is there."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from output_rows import make_folder, make_request, make_result

from longbatch.errors import DiskError
from longbatch.output import ResultWriter, merge, rolling, scan, writer


def test_a_result_is_in_the_journal_soon_without_a_flush(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with ResultWriter(folder, "w0") as out:
        out.append(make_result(make_request(0)))
        deadline = time.monotonic() + 10
        while len(scan(folder)) == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(scan(folder)) == 1
        assert not list(folder.parts.iterdir())


def test_what_is_flushed_is_in_the_journal(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with ResultWriter(folder, "w0") as out:
        for row in range(0, 3000, 1000):
            out.append(*(make_result(make_request(number)) for number in range(row, row + 1000)))
            out.flush()
            assert len(scan(folder)) == row + 1000


@pytest.mark.parametrize("limit", ["PART_BYTES", "PART_SECONDS"])
def test_parts_appear_as_the_run_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(rolling, limit, 0)
    folder = make_folder(tmp_path)
    with ResultWriter(folder, "w0") as out:
        for row in range(3):
            out.append(make_result(make_request(row)))
            out.flush()
        out.append(make_result(make_request(3)))
        out.flush()
        assert len(list(folder.parts.iterdir())) >= 3
    assert len(list(folder.parts.iterdir())) == 4
    assert len(scan(folder)) == 4


def test_a_quiet_writer_still_publishes_on_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling, "PART_SECONDS", 0.2)
    folder = make_folder(tmp_path)
    with ResultWriter(folder, "w0") as out:
        out.append(make_result(make_request(0)))
        deadline = time.monotonic() + 10
        while not list(folder.parts.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(list(folder.parts.iterdir())) == 1


def test_rows_are_synced_after_two_seconds_or_thirty_two_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[float] = []
    synced: Callable[[int], None] = os.fsync

    def fsync(descriptor: int) -> None:
        syncs.append(time.monotonic())
        synced(descriptor)

    folder = make_folder(tmp_path)
    with ResultWriter(folder, "w0") as out:
        out.append(make_result(make_request(0)))
        out.flush()
        monkeypatch.setattr(os, "fsync", fsync)
        start = time.monotonic()
        out.append(make_result(make_request(1)))
        while not syncs and time.monotonic() < start + 10:
            time.sleep(0.01)
        assert 1.5 < syncs[0] - start < 5
        syncs.clear()
        start = time.monotonic()
        out.append(*(make_result(make_request(row)) for row in range(2, 34)))
        while not syncs and time.monotonic() < start + 10:
            time.sleep(0.01)
        assert syncs[0] - start < 1.5


def test_five_thousand_rows_a_second_with_fsyncs_of_20_ms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: Callable[[int], None] = os.fsync

    def fsync(descriptor: int) -> None:
        time.sleep(0.02)
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = make_folder(tmp_path)
    results = [make_result(make_request(row)) for row in range(20_000)]
    start = time.monotonic()
    with ResultWriter(folder, "w0") as out:
        for result in results:
            out.append(result)
        out.flush()
        rate = len(results) / (time.monotonic() - start)
    assert rate >= 5000, f"{rate:,.0f} rows/s"
    assert len(scan(folder)) == 20_000


@pytest.mark.parametrize(("limit", "value"), [("QUEUE_ROWS", 100), ("QUEUE_BYTES", 100_000)])
def test_the_engine_is_held_back_while_too_much_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(writer, limit, value)
    folder = make_folder(tmp_path)
    with ResultWriter(folder, "w0") as out:
        for row in range(2000):
            out.append(make_result(make_request(row)))
            assert len(out._queue) < 200
    assert len(scan(folder)) == 2000


def test_large_results_are_written_in_small_batches(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with ResultWriter(folder, "w0") as out:
        out.append(*(make_result(make_request(row), text="x" * (3 << 20)) for row in range(12)))
    assert merge(folder, 12).num_rows == 12


def test_a_restarted_worker_never_writes_into_what_an_earlier_one_left(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    for row in range(4):
        out = ResultWriter(folder, "w0", attempt=1)
        out.append(make_result(make_request(row)))
        out.close(publish=row % 2 == 0)
    assert sorted(path.name for path in folder.parts.iterdir()) == ["part-w0-1-0.parquet", "part-w0-1-2.parquet"]
    assert sorted(path.name for path in folder.worker("w0").glob("journal*")) == [
        "journal-1-1.arrows",
        "journal-1-3.arrows",
    ]
    assert len(scan(folder)) == 4


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a..b", ".hidden", "a b", "a\n", "damaged/.."])
def test_a_worker_name_that_is_no_plain_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="a worker's name"):
        ResultWriter(make_folder(tmp_path), name)


def test_a_closed_writer_takes_nothing_more(tmp_path: Path) -> None:
    out = ResultWriter(make_folder(tmp_path), "w0")
    out.close()
    out.close()
    with pytest.raises(ValueError, match="closed"):
        out.append(make_result(make_request(0)))


def test_an_error_in_the_engine_still_saves_what_was_appended(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)

    def fail_after_one_row() -> None:
        with ResultWriter(folder, "w0") as out:
            out.append(make_result(make_request(0)))
            raise KeyError("engine")

    with pytest.raises(KeyError, match="engine"):
        fail_after_one_row()
    assert len(scan(folder, journals=False)) == 1


def test_a_run_folder_that_vanishes_is_a_disk_error(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    out = ResultWriter(folder, "w0", reserve_bytes=0)
    folder.worker("w0").joinpath(".reserve.tmp").unlink()
    folder.worker("w0").rmdir()
    out.append(make_result(make_request(0)))
    with pytest.raises(DiskError, match="No such file or directory"):
        out.close()
    folder.worker("w0").mkdir()
    out.close()
    assert len(scan(folder)) == 1


def test_num_written_counts_what_is_in_the_journal(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with ResultWriter(folder, "w0") as writer:
        assert writer.num_written == 0
        for row in range(100):
            writer.append(make_result(make_request(row)))
            assert writer.num_written <= row + 1
        writer.flush()
        assert writer.num_written == len(scan(folder)) == 100
