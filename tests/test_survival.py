"""Killed, damaged, filled up, poisoned, started twice: a run still ends with one right row for each id."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_folders import results, run, tiny_model, words, write_manifest
from survival import PHASES, Command, done_in, make_rows, outcome, survive, wait_until

from longbatch.errors import ExitCode, RunningError, UsageError
from longbatch.output import RunFolder, recover, verify
from longbatch.run.owner import Owner

__all__ = ["tiny_model"]

FLAGS: dict[str, Any] = {"decode_batch": 4, "wave_tokens": 512, "threads": 1}


@pytest.fixture(scope="module")
def environment(root: Path) -> dict[str, str]:
    paths = os.pathsep.join([str(root), str(root / "kernels")])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


# ------------------------------------------------------------------------------------------------ kills


def test_kills_in_every_phase(tmp_path: Path, tiny_model: Path, environment: dict[str, str]) -> None:
    seed = random.randrange(1 << 32)
    phases, targets, jobs = survive(tmp_path, tiny_model, environment, seed=seed, kills=4, num_rows=120)
    sys.stdout.write(f"seed {seed}, kills {dict(phases)} {dict(targets)} in {jobs} jobs\n")
    assert min(phases[phase] for phase in PHASES) >= 4


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_hundred_kills(tmp_path: Path, tiny_model: Path, environment: dict[str, str]) -> None:
    seed = random.randrange(1 << 32)
    phases, targets, jobs = survive(tmp_path, tiny_model, environment, seed=seed, kills=40, num_rows=600)
    sys.stdout.write(f"seed {seed}, kills {dict(phases)} {dict(targets)} in {jobs} jobs\n")
    assert min(phases[phase] for phase in PHASES) >= 30
    assert sum(phases.values()) >= 200


# ----------------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_manifest(tmp_path_factory.mktemp("manifest") / "manifest.jsonl", make_rows(60))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, manifest: Path, tiny_model: Path) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert run(manifest, tiny_model, out, **FLAGS) is ExitCode.OK
    return outcome(out)


@pytest.fixture(scope="module")
def killed(
    tmp_path_factory: pytest.TempPathFactory, manifest: Path, tiny_model: Path, environment: dict[str, str]
) -> Path:
    """A folder whose run was killed when its journal held a good part of the answers."""
    out = tmp_path_factory.mktemp("killed") / "out"
    command = Command(manifest, tiny_model, out, environment, "--max-tokens", "4")
    command.start()
    assert wait_until(lambda: journal_size(out) > 60_000, 60)
    command.process.kill()
    command.finish()
    assert wait_until(lambda: done_in(out) is not None, 1)
    return out


def journal_size(out: Path) -> int:
    return sum(path.stat().st_size for path in out.glob("_work/*/journal-*"))


def flip(path: Path, share: float) -> None:
    """Flip one bit, so far into the file."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * share)] ^= 16
    path.write_bytes(content)


def only(out: Path, pattern: str) -> Path:
    (path,) = out.glob(pattern)
    return path


def torn_journal(out: Path) -> None:
    path = only(out, "_work/w0/journal-*")
    os.truncate(path, path.stat().st_size - 7)


def flipped_journal(out: Path) -> None:
    flip(only(out, "_work/w0/journal-*"), 0.5)


def flipped_part(share: float) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        recover(RunFolder.open(out))
        flip(only(out, "parts/*.parquet"), share)

    return damage


def missing_part(out: Path) -> None:
    recover(RunFolder.open(out))
    only(out, "parts/*.parquet").unlink()


def stale_files(out: Path) -> None:
    for name in (".run.json.ab.tmp", "_work/w0/.part-w0-1-0.parquet.ab.tmp", "_work/w0/.inflight.json.tmp"):
        (out / name).write_bytes(b"half of")
    (out / "_work" / "w0" / ".reserve.tmp").write_bytes(b"")
    (out / "_work" / ".merge-99999" / "results").mkdir(parents=True)
    (out / "_work" / ".merge-99999" / "results" / "results-00000.parquet").write_bytes(b"half of")


def clock_moved_back(out: Path) -> None:
    later = time.time() + 86_400
    for path in out.rglob("*"):
        os.utime(path, (later, later))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (torn_journal, None),
        (flipped_journal, "damaged"),
        (flipped_part(0.3), "damaged"),
        (flipped_part(0.02), "damaged"),
        (flipped_part(0.99), "damaged"),
        (missing_part, "missing"),
        (stale_files, None),
        (clock_moved_back, None),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_damage_is_found_said_and_mended(
    tmp_path: Path,
    killed: Path,
    undisturbed: list[dict[str, Any]],
    manifest: Path,
    tiny_model: Path,
    damage: Callable[[Path], None],
    said: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    shutil.copytree(killed, out)
    damage(out)
    assert run(manifest, tiny_model, out, quiet=False, **FLAGS) is ExitCode.OK
    text = capsys.readouterr().err
    assert (said is None) == ("run again" not in text), text
    assert (said or "") in text
    assert outcome(out) == undisturbed
    assert (out / "_SUCCESS.json").exists()
    assert not list(out.glob("_work/**/.*.tmp"))
    if damage is not missing_part:
        assert verify(RunFolder.open(out)).damage == ()


# ------------------------------------------------------------------------------------------------- disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 80 MiB: 64 are the worker's reserve."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    """Take all space that is left."""
    with path.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1 << 8, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs is Linux's")
def test_a_disk_that_fills_up(
    small_disk: Path,
    manifest: Path,
    undisturbed: list[dict[str, Any]],
    tiny_model: Path,
    environment: dict[str, str],
) -> None:
    out, ballast = small_disk / "out", small_disk / "ballast"
    command = Command(manifest, tiny_model, out, environment, "--max-tokens", "4")
    command.start()
    assert wait_until(lambda: journal_size(out) > 20_000, 60)
    done = done_in(out)
    assert done is not None
    fill(ballast)
    code, text = command.finish()
    assert code == ExitCode.DISK, text
    assert "No space left" in text
    assert "free some space" in text
    saved = done_in(out)
    assert saved is not None
    assert saved.damage == ()
    assert set(done.answers.tolist()) <= set(saved.answers.tolist())
    full, text = command.run()
    assert full == ExitCode.DISK, text
    ballast.unlink()
    code, text = command.run()
    assert code == ExitCode.OK, text
    assert outcome(out) == undisturbed


# --------------------------------------------------------------------------------------------- poison rows


class Watcher(threading.Thread):
    """Does something to the worker whenever a certain row is under way in it."""

    def __init__(self, command: Command, actions: dict[int, Callable[[psutil.Process], None]]) -> None:
        super().__init__(daemon=True)
        self._command = command
        self._actions = actions
        self.times: dict[int, set[int]] = {row: set() for row in actions}

    def run(self) -> None:
        while not self._command.ended:
            time.sleep(0.002)
            for row in self._command.begun_rows():
                action = self._actions.get(row)
                for worker in self._command.workers() if action else ():
                    if action and worker.pid not in self.times[row]:
                        self.times[row].add(worker.pid)
                        try:
                            action(worker)
                        except psutil.NoSuchProcess:
                            continue


def test_poison_rows_among_good_ones(tmp_path: Path, tiny_model: Path, environment: dict[str, str]) -> None:
    rows = [{"id": f"good{i}", "prompt": words(10 + i % 30, i), "max_tokens": 4} for i in range(100)]
    kill, hang = 17, 60
    rows.insert(kill, {"id": "kill", "prompt": words(60), "max_tokens": 400})
    rows.insert(hang, {"id": "hang", "prompt": words(50), "max_tokens": 400})
    manifest, out = write_manifest(tmp_path / "manifest.jsonl", rows), tmp_path / "out"
    command = Command(manifest, tiny_model, out, environment, "--row-timeout", "6")
    command.start()
    watcher = Watcher(command, {kill: psutil.Process.kill, hang: psutil.Process.suspend})
    watcher.start()
    code, text = command.finish()
    assert code == ExitCode.FAILED_ROWS, text
    found = results(out)
    failed = {row["id"]: row["error"] for row in found if row["status"] == "error"}
    assert {name: error["type"] for name, error in failed.items()} == {"kill": "crashed_engine", "hang": "row_timeout"}
    assert "twice" in failed["kill"]["message"]
    assert [len(watcher.times[row]) for row in (kill, hang)] == [2, 2]
    good = [row for row in found if row["status"] == "ok"]
    assert len(good) == 100
    assert all(row["usage"]["completion_tokens"] == 4 for row in good)


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit is Linux's")
def test_a_row_that_exhausts_memory(tmp_path: Path, tiny_model: Path, environment: dict[str, str]) -> None:
    """The kernel caps the worker's address space when the row begins. No smaller step helps: what does not fit is the
    row's own answer, 20,000 scored tokens."""
    rows = [{"id": f"good{i}", "prompt": words(10 + i % 30, i), "max_tokens": 4} for i in range(100)]
    rows.insert(40, {"id": "large", "task": "score", "prompt": words(20_000)})
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 17}))
    manifest, out = write_manifest(tmp_path / "manifest.jsonl", rows), tmp_path / "out"
    flags = ("--wave-tokens", "65536", "--kv-tokens", "65536")
    command = Command(manifest, model, out, {**environment, "MALLOC_ARENA_MAX": "1"}, *flags)
    command.start()

    def cap(worker: psutil.Process) -> None:
        size = worker.memory_info().vms + (1 << 20)
        resource.prlimit(worker.pid, resource.RLIMIT_AS, (size, size))

    watcher = Watcher(command, {40: cap})
    watcher.start()
    code, text = command.finish()
    assert code == ExitCode.FAILED_ROWS, text
    assert watcher.times[40]
    found = results(out)
    failed = [(row["id"], row["error"]["type"]) for row in found if row["status"] == "error"]
    assert len(failed) == 1, failed
    assert failed[0] in (("large", "out_of_memory"), ("large", "crashed_engine"))
    assert sum(row["status"] == "ok" for row in found) == 100


# ------------------------------------------------------------------------------------- several starts, manifests


def test_two_runs_at_once_and_cron(
    tmp_path: Path, manifest: Path, undisturbed: list[dict[str, Any]], tiny_model: Path, environment: dict[str, str]
) -> None:
    out = tmp_path / "out"
    first, second = (Command(manifest, tiny_model, out, environment, "--max-tokens", "4") for _ in range(2))
    first.start()
    second.start()
    assert wait_until(lambda: bool(list(out.glob("_work/*/inflight.json"))), 60)
    assert wait_until(lambda: first.ended or second.ended, 60)
    with pytest.raises(RunningError, match="is being worked on by process"):
        run(manifest, tiny_model, out, **FLAGS)
    assert run(manifest, tiny_model, out, skip_if_running=True, **FLAGS) is ExitCode.OK
    assert not (out / "_SUCCESS.json").exists()
    ends = [first.finish(), second.finish()]
    assert sorted(code for code, _ in ends) == [ExitCode.OK, ExitCode.USAGE], ends
    assert outcome(out) == undisturbed


def test_an_owner_file_of_a_dead_process(
    tmp_path: Path, killed: Path, manifest: Path, undisturbed: list[dict[str, Any]], tiny_model: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(killed, out)
    assert (out / "_work" / "owner-run.json").exists()
    assert run(manifest, tiny_model, out, skip_if_running=True, **FLAGS) is ExitCode.OK
    assert outcome(out) == undisturbed
    assert not (out / "_work" / "owner-run.json").exists()
    Owner.acquire(out / "_work", "run").release()


def test_a_manifest_that_grew_shrank_and_was_edited(tmp_path: Path, tiny_model: Path) -> None:
    rows = make_rows(8)
    manifest, out = tmp_path / "manifest.jsonl", tmp_path / "out"

    def answers(*chosen: dict[str, Any], **settings: Any) -> list[tuple[str, int, str, int]]:
        write_manifest(manifest, chosen)
        assert run(manifest, tiny_model, out, **FLAGS, **settings) is ExitCode.OK
        return [(row["id"], row["row"], row["text"], row["attempt"]) for row in results(out)]

    first = answers(*rows[:5])
    grown = answers(*rows)
    assert grown[:5] == first
    assert [row[0] for row in grown] == [f"r{i}" for i in range(8)]
    shrunk = answers(*rows[2:6])
    assert [(name, row) for name, row, *_ in shrunk] == [("r2", 0), ("r3", 1), ("r4", 2), ("r5", 3)]
    assert [row[2:] for row in shrunk] == [row[2:] for row in grown[2:6]]
    edited = {**rows[3], "prompt": words(33, 99)}
    with pytest.raises(UsageError, match="1 rows changed since they were answered"):
        answers(rows[2], edited, *rows[4:6])
    assert [row[2] for row in shrunk] == [row["text"] for row in results(out)]
    updated = answers(rows[2], edited, *rows[4:6], update=True)
    assert updated[1][2] != shrunk[1][2]
    assert [updated[i] for i in (0, 2, 3)] == [shrunk[i] for i in (0, 2, 3)]
    assert answers(*rows) == grown


# --------------------------------------------------------------------------------------- the end of a supervisor


def test_a_worker_ends_with_its_supervisor(
    tmp_path: Path, manifest: Path, tiny_model: Path, environment: dict[str, str]
) -> None:
    command = Command(manifest, tiny_model, tmp_path / "out", environment)
    command.start()
    assert wait_until(lambda: bool(command.begun_rows()), 60)
    (worker,) = command.workers()
    command.process.send_signal(signal.SIGKILL)
    command.finish()
    assert not psutil.wait_procs([worker], timeout=5)[1]


@pytest.mark.skipif(sys.platform != "linux", reason="a stopped supervisor is not seen to be alive elsewhere")
def test_a_stopped_supervisor_kills_no_healthy_worker(
    tmp_path: Path, manifest: Path, undisturbed: list[dict[str, Any]], tiny_model: Path, environment: dict[str, str]
) -> None:
    out = tmp_path / "out"
    command = Command(manifest, tiny_model, out, environment, "--max-tokens", "4", "--row-timeout", "4")
    command.start()
    assert wait_until(lambda: bool(command.begun_rows()), 60)
    command.process.send_signal(signal.SIGSTOP)
    time.sleep(6)
    command.process.send_signal(signal.SIGCONT)
    code, text = command.finish()
    assert code == ExitCode.OK, text
    assert len(list((out / "logs").glob("worker-*"))) == 1
    assert outcome(out) == undisturbed
