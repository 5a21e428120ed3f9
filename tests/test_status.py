"""The status of a run: what supervisors write, and what readers make of it and of the parts."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from output_rows import make_failure, make_folder, make_request, make_result

from longbatch.core import Request
from longbatch.output import KeyTable, ResultWriter, RunFolder, merge
from longbatch.run.index import _DTYPE, RowIndex
from longbatch.run.owner import Owner, owner_path
from longbatch.run.planning import index_path
from longbatch.run.status import (
    RunStatus,
    Snapshot,
    StatusFile,
    StatusReader,
    WorkerState,
    read_status,
    read_supervisors,
    status_path,
)
from longbatch.run.status_view import print_status, status_line, watch


def store_index(folder: RunFolder, requests: list[Request]) -> None:
    RowIndex(KeyTable.of(requests), np.zeros(len(requests), _DTYPE), {}, "identity").save(index_path(folder))


def fill(folder: RunFolder, results: list[Any]) -> None:
    with ResultWriter(folder, "w0", reserve_bytes=0) as writer:
        writer.append(*results)


def snapshot(state: str = "running", **values: Any) -> Snapshot:
    return Snapshot(state, started=1000.0, **values)


def change(folder: RunFolder, name: str, **values: Any) -> None:
    """Another content of a status file, as another process would have written it."""
    path = status_path(folder.work, name)
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_folder(tmp_path)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# ------------------------------------------------------------------------------------------- the file


def test_what_is_written_is_read(folder: RunFolder) -> None:
    worker = WorkerState("w0", 17, "cuda:0", "busy", 0.5, 3)
    written = snapshot(rows_total=10, rows_done=4, rows_failed=1, errors={"io_error": 1}, workers=(worker,))
    before = time.time()
    owner = Owner.acquire(folder.work, "run")
    assert StatusFile(folder.work, "run").write(written)
    (supervisor,) = read_supervisors(folder.work)
    assert supervisor.snapshot == written
    assert (supervisor.name, supervisor.host, supervisor.pid) == ("run", socket.gethostname(), os.getpid())
    assert before <= supervisor.updated <= time.time()
    assert supervisor.alive
    assert supervisor.state == "running"
    owner.release()
    assert not read_supervisors(folder.work)[0].alive


def test_written_at_most_every_two_seconds_or_when_the_state_changes(folder: RunFolder) -> None:
    clock = Clock()
    file = StatusFile(folder.work, "run", clock)
    assert file.write(snapshot("starting"))
    clock.now += 1.9
    assert not file.write(snapshot("starting"))
    assert file.write(snapshot("running"))
    clock.now += 1.9
    assert not file.write(snapshot("running", rows_done=1))
    clock.now += 0.2
    assert file.write(snapshot("running", rows_done=2))
    assert read_supervisors(folder.work)[0].snapshot.rows_done == 2


def test_rates_and_what_is_left(folder: RunFolder) -> None:
    clock = Clock()
    file = StatusFile(folder.work, "run", clock)
    file.write(snapshot(rows_total=100, tokens_total=10_000))
    assert read_supervisors(folder.work)[0].eta_seconds is None
    clock.now += 10
    file.write(snapshot(rows_total=100, tokens_total=10_000, rows_done=5, tokens_done=2000, generated=50))
    (found,) = read_supervisors(folder.work)
    assert (found.rows_per_second, found.tokens_per_second, found.generated_per_second) == (0.5, 200.0, 5.0)
    assert found.eta_seconds == 40.0
    clock.now += 10
    file.write(snapshot(rows_total=100, tokens_total=10_000, rows_done=25, tokens_done=10_000))
    assert read_supervisors(folder.work)[0].eta_seconds == pytest.approx(75 / (25 / 20))
    file.write(snapshot("finished", rows_total=100, rows_done=100))
    assert read_supervisors(folder.work)[0].eta_seconds is None


def test_device_time_adds_up_over_processes(folder: RunFolder) -> None:
    for seconds in (1800.0, 3600.0):
        file = StatusFile(folder.work, "run")
        file.write(snapshot(gpu_seconds=0.0))
        file.write(snapshot("interrupted", gpu_seconds=seconds, price_per_gpu_hour=2.0))
    status = read_status(folder.path)
    assert status.gpu_hours == 1.5
    assert status.price == 3.0


def test_a_disk_that_refuses_ends_nothing(folder: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    file = StatusFile(folder.work, "run")
    (folder.work / ".status-run.json.tmp").symlink_to("/dev/full")
    with caplog.at_level("WARNING", "longbatch"):
        assert not file.write(snapshot())
    assert "No space left" in caplog.text
    assert read_supervisors(folder.work) == ()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"snapshot": {}}', b"\xff"])
def test_a_damaged_file_is_left_out(folder: RunFolder, content: bytes) -> None:
    StatusFile(folder.work, "s1").write(snapshot())
    status_path(folder.work, "s0").write_bytes(content)
    assert [supervisor.name for supervisor in read_supervisors(folder.work)] == ["s1"]
    StatusFile(folder.work, "s0").write(snapshot())
    assert [supervisor.name for supervisor in read_supervisors(folder.work)] == ["s0", "s1"]


def test_fields_of_a_newer_version_are_passed_over(folder: RunFolder) -> None:
    StatusFile(folder.work, "run").write(snapshot(rows_done=3))
    content = json.loads(status_path(folder.work, "run").read_text())["snapshot"]
    change(folder, "run", mood="good", snapshot={**content, "mood": "better"})
    assert read_supervisors(folder.work)[0].snapshot.rows_done == 3


# ---------------------------------------------------------------------------------------- who is alive


SUPERVISE = """
import sys, time
from pathlib import Path
from longbatch.run.owner import Owner
from longbatch.run.status import Snapshot, StatusFile
work = Path(sys.argv[1])
with Owner.acquire(work, "run"):
    print("acquired", flush=True)
    sys.stdin.readline()
    StatusFile(work, "run").write(Snapshot("running", 1.0))
    print("written", flush=True)
    if sys.stdin.readline() == "fail\\n":
        raise SystemExit(1)
"""


@contextmanager
def supervisor_process(work: Path, environment: dict[str, str]) -> Iterator[Callable[[str], str]]:
    """A supervisor that does nothing; what is yielded sends it a line and returns the next one from it."""
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, str(work)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "acquired\n"

        def talk(line: str) -> str:
            if line == "kill":
                process.kill()
                return ""
            process.stdin.write(f"{line}\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            return process.stdout.readline()  # type: ignore[union-attr]

        try:
            yield talk
        finally:
            process.kill()


def test_from_start_to_a_kill(folder: RunFolder, uninstalled_environment: dict[str, str]) -> None:
    """And the one that follows is not taken for the dead one, nor held back by it."""
    StatusFile(folder.work, "run").write(snapshot("interrupted", gpu_seconds=3600.0))
    for _ in range(2):
        with supervisor_process(folder.work, uninstalled_environment) as talk:
            status = read_status(folder.path)
            assert status.state == "starting"
            assert status.gpu_hours == 1.0
            talk("go on")
            assert read_status(folder.path).state == "running"
            assert read_supervisors(folder.work)[0].alive
            talk("kill")
            deadline = time.monotonic() + 10
            while read_status(folder.path).state != "dead" and time.monotonic() < deadline:
                time.sleep(0.05)
            assert read_status(folder.path).state == "dead", "killed, and not waited for"
        assert read_status(folder.path).state == "dead"
        assert not read_supervisors(folder.work)[0].alive


def test_one_that_ended_without_a_word_failed(folder: RunFolder, uninstalled_environment: dict[str, str]) -> None:
    with supervisor_process(folder.work, uninstalled_environment) as talk:
        talk("go on")
        assert talk("fail") == ""
    assert read_status(folder.path).state == "failed"


def test_the_status_of_an_earlier_process_of_the_same_number(folder: RunFolder) -> None:
    StatusFile(folder.work, "run").write(snapshot("interrupted"))
    change(folder, "run", updated=time.time() - 100)
    with Owner.acquire(folder.work, "run"):
        assert read_status(folder.path).state == "starting"
        StatusFile(folder.work, "run").write(snapshot("running"))
        assert read_status(folder.path).state == "running"


def test_a_damaged_owner_file(folder: RunFolder) -> None:
    owner_path(folder.work, "run").write_text("{")
    assert read_status(folder.path).supervisors[0].host == "an unknown host"


def test_one_that_ended_is_not_dead(folder: RunFolder) -> None:
    StatusFile(folder.work, "run").write(snapshot("interrupted", exit_code=75))
    assert read_status(folder.path).state == "interrupted"
    assert read_status(folder.path).supervisors[0].snapshot.exit_code == 75


# ------------------------------------------------------------------------------------- the whole folder


def test_a_folder_in_which_nothing_ran(folder: RunFolder) -> None:
    status = read_status(folder.path)
    assert (status.state, status.rows_total, status.rows_done, status.complete) == ("not started", None, 0, False)
    assert status.price is None


def test_rows_are_counted_by_what_the_manifest_asks_for(folder: RunFolder) -> None:
    requests = [make_request(row) for row in range(6)]
    fill(
        folder,
        [
            make_result(requests[0]),
            make_failure(requests[1]),
            make_failure(requests[2], "io_error"),
            make_result(requests[2], attempt=2),
            make_failure(requests[3], "io_error"),
            make_result(make_request(4, content="as it was before")),
            make_result(make_request(77)),
        ],
    )
    assert read_status(folder.path).rows_done == 6, "without an index everything counts"
    store_index(folder, requests)
    status = read_status(folder.path)
    assert (status.rows_total, status.rows_done, status.rows_failed) == (6, 4, 2)
    assert status.errors == {"prompt_too_long": 1, "io_error": 1}


def test_results_still_in_a_journal_count(folder: RunFolder) -> None:
    writer = ResultWriter(folder, "w0", reserve_bytes=0)
    writer.append(make_result(make_request(0)))
    writer.flush()
    assert read_status(folder.path).rows_done == 1
    writer.close()
    assert read_status(folder.path).rows_done == 1


def test_states_from_start_to_end(folder: RunFolder) -> None:
    requests = [make_request(row) for row in range(2)]
    store_index(folder, requests)
    file = StatusFile(folder.work, "run")
    with Owner.acquire(folder.work, "run"):
        for state in ("starting", "planning", "running", "stopping", "merging"):
            file.write(snapshot(state))
            assert read_status(folder.path).state == state
        file.write(snapshot("finished"))
        assert read_status(folder.path).state == "incomplete"
    assert read_status(folder.path).state == "incomplete"
    fill(folder, [make_result(request) for request in requests])
    assert read_status(folder.path).state == "not merged"
    merge(folder, KeyTable.of(requests))
    status = read_status(folder.path)
    assert (status.state, status.complete) == ("finished", True)
    # The manifest grew: the results are not complete any more.
    store_index(folder, [*requests, make_request(2)])
    status = read_status(folder.path)
    assert (status.state, status.complete, status.rows_total) == ("incomplete", False, 3)


def test_shards_together(folder: RunFolder) -> None:
    with ExitStack() as owners:
        for i, state in enumerate(("running", "merging", "interrupted")):
            owners.enter_context(Owner.acquire(folder.work, f"s{i}"))
            clock = Clock()
            file = StatusFile(folder.work, f"s{i}", clock)
            file.write(snapshot(state, rows_total=100, tokens_total=1000))
            clock.now += 10
            file.write(snapshot(state, rows_total=100, tokens_total=1000, rows_done=10, tokens_done=100 * (i + 1)))
        status = read_status(folder.path)
    assert status.state == "running"
    assert status.eta_seconds == 90.0, "the slowest of those at work"
    table = json.loads(json.dumps(status.as_dict()))
    assert table["rows_per_second"] == 2.0
    assert table["tokens_per_second"] == 30.0
    assert [item["state"] for item in table["supervisors"]] == ["running", "merging", "interrupted"]


def test_json_has_the_age_of_each_sign(folder: RunFolder) -> None:
    worker = WorkerState("w0", 17, "cuda:0", "busy", 30.0)
    StatusFile(folder.work, "run").write(snapshot(workers=(worker,)))
    change(folder, "run", updated=time.time() - 60)
    table = json.loads(json.dumps(read_status(folder.path).as_dict()))
    (supervisor,) = table["supervisors"]
    assert supervisor["heartbeat_age"] == pytest.approx(60, abs=5)
    assert supervisor["workers"][0]["heartbeat_age"] == pytest.approx(90, abs=5)


def test_a_reader_counts_again_only_when_that_is_cheap(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    from longbatch.run import status as module

    calls: list[float] = []

    def slow(path: RunFolder) -> tuple[int | None, dict[str, int]]:
        calls.append(time.monotonic())
        time.sleep(0.05)
        return 10, {"ok": len(calls)}

    monkeypatch.setattr(module, "_count", slow)
    reader = StatusReader(folder.path)
    end = time.monotonic() + 1.3
    while time.monotonic() < end:
        assert reader.read().rows_done == len(calls)
        time.sleep(0.01)
    assert 2 <= len(calls) <= 3


# --------------------------------------------------------------------------------------- what is printed


def make_status(folder: RunFolder) -> RunStatus:
    """A run at work, and a shard that was killed on another machine two hours ago."""
    requests = [make_request(row) for row in range(4)]
    store_index(folder, requests)
    fill(folder, [make_result(requests[0]), make_failure(requests[1], "io_error")])
    clock = Clock()
    file = StatusFile(folder.work, "run", clock)
    file.write(snapshot(rows_total=4, tokens_total=400))
    clock.now += 10
    worker = WorkerState("w0", 17, "cuda:0", "busy", 0.0, 2)
    file.write(
        snapshot(
            rows_total=4, rows_done=2, tokens_total=400, tokens_done=200, generated=5000, workers=(worker,),
            gpu_seconds=1800, price_per_gpu_hour=2.5,
        )
    )  # fmt: skip
    with Owner.acquire(folder.work, "s9"):
        StatusFile(folder.work, "s9").write(snapshot(rows_total=4))
        path = owner_path(folder.work, "s9")
        dead = {
            **json.loads(path.read_text()),
            "host": "elsewhere",
            "machine": "x",
            "since": "2020-01-01T00:00:00+00:00",
        }
        change(folder, "s9", host="elsewhere", updated=time.time() - 7200)
    path.write_text(json.dumps(dead))
    for touched in (path, status_path(folder.work, "s9")):
        os.utime(touched, (time.time() - 7200,) * 2)
    with Owner.acquire(folder.work, "run"):
        return read_status(folder.path)


def test_what_a_person_reads(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    print_status(make_status(folder))
    printed = capsys.readouterr()
    lines = [" ".join(line.split()) for line in printed.out.splitlines()]
    for line in (
        f"run {folder.path}, running",
        "rows 2/4 done, 1 failed",
        "io_error: 1",
        "rates 0.2 rows/s, prefill 20 tok/s, decode 500 tok/s, ETA 10s",
        "device time 30m00s, price 1.25",
    ):
        assert line in lines
    assert any(re.fullmatch(r"w0 17 cuda:0 busy \d\.\ds 2 begun", line) for line in lines)
    (dead,) = [line for line in lines if line.startswith("s9 ")]
    assert "dead" in dead
    assert "2h00m" in dead
    assert "\x1b" not in printed.out


def test_as_one_line(folder: RunFolder) -> None:
    line = status_line(make_status(folder))
    assert line[10:].split(" ", 2)[1] == "running"
    assert "2/4 done 1 failed 0.2 rows/s" in line


def test_watch_ends_with_the_run(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    import threading

    owner = Owner.acquire(folder.work, "run")
    file = StatusFile(folder.work, "run")
    file.write(snapshot(rows_total=1))

    def finish() -> None:
        fill(folder, [make_result(make_request(0))])
        file.write(snapshot("interrupted", rows_total=1))
        owner.release()

    timer = threading.Timer(0.5, finish)
    timer.start()
    begin = time.monotonic()
    watch(folder.path)
    timer.join()
    assert time.monotonic() - begin < 20
    first, last = capsys.readouterr().out.splitlines()
    assert first[11:].startswith("running 0/? done")
    assert last[11:].startswith("interrupted 1/? done")
