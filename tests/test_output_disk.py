"""A disk that fills: nothing finished is lost, the error says what to do, and the run goes on when space returns."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from output_rows import answer_to, make_folder, make_request, make_result

from longbatch.errors import DiskError, ExitCode
from longbatch.output import KeyTable, ResultWriter, RowState, export, merge, recover, scan


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system needs the right to mount one")
    yield disk
    for _ in range(50):
        # A process that was told to stop may still be on its way out.
        if not subprocess.run(["umount", str(disk)], capture_output=True, check=False).returncode:
            return
        time.sleep(0.1)
    pytest.fail("something still uses the small file system")


def fill(disk: Path, left: int) -> Path:
    """A file that leaves `left` bytes of space."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            file.truncate(max(0, file.tell() - left))
    return ballast


def test_a_disk_that_fills_stops_the_run_and_loses_nothing(small_disk: Path) -> None:
    folder = make_folder(small_disk)
    writer = ResultWriter(folder, "w0", reserve_bytes=256 << 10)
    ballast = fill(small_disk, left=128 << 10)
    finished = 0

    def run() -> None:
        nonlocal finished
        for row in range(5000):
            finished += 1
            writer.append(make_result(make_request(row)))
            if row % 20 == 0:
                writer.flush()

    with pytest.raises(DiskError, match="No space left on device") as caught:
        run()
    assert caught.value.exit_code == ExitCode.DISK
    assert "free some space" in str(caught.value.hint)
    writer.close(publish=False)  # what the reserve is for
    done = scan(folder)
    wanted = [make_request(row) for row in range(finished)]
    assert [match.state for match in done.match(wanted)] == [RowState.OK] * finished

    ballast = fill(small_disk, left=0)
    with pytest.raises(DiskError, match="No space left"):  # no room for a part beside the journal yet
        recover(folder)
    assert len(scan(folder)) == finished
    ballast.unlink()
    recover(folder)
    merge(folder, KeyTable.of(wanted))
    assert pq.read_table(folder.results)["text"].to_pylist() == [answer_to(request) for request in wanted]


def test_without_a_reserve_results_wait_in_memory_until_there_is_space(small_disk: Path) -> None:
    folder = make_folder(small_disk)
    writer = ResultWriter(folder, "w0", reserve_bytes=0)
    writer.append(make_result(make_request(0)))
    writer.flush()
    ballast = fill(small_disk, left=0)

    def run() -> None:
        for row in range(1, 200):
            writer.append(make_result(make_request(row), text="x" * 10_000))
            writer.flush()

    with pytest.raises(DiskError, match="No space left"):
        run()
    with pytest.raises(DiskError, match="No space left"):
        writer.flush()
    with pytest.raises(DiskError, match="No space left"):
        writer.close()
    ballast.unlink()
    writer.close()
    done = scan(folder)
    assert done.damage == ()
    assert sorted(done.rows.tolist()) == list(range(len(done)))
    assert len(done) >= 2


def test_a_reserve_that_does_not_fit_is_refused_before_any_work(small_disk: Path) -> None:
    folder = make_folder(small_disk)
    with pytest.raises(DiskError, match=r"cannot reserve 64 MiB in .*No space left"):
        ResultWriter(folder, "w0")
    assert list(folder.worker("w0").iterdir()) == []


def test_a_merge_without_space_leaves_the_old_results(small_disk: Path) -> None:
    folder = make_folder(small_disk)
    requests = [make_request(row) for row in range(300)]
    with ResultWriter(folder, "w0", reserve_bytes=0) as writer:
        writer.append(*(make_result(request) for request in requests))
    merge(folder, KeyTable.of(requests[:10]))
    ballast = fill(small_disk, left=0)
    with pytest.raises(DiskError, match=r"cannot merge into .*No space left"):
        merge(folder, KeyTable.of(requests))
    assert len(pq.read_table(folder.results)) == 10
    assert [path.name for path in folder.work.iterdir()] == ["w0"]
    ballast.unlink()
    assert merge(folder, KeyTable.of(requests)).num_rows == 300


def test_an_export_without_space_leaves_no_file(small_disk: Path) -> None:
    folder = make_folder(small_disk)
    with ResultWriter(folder, "w0", reserve_bytes=0) as writer:
        writer.append(make_result(make_request(0)))
    merge(folder, 1)
    fill(small_disk, left=0)
    with pytest.raises(DiskError, match=r"cannot export to .*No space left"):
        export(folder, "jsonl", small_disk / "rows.jsonl")
    assert not list(small_disk.glob("*rows.jsonl*"))
