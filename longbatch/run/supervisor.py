"""The supervisor: starts one worker for each device, hands out waves, and replaces a worker that dies or gets stuck.

It imports no torch, so that whatever the engine does to its process the rest of the run goes on.
"""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pyarrow.parquet as pq

from longbatch.core import Result
from longbatch.device import DeviceInfo
from longbatch.errors import AbortError, DeviceError, DiskError, ExitCode, LongbatchError, RowError
from longbatch.output import ResultWriter, RunFolder, recover
from longbatch.run.channel import Channel, Message
from longbatch.run.dispatch import Assignment, Dispatcher, Verdict
from longbatch.run.failures import Failures
from longbatch.run.feed import read_entry
from longbatch.run.inflight import INTERRUPTED, Strike, StrikeBook, clear_begun
from longbatch.run.job import Job, WorkerSetup
from longbatch.run.planning import Remaining

ENGINE = "longbatch.run.worker:load_engine"
POLL_SECONDS = 0.2
# A worker that shows no sign of life for this long, or for this many times its wave's estimate, is stuck.
STUCK_SECONDS = 900.0
STUCK_FACTOR = 20.0
# Time for a stuck worker to write its stacks, and beyond --grace for one that is told to stop.
LAST_WORDS_SECONDS = 1.0
STOP_MARGIN_SECONDS = 10.0
# Workers that die one after the other without a single result.
MOST_FRUITLESS_DEATHS = 3
# A row that was under way this often when everything was killed runs alone the next time.
MOST_INTERRUPTIONS = 2
COUNTERS = ("prefill_tokens", "decode_tokens", "prefill_seconds", "decode_seconds")
_log = logging.getLogger("longbatch")


@dataclass(slots=True)
class WorkerProcess:
    """One worker as the supervisor sees it. beat: when it last gave a sign of life. Counters as it reported them."""

    name: str
    rank: int
    attempt: int
    device: DeviceInfo
    process: subprocess.Popen[bytes]
    channel: Channel
    log: IO[bytes]
    beat: float
    state: str = "starting"
    wave_seconds: float = 0.0
    alone: bool = False
    stuck: bool = False
    counters: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Tally:
    """What all workers have done together. ready_at: wall clock when the first worker could begin, 0.0 before;
    startup_seconds: how long that took."""

    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    ready_at: float = 0.0
    startup_seconds: float = 0.0


class Supervisor:
    """Runs the plan of a job to its end, or until it is told to stop.

    prefix: what the names of the workers begin with, so that several supervisors can share a run folder. engine:
    `module:function` that makes the engine in a worker.
    """

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        left: Remaining,
        book: StrikeBook,
        failures: Failures,
        *,
        prefix: str = "",
        engine: str = ENGINE,
    ) -> None:
        self._job = job
        self._folder = folder
        self._left = left
        self._book = book
        self.failures = failures
        self._prefix = prefix
        self._engine = engine
        self.started = time.time()
        self._begin = time.monotonic()
        self.tally = Tally()
        self.workers: list[WorkerProcess] = []
        self.stopping = False
        self._deadline = 0.0
        self._refusal: LongbatchError | None = None
        self._fruitless = 0
        assignments = [
            Assignment(wave.index, tuple(left.index.entry(s.row, s.sample) for s in wave.rows), False, wave.seconds)
            for wave in left.plan.waves
        ]
        self.dispatcher = Dispatcher(assignments, self._deaths, self._suspect)

    @property
    def device_seconds(self) -> float:
        """Device time held so far, over all devices, busy or not."""
        return (time.monotonic() - self._begin) * max(1, len(self.workers))

    # ------------------------------------------------------------------------------------- the loop

    def run(self, watch: Callable[[Supervisor], bool], fits: Callable[[float], bool]) -> None:
        """watch: called about five times a second; true means to stop and save. fits: whether work of so many seconds
        may still begin. Raises DiskError, AbortError, DeviceError, UsageError; what is finished is saved in every case.
        """
        self._put_aside(self.dispatcher.aside, "crashed_engine")
        devices = self._job.devices[: max(1, min(len(self._job.devices), len(self._left.plan.waves)))]
        try:
            if self.dispatcher.num_left:
                for rank, device in enumerate(devices):
                    self._start(rank, device)
            while self.workers:
                self._receive()
                self._check_processes()
                self._feed(fits)
                stop = watch(self) or self._refusal is not None or self.failures.too_many
                if stop and not self.stopping:
                    self._stop(self._job.settings.grace if self._refusal is None else 0.0)
        finally:
            for worker in self.workers:
                worker.process.kill()
                worker.process.wait()
        if self._refusal is not None:
            raise self._refusal
        if self.failures.too_many:
            raise AbortError(self.failures.reason, hint="fix the cause, or run with --abort-on-failures off")

    def _receive(self) -> None:
        """Take every message that has come, waiting a little where there is none."""
        ends = [worker.channel for worker in self.workers if not worker.channel.closed]
        ready = select.select(ends, [], [], POLL_SECONDS)[0]
        for worker in list(self.workers):
            if worker.channel in ready:
                for message in worker.channel.receive():
                    self._handle(worker, message)

    def _handle(self, worker: WorkerProcess, message: Message) -> None:
        worker.beat = time.monotonic()
        kind = message["kind"]
        if kind == "ready":
            worker.state = "ready"
            if not self.tally.ready_at:
                self.tally.ready_at, self.tally.startup_seconds = time.time(), worker.beat - self._begin
        elif kind == "begin":
            assignment = self.dispatcher.begin(worker.name)
            worker.state, worker.wave_seconds, worker.alone = "working", assignment.seconds, assignment.alone
        elif kind == "beat":
            self._count(worker, message)
        elif kind == "ended":
            worker.state = "ended"
        elif kind == "refused":
            self._refusal = _refusal(message)

    def _count(self, worker: WorkerProcess, message: Message) -> None:
        tally = self.tally
        for entry, error, prompt, generated in message["finished"]:
            self.dispatcher.finish(worker.name, entry)
            tally.rows += 1
            tally.prompt_tokens += prompt
            tally.generated_tokens += generated
            self._fruitless = 0
            if error is not None:
                tally.failed += 1
            self.failures.add(error)
        # Counters of one process only grow; a replaced worker begins again at 0.
        for name in COUNTERS:
            setattr(tally, name, getattr(tally, name) + message[name] - worker.counters.get(name, 0))
            worker.counters[name] = message[name]

    def _feed(self, fits: Callable[[float], bool]) -> None:
        """Give each worker what it can take; tell those that will get nothing more to end."""
        for worker in self.workers:
            if worker.state not in ("ready", "working") or self.stopping:
                continue
            while (assignment := self.dispatcher.next_for(worker.name, fits)) is not None:
                worker.channel.send("wave", wave=assignment.wave, alone=assignment.alone, rows=self._rows(assignment))
            # While any worker is at work its death may bring more to do, so all wait for the last one.
            if not self.dispatcher.num_left or not self._anything_fits(fits):
                worker.channel.send("end")
                worker.state = "ending"

    def _anything_fits(self, fits: Callable[[float], bool]) -> bool:
        """Whether more can be handed out before the deadline, or may come back from a worker that dies."""
        return self.dispatcher.anything(fits) or any(self.dispatcher.under_way(w.name) for w in self.workers)

    def _rows(self, assignment: Assignment) -> list[list[Any]]:
        index = self._left.index
        return [
            [
                int(index.keys.rows[entry]),
                int(index.keys.samples[entry]),
                entry,
                list(index.location(entry)),
                index.fingerprint(entry).hex(),
                index.key(entry).hex(),
                self._attempt(entry),
            ]
            for entry in assignment.entries
        ]

    def _attempt(self, entry: int) -> int:
        return int(self._left.attempts[entry]) + 1

    # ------------------------------------------------------------------------------------- processes

    def _start(self, rank: int, device: DeviceInfo) -> None:
        name = f"{self._prefix}w{rank}"
        attempt = newest_attempt(self._folder, name) + 1
        setup = WorkerSetup(
            settings=self._job.settings,
            sources=self._job.sources,
            out=self._folder.path,
            model_dir=self._job.model_dir,
            device=device,
            dtype=self._job.dtype,
            budget=self._left.plan.budget,
            worker=name,
            attempt=attempt,
            rank=rank,
            engine=self._engine,
            started=self.started,
        )
        ours, theirs = socket.socketpair()
        log = (self._folder.logs / f"worker-{name}-{attempt}.log").open("ab")
        package = Path(__file__).resolve().parents[2]
        paths = [str(package), str(package / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [sys.executable, "-m", "longbatch.run.worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        theirs.close()
        channel = Channel(ours)
        channel.send("setup", setup=setup.as_json())
        self.workers.append(WorkerProcess(name, rank, attempt, device, process, channel, log, time.monotonic()))
        _log.info("worker %s attempt %d started, pid %d", name, attempt, process.pid)

    def _check_processes(self) -> None:
        """Bury the dead, replace them where there is work, and end those that are stuck."""
        for worker in list(self.workers):
            if worker.process.poll() is None:
                if self.stopping and time.monotonic() > self._deadline:
                    worker.process.kill()
                else:
                    self._check_stuck(worker)
                continue
            for message in worker.channel.receive():
                self._handle(worker, message)
            self.workers.remove(worker)
            worker.channel.close()
            worker.log.close()
            if worker.state != "ended":
                self._bury(worker)
                if self.dispatcher.num_left and not self.stopping and self._refusal is None:
                    self._start(worker.rank, worker.device)

    def _check_stuck(self, worker: WorkerProcess) -> None:
        silence = time.monotonic() - worker.beat
        limit = max(STUCK_SECONDS, STUCK_FACTOR * worker.wave_seconds)
        timeout = self._job.settings.row_timeout
        if timeout is not None and worker.state == "working":
            limit = min(limit, timeout)
        if silence > limit and not worker.stuck:
            worker.stuck = True
            _log.error("worker %s gave no sign of life for %.0f s: ending it", worker.name, silence)
            worker.process.send_signal(signal.SIGUSR2)
        if worker.stuck and silence > limit + LAST_WORDS_SECONDS:
            worker.process.kill()

    def _bury(self, worker: WorkerProcess) -> None:
        """A worker died: keep what it had finished, and judge the rows that were under way."""
        code = worker.process.returncode
        _log.error("worker %s died with %s", worker.name, signal.Signals(-code).name if code < 0 else f"code {code}")
        recover(self._folder, worker.name)
        finished = self._results_of(worker)
        verdict = self.dispatcher.lose(worker.name, lambda entry: self._left.index.key(entry) in finished)
        clear_begun(self._folder.worker(worker.name))
        if self.stopping or self._refusal is not None:
            return
        reason = "row_timeout" if worker.stuck else "crashed_engine"
        self._book.add(Strike(self._left.index.key(e).hex(), self._attempt(e), reason) for e in verdict.struck)
        self._put_aside(list(verdict.aside), reason)
        self._judge(worker, verdict)

    def _judge(self, worker: WorkerProcess, verdict: Verdict) -> None:
        """Workers that keep dying without one result and without a row to blame will not do better."""
        self._fruitless = 0 if verdict.aside else self._fruitless + 1
        if self._fruitless >= MOST_FRUITLESS_DEATHS:
            path = self._folder.logs / f"worker-{worker.name}-{worker.attempt}.log"
            last = path.read_text(errors="replace").strip().rpartition("\n")[2]
            self._refusal = DeviceError(
                f"the worker on {worker.device.name} died {self._fruitless} times in a row without a result",
                hint=f"see {path}" + (f"; it ends with: {last}" if last else ""),
            )

    def _results_of(self, worker: WorkerProcess) -> set[bytes]:
        """Keys of all results that this worker published in this attempt."""
        keys: set[bytes] = set()
        for path in self._folder.parts.glob(f"part-{worker.name}-{worker.attempt}-*.parquet"):
            keys.update(pq.read_table(path, columns=["_key"])["_key"].to_pylist())
        return keys

    def _stop(self, grace: float) -> None:
        self.stopping = True
        for worker in self.workers:
            worker.channel.send("stop", grace=grace)
        # A long step cannot be interrupted; the worker is then killed, and its journal is what it leaves.
        self._deadline = time.monotonic() + grace + STOP_MARGIN_SECONDS

    # ------------------------------------------------------------------------------------- suspects

    def _deaths(self, entry: int) -> int:
        """Deaths of workers that count against an entry from earlier runs."""
        return sum(strike.reason != INTERRUPTED for strike in self._against(entry))

    def _suspect(self, entry: int) -> bool:
        """Whether the whole run was killed twice while the entry was under way: it may have been the reason."""
        return sum(strike.reason == INTERRUPTED for strike in self._against(entry)) >= MOST_INTERRUPTIONS

    def _against(self, entry: int) -> list[Strike]:
        return self._book.against(self._left.index.key(entry).hex(), self._attempt(entry)) if self._book else []

    def _put_aside(self, entries: list[int], reason: str) -> None:
        """Write error rows for entries that had their last chance."""
        if not entries:
            return
        name = f"{self._prefix}supervisor"
        with ResultWriter(self._folder, name, newest_attempt(self._folder, name) + 1) as writer:
            for entry in entries:
                index = self._left.index
                row, sample = int(index.keys.rows[entry]), int(index.keys.samples[entry])
                source = read_entry(self._job, index.location(entry), row, sample)
                message = {
                    "row_timeout": "the worker was stuck on this row, twice; raise --row-timeout if it is only slow",
                    "crashed_engine": "the worker died while it ran this row, twice, the second time alone",
                }[reason]
                result = Result.failed(source, RowError(reason, message))
                result.attempt = self._attempt(entry)
                writer.append(result)
                self.tally.rows, self.tally.failed = self.tally.rows + 1, self.tally.failed + 1
                self.failures.add(reason)


def newest_attempt(folder: RunFolder, worker: str) -> int:
    """How often a worker of this name has been started in a run folder."""
    names = [path.name for path in folder.parts.glob(f"part-{worker}-*")]
    names += [f"part-{worker}-{path.name.removeprefix('journal-')}" for path in folder.worker(worker).glob("journal-*")]
    logs = [path.name for path in folder.logs.glob(f"worker-{worker}-*.log")]
    pattern = re.compile(rf"(?:part|worker)-{re.escape(worker)}-(\d+)[-.]")
    return max((int(match[1]) for name in names + logs if (match := pattern.match(name))), default=0)


def _refusal(message: Message) -> LongbatchError:
    """The error that a worker ended with, as this process would have raised it."""
    code = ExitCode(message["exit_code"])
    kinds = {kind.exit_code: kind for kind in (DiskError, DeviceError)}
    error = kinds.get(code, LongbatchError)(message["message"], hint=message["hint"])
    error.exit_code = code
    return error
