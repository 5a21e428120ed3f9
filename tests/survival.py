"""Runs over a tiny model that are killed by SIGKILL, again and again, in phases that their own files and stacks show.

A worker writes its stacks to its log when it gets SIGUSR2, so a look at it tells whether it is in prefill, in decode,
or in its journal's thread; the kill follows within a millisecond. A supervisor is stopped (SIGSTOP) when a file of the
phase appears, looked at while it cannot move, and killed if the file is still there. After each death everything that
was done before it must still be there; after a clean finish the results are those of a run that nobody disturbed.

    python survival.py FOLDER SEED KILLS_IN_EACH_PHASE
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
from run_folders import make_tiny_model, words, write_manifest

from longbatch.output import Done, RunFolder, scan

IN_WORKER = ("prefill", "decode", "journal write")
IN_SUPERVISOR = ("part publish", "merge")
PHASES = (*IN_WORKER, *IN_SUPERVISOR)
TARGETS = ("worker", "supervisor", "both")
# What a worker's stacks show in each phase; part publish is told apart because it uses the journal's files too.
STACKS = {
    "prefill": r"in _prefill\b",
    "decode": r"in _decode_step\b",
    "journal write": r'output/(rolling|journal|rows)\.py"',
    "part publish": r"in publish_journal\b",
}
COMPARED = ("id", "row", "sample", "status", "text", "finish_reason", "error")
FLAGS = ("--gpus", "0", "--threads", "1", "--decode-batch", "4", "--wave-tokens", "512", "--progress", "none")
LIFE_SECONDS = 60.0


def make_rows(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with prompts of 8 to 80 tokens and answers of 4 to 48."""
    chance = random.Random(seed)
    return [
        {"id": f"r{i}", "prompt": words(chance.randint(8, 80), i), "max_tokens": chance.randint(4, 48)}
        for i in range(number)
    ]


class Command:
    """`longbatch run` as a process of its own, over one manifest and one folder."""

    def __init__(self, manifest: Path, model: Path, out: Path, environment: dict[str, str], *flags: str) -> None:
        self.out = out
        self._environment = environment
        self._line = [sys.executable, "-m", "longbatch", "run", str(manifest), "-o", str(out), "--model", str(model)]
        self._line += [*FLAGS, *flags]
        self.process: subprocess.Popen[str]

    def start(self) -> None:
        self.process = subprocess.Popen(self._line, env=self._environment, stderr=subprocess.PIPE, text=True)

    def finish(self, timeout: float = 240.0) -> tuple[int, str]:
        """Wait for the end: exit code and what it said."""
        _, text = self.process.communicate(timeout=timeout)
        return self.process.returncode, text

    def run(self, timeout: float = 240.0) -> tuple[int, str]:
        """Undisturbed, from start to end."""
        self.start()
        return self.finish(timeout)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def workers(self) -> list[psutil.Process]:
        """The worker processes that are there now."""
        try:
            return psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return []

    def begun_rows(self) -> list[int]:
        """Manifest rows that a worker has begun and not finished."""
        rows: list[int] = []
        for path in self.out.glob("_work/*/inflight.json"):
            try:
                rows += [entry[0] for entry in json.loads(path.read_bytes())]
            except (FileNotFoundError, ValueError):
                continue
        return rows


def done_in(out: Path) -> Done | None:
    """What a run folder holds; None before it is one."""
    return scan(RunFolder.open(out)) if (out / "run.json").exists() else None


def outcome(out: Path) -> list[dict[str, Any]]:
    """What must be the same in every run: the answers, in manifest order."""
    table = pq.read_table(out / "results", columns=list(COMPARED))
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def wait_until(condition: Callable[[], bool], seconds: float, pause: float = 0.01) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


def phases_of(worker: psutil.Process, log: Path) -> set[str]:
    """The phases in which a worker is, by the stacks that it writes to its log."""
    before = log.stat().st_size
    worker.send_signal(signal.SIGUSR2)
    size, end = before, time.monotonic() + 0.25
    while time.monotonic() < end:
        time.sleep(0.0005)
        now = log.stat().st_size
        if now == size > before:
            break
        size = now
    with log.open("rb") as file:
        file.seek(before)
        stacks = file.read().decode(errors="replace")
    return {phase for phase, pattern in STACKS.items() if re.search(pattern, stacks)}


class Killer:
    """Kills one job until each phase had its share of kills in it. left: kills still wanted, by phase."""

    def __init__(self, command: Command, chance: random.Random, left: Counter[str], targets: Counter[str]) -> None:
        self._command = command
        self._chance = chance
        self._left = left
        self._targets = targets
        self._answers: set[bytes] = set()
        self._text = ""

    def work(self) -> None:
        """Until no kill is wanted that this job still allows."""
        while max(self._left.values()) > 0:
            self._command.start()
            try:
                self._one_life()
            finally:
                self._end()
            code = self._command.process.returncode
            assert code in (0, 3, 5, -signal.SIGKILL), f"ended with {code}: {self._text}"
            self._check_after_death()
            if code in (0, 3):
                if self._left["merge"] <= 0:
                    return
                # Merged before it could be killed: as if somebody had thrown the results away.
                (self._command.out / "_SUCCESS.json").unlink()

    def _one_life(self) -> None:
        """One start of the command; returns after the supervisor's death or end."""
        if self._kill_while_publishing():
            return
        end = time.monotonic() + LIFE_SECONDS
        while not self._command.ended and time.monotonic() < end:
            if self._left["merge"] > 0 and self._merges():
                if self._kill_supervisor_in("merge", self._merges, self._merges):
                    return
                continue
            wanted = [phase for phase in IN_WORKER if self._left[phase] > 0]
            if not wanted and self._left["part publish"] > 0:
                wanted = ["journal write"]  # what makes a journal that somebody else must publish
            worker = next(iter(self._command.workers()), None)
            if not wanted or worker is None or not self._command.begun_rows():
                time.sleep(0.002)
                continue
            phase, target = self._chance.choice(wanted), self._chance.choice(TARGETS)
            time.sleep(self._chance.uniform(0.0, 0.5))
            if self._kill_worker_in(phase, worker, target) and (target != "worker" or self._kill_while_publishing()):
                return

    def _kill_worker_in(self, phase: str, worker: psutil.Process, target: str) -> bool:
        """Look at the worker until it is in the phase, then kill; False if it ended before."""
        logs = self._command.out / "logs"
        end = time.monotonic() + 5.0
        while time.monotonic() < end and not self._command.ended:
            newest = max(logs.glob("worker-w0-*.log"), key=lambda path: int(path.stem.rpartition("-")[2]))
            try:
                if worker.status() == psutil.STATUS_ZOMBIE:
                    return False
                if phase in phases_of(worker, newest):
                    victims = [worker.pid, self._command.process.pid]
                    if target == "both":
                        self._chance.shuffle(victims)
                    else:
                        victims = victims[:1] if target == "worker" else victims[1:]
                    for pid in victims:
                        os.kill(pid, signal.SIGKILL)
                    self._count(phase, target)
                    if target != "worker":
                        psutil.wait_procs([worker], timeout=10)
                    return True
            except (psutil.NoSuchProcess, ProcessLookupError):
                return False
            time.sleep(self._chance.uniform(0.0, 0.004))
        return False

    def _kill_while_publishing(self) -> bool:
        """Kill the supervisor while it publishes the journal of a dead worker, if it has any and the kill is wanted."""
        journals, stale = self._journals(), self._publishing()
        if not journals or self._left["part publish"] <= 0:
            return False
        return self._kill_supervisor_in(
            "part publish",
            lambda: bool(self._publishing() - stale),
            lambda: any(path.exists() for path in journals),
        )

    def _kill_supervisor_in(self, phase: str, is_in: Callable[[], bool], may_be: Callable[[], bool]) -> bool:
        """Wait for the phase's file, stop the supervisor, and kill it if it is still in the phase."""
        process = self._command.process
        while may_be() and not self._command.ended:
            if not is_in():
                time.sleep(0.0003)
                continue
            time.sleep(self._chance.uniform(0.0, 0.02))
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, 1, 0.0002)
            if is_in():
                process.kill()
                self._count(phase, "supervisor")
                return True
            process.send_signal(signal.SIGCONT)
        return False

    def _publishing(self) -> set[str]:
        """Journals on their way to a part: parts not yet named, and those named with their journal still there."""
        parts = self._command.out / "parts"
        names = {f"part-{path.parent.name}-{path.stem.removeprefix('journal-')}.parquet" for path in self._journals()}
        named = {name for name in names if (parts / name).exists()}
        return named | {path.name for path in self._command.out.glob("_work/*/.part-*.tmp")}

    def _journals(self) -> list[Path]:
        return list(self._command.out.glob("_work/*/journal-*.arrows"))

    def _merges(self) -> bool:
        return (self._command.out / "_work" / f".merge-{self._command.process.pid}").exists()

    def _count(self, phase: str, target: str) -> None:
        self._left[phase] -= 1
        self._targets[target] += 1

    def _end(self) -> None:
        """The supervisor and its workers are gone when this returns."""
        workers = self._command.workers()
        _, self._text = self._command.process.communicate(timeout=LIFE_SECONDS)
        psutil.wait_procs(workers, timeout=10)

    def _check_after_death(self) -> None:
        """Nothing that was done is lost, nothing is damaged, and results that call themselves complete are."""
        done = done_in(self._command.out)
        if done is None:
            return
        assert done.damage == (), done.damage
        answers = set(done.answers.tolist())
        assert self._answers <= answers, f"{len(self._answers - answers)} answers lost"
        self._answers = answers


def survive(
    folder: Path, model: Path, environment: dict[str, str], *, seed: int, kills: int, num_rows: int
) -> tuple[Counter[str], Counter[str], int]:
    """Kill jobs until each phase has had so many kills: kills by phase, by target, and the number of jobs.

    A job ends when all of its rows are done; kills that are wanted then go on in the next. Each ends with one clean
    finish, whose results are compared with those of an undisturbed run.
    """
    manifest = write_manifest(folder / "manifest.jsonl", make_rows(num_rows))
    code, text = Command(manifest, model, folder / "undisturbed", environment).run(600)
    assert code == 0, text
    expected = outcome(folder / "undisturbed")
    assert len({row["id"] for row in expected}) == num_rows
    chance = random.Random(seed)
    left = Counter(dict.fromkeys(PHASES, kills))
    targets: Counter[str] = Counter()
    jobs = 0
    while max(left.values()) > 0:
        jobs += 1
        command = Command(manifest, model, folder / f"job{jobs}", environment)
        Killer(command, chance, left, targets).work()
        code, text = command.run(600)
        assert code == 0, text
        assert outcome(command.out) == expected
    return Counter({phase: kills - left[phase] for phase in PHASES}), targets, jobs


def main(arguments: Sequence[str]) -> None:
    folder, seed, kills = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    folder.mkdir(parents=True, exist_ok=True)
    model = make_tiny_model(folder / "model")
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels")])}
    begin = time.monotonic()
    phases, targets, jobs = survive(folder, model, environment, seed=seed, kills=kills, num_rows=600)
    sys.stdout.write(
        f"seed {seed}: {sum(phases.values())} kills in {time.monotonic() - begin:.0f} s, {jobs} jobs of 600 ids; "
        f"by phase {dict(phases)}, by target {dict(targets)}\n"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
