"""A process that writes results and is killed, again and again; run by test_output_crash.py.

The driver imports everything once and forks a child for each life of the job. A child opens the run folder,
publishes what dead lives left, writes what is missing, and merges. It dies by SIGKILL, either from outside
after a random time, or by its own hand just before the n-th file operation. After each death what
was flushed must still be there, and results that call themselves complete must be.

    python output_crashes.py FOLDER random SEED KILLS
    python output_crashes.py FOLDER points
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from output_rows import answer_to, make_failure, make_folder, make_request, make_result

from longbatch.core import Request
from longbatch.output import KeyTable, ResultWriter, RowState, RunFolder, merge, recover, scan
from longbatch.output import rolling as output_rolling

NUM_ROWS = 300
# What changes the disk, and where a kill may leave things half done.
FLUSHED = mmap.mmap(-1, 8)  # shared with the children: how many answers are known to be on the disk
OPERATIONS = ("link", "unlink", "rename", "replace", "fsync", "mkdir", "ftruncate")


def requests() -> list[Request]:
    return [make_request(row, None if row % 5 == 0 else "auto") for row in range(NUM_ROWS)]


def live(path: Path, pause: float) -> None:
    """One life of the job, from wherever the last one ended."""
    output_rolling.PART_BYTES = 60_000  # about two flushes
    folder = make_folder(path)
    recover(folder)
    wanted = requests()
    with ResultWriter(folder, "w0", reserve_bytes=1 << 16) as writer:
        for match in scan(folder).match(wanted):
            if match.state in (RowState.OK, RowState.FAILED):
                continue
            failed = match.source.row % 11 == 3
            writer.append(make_failure(match.source) if failed else make_result(match.source))
            if match.source.row % 60 == 59:
                writer.flush()
                set_flushed(match.source.row + 1)  # rows are written in order, so all before it are done too
            if pause and match.source.row % 16 == 0:
                time.sleep(pause)
    merge(folder, KeyTable.of(wanted))


def set_flushed(number: int) -> None:
    FLUSHED[:] = struct.pack("q", number)


def start_over(path: Path) -> None:
    shutil.rmtree(path / "out")
    set_flushed(0)


def check_after_death(path: Path) -> None:
    """Nothing flushed is lost, at any moment; and complete results are complete."""
    (flushed,) = struct.unpack("q", FLUSHED[:])
    if (path / "out" / "run.json").exists():
        done = scan(RunFolder.open(path / "out"))
        assert len(done) >= flushed, f"{len(done)} answers, {flushed} were flushed"
        assert done.damage == ()
    else:
        assert flushed == 0
    if (path / "out" / "_SUCCESS.json").exists():
        check_results(path)


def check(path: Path) -> None:
    """The job is done: the results are right, and nothing is left lying about."""
    check_results(path)
    assert (path / "out" / "_SUCCESS.json").exists()
    left = [entry.name for entry in (path / "out" / "_work").rglob("*") if entry.is_file()]
    assert left == ["published.jsonl"], left


def check_results(path: Path) -> None:
    """Exactly one row for each input, and the right one."""
    table = pq.read_table(path / "out" / "results", columns=["id", "row", "status", "text"])
    expected = [
        {
            "id": request.id,
            "row": request.row,
            "status": "error" if request.row % 11 == 3 else "ok",
            "text": None if request.row % 11 == 3 else answer_to(request),
        }
        for request in requests()
    ]
    assert table.to_pylist() == expected


def fork(target: Callable[[], None]) -> int:
    process = os.fork()
    if process:
        return process
    try:
        target()
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def wait(process: int) -> bool:
    """Whether the child finished its work; False if it was killed. Any other end is a failure."""
    status = os.waitpid(process, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    assert status == 0, f"a child ended with status {status}"
    return True


def kill_at_random(path: Path, seed: int, num_kills: int) -> None:
    chance = random.Random(seed)
    killed = finished = 0
    while killed < num_kills:
        process = fork(lambda: live(path, pause=0.001))
        time.sleep(chance.uniform(0.0, 0.15))
        os.kill(process, signal.SIGKILL)
        if wait(process):
            finished += 1
        else:
            killed += 1
            check_after_death(path)
        if finished or chance.random() < 0.1:  # start over once the job is done, so that every phase is hit
            assert wait(fork(lambda: live(path, pause=0)))
            check(path)
            start_over(path)
            finished = 0
    assert wait(fork(lambda: live(path, pause=0)))
    check(path)
    sys.stdout.write(f"seed {seed}: {killed} kills\n")


def die_before(number: int) -> list[str]:
    """Kill this process before its n-th file operation; returns the list to which the operations' names are added."""
    names: list[str] = []

    def wrap(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            names.append(name)
            if len(names) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return replaced

    for name in OPERATIONS:
        setattr(os, name, wrap(name, getattr(os, name)))
    journal = import_module("longbatch.output.journal").Journal
    journal._put = wrap("journal write", journal._put)
    return names


def kill_at_every_point(path: Path) -> None:
    def counted() -> None:
        names = die_before(0)
        live(path, pause=0)
        (path / "operations").write_text("\n".join(names))

    assert wait(fork(counted))
    check(path)
    operations = (path / "operations").read_text().splitlines()
    killed = 0
    for number in range(1, len(operations) + 1):
        start_over(path)

        def doomed(number: int = number) -> None:
            die_before(number)
            live(path, pause=0)

        killed += not wait(fork(doomed))
        check_after_death(path)
        assert wait(fork(lambda: live(path, pause=0)))
        check(path)
    sys.stdout.write(f"{killed} kills at {len(operations)} operations: {sorted(set(operations))}\n")


if __name__ == "__main__":
    pa.set_cpu_count(1)
    if sys.argv[2] == "random":
        kill_at_random(Path(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        kill_at_every_point(Path(sys.argv[1]))
