"""The supervisor: starts one worker for each device, hands out waves, and replaces a worker that dies or gets stuck.

It imports no torch, so that whatever the engine does to its process the rest of the run goes on.
"""

from __future__ import annotations

import logging
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longbatch.core import Result
from longbatch.device import DeviceInfo
from longbatch.errors import AbortError, DeviceError, DiskError, ExitCode, LongbatchError, RowError
from longbatch.output import ResultWriter, RunFolder, recover
from longbatch.output.parquet import READ_ERRORS, open_checked
from longbatch.run.channel import Message
from longbatch.run.dispatch import Assignment, Dispatcher, Verdict
from longbatch.run.failures import Failures
from longbatch.run.feed import read_entry
from longbatch.run.inflight import INTERRUPTED, Strike, StrikeBook, clear_begun
from longbatch.run.job import SPOOL, Job, WorkerSetup
from longbatch.run.planning import Remaining
from longbatch.run.process import WorkerProcess, newest_attempt

ENGINE = "longbatch.run.worker:load_engine"
POLL_SECONDS = 0.2
# A worker that shows no sign of life for this long, or for this many times its wave's estimate, is stuck.
STUCK_SECONDS = 900.0
# Loading says nothing of itself until it is done, and large weights may come from a slow disk.
LOAD_SECONDS = 7200.0
STUCK_FACTOR = 20.0
# Time for a stuck worker to write its stacks, and beyond --grace for one that is told to stop.
LAST_WORDS_SECONDS = 1.0
STOP_MARGIN_SECONDS = 10.0
# Workers that die one after the other without a single result: where no row is to blame, and where rows were blamed,
# because a worker that no row gets through dies of something else.
MOST_FRUITLESS_DEATHS = 3
MOST_BLAMED_DEATHS = 10
# A row that was under way this often when everything was killed runs alone the next time.
MOST_INTERRUPTIONS = 2
COUNTERS = ("prefill_tokens", "decode_tokens", "prefill_seconds", "decode_seconds")
_log = logging.getLogger("longbatch")


@dataclass(slots=True)
class Tally:
    """What all workers have done together. ready_at: wall clock when the first worker could begin, 0.0 before;
    startup_seconds: how long that took. seconds: from the start until the last worker had saved everything."""

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
    seconds: float = 0.0


class Supervisor:
    """Runs the plan of a job to its end, or until it is told to stop.

    prefix: what the names of the workers begin with, so that several supervisors can share a run folder. engine:
    `module:function` that makes the engine in a worker. spool: where local copies of the sources are, in the run folder
    if unset.
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
        spool: Path | None = None,
    ) -> None:
        self._job = job
        self._folder = folder
        self._left = left
        self._book = book
        self.failures = failures
        self._prefix = prefix
        self._engine = engine
        self._spool = spool or folder.work / SPOOL
        self.started = time.time()
        self._begin = time.monotonic()
        self.tally = Tally()
        self.workers: list[WorkerProcess] = []
        self.stopping = False
        self._deadline = 0.0
        self._refusal: LongbatchError | None = None
        self._fruitless = self._barren = 0
        assignments = (
            Assignment(wave.index, tuple(left.index.find(wave.rows).tolist()), False, wave.seconds)
            for wave in left.plan.waves
        )
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
        self._put_aside(self.dispatcher.aside)
        devices = self._job.devices[: max(1, min(len(self._job.devices), len(self._left.plan.waves)))]
        try:
            if self.dispatcher.num_left:
                for rank, device in enumerate(devices):
                    self._start(rank, device)
            while self.workers:
                self._receive()
                self._check_processes(fits)
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
        full = [channel for channel in ends if channel.has_unsent]
        readable, writable, _ = select.select(ends, full, [], POLL_SECONDS)
        for channel in writable:
            channel.push()
        for worker in self.workers:
            if worker.channel in readable:
                for message in worker.channel.receive():
                    self._handle(worker, message)

    def _handle(self, worker: WorkerProcess, message: Message) -> None:
        worker.beat, worker.stuck = time.monotonic(), False
        kind = message["kind"]
        if kind == "ready":
            worker.state = "ready"
            if not self.tally.ready_at:
                self.tally.ready_at, self.tally.startup_seconds = time.time(), worker.beat - self._begin
        elif kind == "begin":
            assignment = self.dispatcher.begin(worker.name)
            worker.state, worker.wave_seconds = "working", assignment.seconds
        elif kind == "beat":
            for entry, error, prompt, generated in message["finished"]:
                self._finish(worker, entry, error, prompt, generated)
            self._count(worker, message)
        elif kind == "ended":
            worker.state = "ended"
            self.tally.seconds = worker.beat - self._begin
        elif kind == "refused":
            self._refusal = _refusal(message)

    def _finish(self, worker: WorkerProcess, entry: int, error: str | None, prompt: int, generated: int) -> None:
        """The entry's result is in the worker's journal. error: its type if it is an error row."""
        self.dispatcher.finish(worker.name, entry)
        self.tally.rows += 1
        self.tally.prompt_tokens += prompt
        self.tally.generated_tokens += generated
        self._fruitless = self._barren = 0
        if error is not None:
            self.tally.failed += 1
        self.failures.add(error)

    def _count(self, worker: WorkerProcess, message: Message) -> None:
        """Counters of one process only grow; a replaced worker begins again at 0."""
        tally = self.tally
        for name in COUNTERS:
            setattr(tally, name, getattr(tally, name) + message[name] - worker.counters.get(name, 0))
            worker.counters[name] = message[name]

    def _feed(self, fits: Callable[[float], bool]) -> None:
        """Give each worker what it can take; tell those that will get nothing more to end."""
        for worker in self.workers:
            if worker.state not in ("starting", "ready", "working") or self.stopping:
                continue
            # Prompts made while the model loads save time; after a death without a result a worker loads first, which
            # tells what cannot start from a row whose prompt kills.
            if worker.state == "starting" and self._fruitless:
                continue
            while (assignment := self.dispatcher.next_for(worker.name, fits)) is not None:
                worker.channel.send("wave", wave=assignment.wave, alone=assignment.alone, rows=self._rows(assignment))
            # While any worker is at work its death may bring more to do, so all wait for the last one.
            if not self.dispatcher.num_held and not self.dispatcher.anything(fits):
                worker.channel.send("end")
                worker.state = "ending"

    def _rows(self, assignment: Assignment) -> list[list[Any]]:
        """Entry, row, sample, place in the manifest, key and content hash in hex, attempt."""
        index, entries = self._left.index, np.array(assignment.entries)
        places = index.entries[entries]
        answers = index.keys.answers[entries].tobytes().hex()
        columns = (
            index.keys.rows[entries],
            index.keys.samples[entries],
            places["source"],
            places["offset"],
            places["length"],
            self._left.attempts[entries] + 1,
        )
        rows = zip(assignment.entries, *(column.tolist() for column in columns), strict=True)
        return [[*row, answers[64 * i : 64 * i + 64]] for i, row in enumerate(rows)]

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
            attention=self._job.attention,
            budget=self._left.plan.budget,
            worker=name,
            attempt=attempt,
            rank=rank,
            engine=self._engine,
            started=self.started,
            spool=self._spool,
        )
        worker = WorkerProcess.start(setup, self._folder.logs)
        self.workers.append(worker)
        _log.info("worker %s attempt %d started, pid %d", name, attempt, worker.process.pid)

    def _check_processes(self, fits: Callable[[float], bool]) -> None:
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
            if worker.state == "ended":
                self.dispatcher.give_back(worker.name)
            else:
                self._bury(worker)
            if not self.stopping and self._refusal is None and self.dispatcher.anything(fits):
                self._start(worker.rank, worker.device)

    def _check_stuck(self, worker: WorkerProcess) -> None:
        silence = time.monotonic() - worker.beat
        limit = LOAD_SECONDS if worker.state == "starting" else max(STUCK_SECONDS, STUCK_FACTOR * worker.wave_seconds)
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
        self.tally.seconds = time.monotonic() - self._begin
        _log.error("worker %s died with %s", worker.name, signal.Signals(-code).name if code < 0 else f"code {code}")
        recover(self._folder, worker.name)
        for entry, error, prompt, generated in self._unreported(worker):
            self._finish(worker, entry, error, prompt, generated)
        if self.stopping or self._refusal is not None:
            self.dispatcher.give_back(worker.name)
        else:
            verdict = self.dispatcher.lose(worker.name, blames_waiting=self._fruitless > 0)
            reason = "row_timeout" if worker.stuck else "crashed_engine"
            self._book.add(Strike(self._left.index.key(e).hex(), self._attempt(e), reason) for e in verdict.struck)
            self._put_aside(verdict.aside)
            self._judge(worker, verdict)
        # Last, so that these rows are not forgotten when this process is killed on the way here.
        clear_begun(self._folder.worker(worker.name))

    def _judge(self, worker: WorkerProcess, verdict: Verdict) -> None:
        """Workers that keep dying without one result will not do better."""
        self._fruitless = 0 if verdict.aside else self._fruitless + 1
        self._barren += 1
        if self._fruitless >= MOST_FRUITLESS_DEATHS or self._barren >= MOST_BLAMED_DEATHS:
            path = self._folder.logs / f"worker-{worker.name}-{worker.attempt}.log"
            last = path.read_text(errors="replace").strip().rpartition("\n")[2]
            self._refusal = DeviceError(
                f"the worker on {worker.device.name} died {self._barren} times in a row without a result",
                hint=f"see {path}" + (f"; it ends with: {last}" if last else ""),
            )

    def _unreported(self, worker: WorkerProcess) -> Iterator[tuple[int, str | None, int, int]]:
        """What a dead worker had finished and not reported: entry, error type, tokens read and generated."""
        begun = {self._left.index.key(entry): entry for entry in self.dispatcher.begun(worker.name)}
        wanted = pa.array(list(begun), pa.binary(16))
        columns = ["_key", "error.type", "usage.prompt_tokens", "usage.completion_tokens"]
        for path in self._folder.parts.glob(f"part-{worker.name}-{worker.attempt}-*.parquet"):
            try:
                with open_checked(path) as file:
                    table = file.read(columns=columns)
            except READ_ERRORS:
                continue  # a damaged part: its rows run again
            for row in table.filter(pc.is_in(table["_key"], wanted)).to_pylist():
                error, usage = row["error"], row["usage"]
                yield begun[row["_key"]], error and error["type"], usage["prompt_tokens"], usage["completion_tokens"]

    def _stop(self, grace: float) -> None:
        self.stopping = True
        for worker in self.workers:
            worker.channel.send("stop", grace=grace)
            if worker.state == "starting":
                worker.process.kill()  # it has nothing to save
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

    def _put_aside(self, entries: Sequence[int]) -> None:
        """Write error rows for entries that had their last chance."""
        if not entries:
            return
        name, index = f"{self._prefix}supervisor", self._left.index
        with ResultWriter(self._folder, name, newest_attempt(self._folder, name) + 1, reserve_bytes=0) as writer:
            for entry in entries:
                reason = [strike.reason for strike in self._against(entry) if strike.reason != INTERRUPTED][-1]
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


def _refusal(message: Message) -> LongbatchError:
    """The error that a worker ended with, as this process would have raised it."""
    code = ExitCode(message["exit_code"])
    kinds = {kind.exit_code: kind for kind in (DiskError, DeviceError)}
    error = kinds.get(code, LongbatchError)(message["message"], hint=message["hint"])
    error.exit_code = code
    return error
