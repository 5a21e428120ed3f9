"""Who may work on a run folder. Real processes, real kills, many starters at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from longbatch.errors import ExitCode, RunningError
from longbatch.run.owner import Holder, Owner, find_holders, owner_path, read_holder

HOLD = """
import sys, time
from pathlib import Path
from longbatch.run.owner import Owner
with Owner.acquire(Path(sys.argv[1]), sys.argv[2]) as owner:
    print(owner.holder.token, flush=True)
    sys.stdin.read()
"""
# For each line "FOLDER START": waits for START, tries once, and keeps what it won until the next line.
RACE = """
import sys
from pathlib import Path
from longbatch.errors import RunningError
from longbatch.run.owner import Owner
print("ready", flush=True)
for line in sys.stdin:
    work, start = map(Path, line.split())
    while not start.exists():
        pass
    try:
        owner = Owner.acquire(work, "run")
    except RunningError:
        print("refused", flush=True)
        sys.stdin.readline()
        print("none", flush=True)
    else:
        print("won", flush=True)
        sys.stdin.readline()
        kept = owner.still_holds()
        owner.release()
        print("kept" if kept else "lost", flush=True)
"""
NUM_STARTERS = 6
NUM_RACES = 20


@contextmanager
def process(program: str, *arguments: str | Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def holder_file(work: Path, name: str = "run", **changes: Any) -> Holder:
    """The owner file of a process elsewhere, as this one would have written it, changed."""
    work.mkdir(exist_ok=True)
    holder = replace(Holder.this_process(name, {}), token="feedfacefeedface", **changes)
    owner_path(work, name).write_text(json.dumps(asdict(holder)))
    return holder


def age(path: Path, seconds: float) -> None:
    when = time.time() - seconds
    os.utime(path, (when, when))


def test_a_holder_keeps_others_out_until_it_is_released(tmp_path: Path) -> None:
    with Owner.acquire(tmp_path, "run") as owner:
        assert owner.still_holds()
        with pytest.raises(RunningError) as caught:
            Owner.acquire(tmp_path, "run")
        assert str(os.getpid()) in caught.value.message
        assert owner.holder.host in caught.value.message
        assert owner.holder.since in caught.value.message
        assert caught.value.exit_code is ExitCode.USAGE
        assert "--skip-if-running" in str(caught.value.hint)
    assert not owner.still_holds()
    Owner.acquire(tmp_path, "run").release()
    assert list(tmp_path.iterdir()) == []


def test_an_error_releases(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Owner.acquire(tmp_path, "run"):
        raise ZeroDivisionError
    assert find_holders(tmp_path) == []


def test_shares_run_side_by_side_and_not_beside_a_whole_run(tmp_path: Path) -> None:
    with Owner.acquire(tmp_path, "s0"), Owner.acquire(tmp_path, "s1"):
        assert [holder.name for holder in find_holders(tmp_path)] == ["s0", "s1"]
        with pytest.raises(RunningError, match="process"):
            Owner.acquire(tmp_path, "run")
        assert [holder.name for holder in find_holders(tmp_path)] == ["s0", "s1"]
    with Owner.acquire(tmp_path, "run"), pytest.raises(RunningError):
        Owner.acquire(tmp_path, "s1")


def test_a_killed_holder_is_replaced_at_once(tmp_path: Path, uninstalled_environment: dict[str, str]) -> None:
    with process(HOLD, tmp_path, "run", environment=uninstalled_environment) as child:
        assert child.stdout is not None
        token = child.stdout.readline().strip()
        with pytest.raises(RunningError, match=f"process {child.pid} "):
            Owner.acquire(tmp_path, "run")
        child.send_signal(signal.SIGKILL)
        # Not waited for yet: a process that is dead and still in the table counts as dead.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{child.pid}").exists()
        found = read_holder(tmp_path, "run")
        assert found is not None
        assert found.token == token
        assert not found.is_alive(tmp_path)
        with Owner.acquire(tmp_path, "run") as owner:
            assert owner.still_holds()
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_process_still_holds(tmp_path: Path, uninstalled_environment: dict[str, str]) -> None:
    with process(HOLD, tmp_path, "run", environment=uninstalled_environment) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        age(owner_path(tmp_path, "run"), 86400)
        with pytest.raises(RunningError):
            Owner.acquire(tmp_path, "run")


@pytest.mark.parametrize(
    ("changes", "alive"),
    [
        pytest.param({}, True, id="this process"),
        pytest.param({"pid": 2**22 + 1}, False, id="no such process"),
        pytest.param({"started": "1"}, False, id="its number was given to another process"),
        pytest.param({"boot": "0c5ed5cb-0000-4000-8000-000000000000"}, False, id="started again since"),
        pytest.param({"host": "node7", "boot": "other", "machine": "other"}, True, id="another machine"),
        pytest.param({"machine": "other", "boot": "other"}, True, id="another machine with the same name"),
        pytest.param({"pid_space": "pid:[1]", "pid": 2**22 + 1}, True, id="another container"),
    ],
)
def test_which_holders_are_alive(tmp_path: Path, changes: dict[str, Any], alive: bool) -> None:
    holder = holder_file(tmp_path / "_work", **changes)
    assert holder.is_alive(tmp_path / "_work", {}) is alive


@pytest.mark.parametrize(
    ("owner_age", "status_age", "alive"),
    [(0, None, True), (590, None, True), (610, None, False), (610, 3, True), (86400, 590, True), (86400, 610, False)],
)
def test_silence_of_a_holder_elsewhere(tmp_path: Path, owner_age: float, status_age: float | None, alive: bool) -> None:
    holder = holder_file(tmp_path, host="node7", boot="other", machine="other")
    age(owner_path(tmp_path, "run"), owner_age)
    if status_age is not None:
        (tmp_path / "status-run.json").write_text("{}")
        age(tmp_path / "status-run.json", status_age)
    assert holder.is_alive(tmp_path, {}) is alive
    if alive:
        with pytest.raises(RunningError) as caught:
            Owner.acquire(tmp_path, "run")
        assert "after 10 minutes of silence" in str(caught.value.hint)
    else:
        Owner.acquire(tmp_path, "run").release()
    assert not owner_path(tmp_path, "run").exists() or alive


def test_an_earlier_start_of_the_same_slurm_job_is_dead(tmp_path: Path) -> None:
    holder = holder_file(tmp_path, host="node7", boot="other", machine="other", slurm_job="12", slurm_restarts=1)
    assert not holder.is_alive(tmp_path, {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "2"})
    # The same start on another node: the second task of one srun.
    assert holder.is_alive(tmp_path, {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"})


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"name": "run"}', b"\xff\xfe"])
def test_a_damaged_file_counts_by_its_age(tmp_path: Path, content: bytes) -> None:
    owner_path(tmp_path, "run").write_bytes(content)
    with pytest.raises(RunningError, match="unknown host"):
        Owner.acquire(tmp_path, "run")
    age(owner_path(tmp_path, "run"), 601)
    with Owner.acquire(tmp_path, "run") as owner:
        assert owner.still_holds()


def test_a_file_of_a_newer_version_is_read(tmp_path: Path) -> None:
    holder = holder_file(tmp_path)
    owner_path(tmp_path, "run").write_text(json.dumps({**asdict(holder), "colour": "blue"}))
    assert read_holder(tmp_path, "run") == holder


def test_an_owner_that_was_replaced_releases_nothing(tmp_path: Path) -> None:
    owner = Owner.acquire(tmp_path, "run")
    holder_file(tmp_path)
    assert not owner.still_holds()
    owner.release()
    assert owner_path(tmp_path, "run").exists()


@pytest.fixture(scope="module")
def starters(root: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that run RACE."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with ExitStack() as stack:
        children = [stack.enter_context(process(RACE, environment=environment)) for _ in range(NUM_STARTERS)]
        assert [answer(child) for child in children] == ["ready"] * NUM_STARTERS
        yield children


def answer(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def tell(children: list[subprocess.Popen[str]], line: str) -> None:
    for child in children:
        assert child.stdin is not None
        child.stdin.write(line + "\n")
        child.stdin.flush()


@pytest.mark.parametrize("before", ["nothing", "a dead holder", "a dead claim"])
def test_of_many_starters_one_wins(tmp_path: Path, starters: list[subprocess.Popen[str]], before: str) -> None:
    for race in range(NUM_RACES):
        work, start = tmp_path / f"work{race}", tmp_path / f"start{race}"
        work.mkdir()
        if before != "nothing":
            dead = holder_file(work, pid=2**22 + 1)
            if before == "a dead claim":
                claimed = replace(dead, token="0123456789abcdef")
                (work / f".owner-run.{dead.token}.claim").write_text(json.dumps(asdict(claimed)))
        tell(starters, f"{work} {start}")
        time.sleep(0.01)
        start.touch()
        outcomes = [answer(child) for child in starters]
        assert sorted(outcomes) == ["refused"] * (NUM_STARTERS - 1) + ["won"]
        tell(starters, "")
        kept = [answer(child) for child in starters]
        assert kept == ["kept" if outcome == "won" else "none" for outcome in outcomes]
        assert list(work.iterdir()) == []


def test_a_starter_killed_while_it_takes_over_is_replaced(
    tmp_path: Path, uninstalled_environment: dict[str, str]
) -> None:
    """Killed between the claim and the new owner file, the worst moment; the next one claims the claim."""
    program = HOLD.replace(
        "from longbatch.run.owner import Owner",
        "import os; from longbatch.run import owner as module; from longbatch.run.owner import Owner\n"
        "module.os.replace = lambda *paths: os.kill(os.getpid(), 9)",
    )
    for token in ("feedfacefeedface", None):
        if token:
            holder_file(tmp_path, pid=2**22 + 1)
        with process(program, tmp_path, "run", environment=uninstalled_environment) as child:
            assert child.wait(30) == -signal.SIGKILL
    assert len(list(tmp_path.glob(".owner-run.*.claim"))) == 2
    with Owner.acquire(tmp_path, "run") as owner:
        assert owner.still_holds()
        assert list(tmp_path.glob(".owner-run.*.claim")) == []
