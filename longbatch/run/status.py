"""How a run stands: each supervisor writes a small file, and readers put these together with what parts hold."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from longbatch.output import RunFolder, read_success, scan
from longbatch.output.files import disk_errors
from longbatch.report.rates import RateWindow, Sample
from longbatch.run.index import RowIndex
from longbatch.run.owner import find_holders
from longbatch.run.planning import index_path

WRITE_SECONDS = 2.0
STATES = ("starting", "planning", "running", "verifying", "stopping", "merging", "finished", "interrupted", "failed")
ENDED = frozenset({"finished", "interrupted", "failed"})
_log = logging.getLogger("longbatch")


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker process. heartbeat_age: seconds since its last message, at the time of writing."""

    name: str
    pid: int
    device: str
    state: str
    heartbeat_age: float
    rows_in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a supervisor says of itself. state: one of STATES. started: Unix time of its start.

    rows_*, tokens_*: over the rows that it is to bring to an end, those finished earlier included; tokens are
    those of prompts. generated: tokens sampled since its start. errors: failed rows by type. gpu_seconds: device
    time held since its start, over all devices. price_per_gpu_hour: as the user set it. exit_code: at its end.
    """

    state: str
    started: float
    rows_total: int = 0
    rows_done: int = 0
    rows_failed: int = 0
    tokens_total: int = 0
    tokens_done: int = 0
    generated: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    workers: tuple[WorkerState, ...] = ()
    gpu_seconds: float = 0.0
    price_per_gpu_hour: float | None = None
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Supervisor:
    """A supervisor as its file shows it. updated: Unix time of writing. rates per second, over the last minute.

    gpu_seconds_before: device time of earlier processes of the same name. owns: whether its owner file is there, which
    a process removes when it ends, unless it is killed. alive: whether that process is there, at
    work or just about to end.
    """

    name: str
    host: str
    pid: int
    updated: float
    snapshot: Snapshot
    rows_per_second: float
    tokens_per_second: float
    generated_per_second: float
    eta_seconds: float | None
    gpu_seconds_before: float
    owns: bool = False
    alive: bool = False

    @property
    def state(self) -> str:
        """As it wrote; but `dead` where it was killed, and `failed` where it ended without saying how."""
        if self.alive or self.snapshot.state in ENDED:
            return self.snapshot.state
        return "dead" if self.owns else "failed"

    @property
    def at_work(self) -> bool:
        """Whether it is there and has not said that it ended."""
        return self.alive and self.snapshot.state not in ENDED

    @property
    def gpu_hours(self) -> float:
        """Device time of all processes of this name."""
        return (self.gpu_seconds_before + self.snapshot.gpu_seconds) / 3600


def status_path(work: Path, name: str) -> Path:
    """Where the supervisor of this name (`run`, or `s0`, `s1`, ... for shards) keeps its status."""
    return work / f"status-{name}.json"


class StatusFile:
    """The file that a supervisor writes, and nobody else. One thread uses it.

    It is a heartbeat too, so `write` is to be called every few seconds, whatever else goes on.
    """

    def __init__(self, work: Path, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = status_path(work, name)
        self._name = name
        self._clock = clock
        self._written = -WRITE_SECONDS
        self._state = ""
        self._rates = RateWindow()
        before = _read(self._path)
        self._before = 0.0 if before is None else before.gpu_seconds_before + before.snapshot.gpu_seconds

    def write(self, snapshot: Snapshot) -> bool:
        """Replace the file, at most every 2 seconds unless the state changed; False where nothing was written.

        A disk that refuses is no reason to end a run: it is logged.
        """
        now = self._clock()
        done, failed = snapshot.rows_done, snapshot.rows_failed
        self._rates.add(Sample(now, done, failed, snapshot.tokens_done, snapshot.generated))
        if snapshot.state == self._state and now - self._written < WRITE_SECONDS:
            return False
        self._written, self._state = now, snapshot.state
        rates = self._rates.rates()
        left = None
        if snapshot.state not in ENDED:
            left = self._rates.seconds_left(snapshot.rows_total, snapshot.tokens_total)
        content = {
            "name": self._name,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "updated": time.time(),
            "rows_per_second": 0.0 if rates is None else rates.rows,
            "tokens_per_second": 0.0 if rates is None else rates.tokens,
            "generated_per_second": 0.0 if rates is None else rates.generated,
            "eta_seconds": left,
            "gpu_seconds_before": self._before,
            "snapshot": asdict(snapshot),
        }
        # One name for all temporary files: only this process writes them, and a killed one's is overwritten. No
        # fsync: after a power cut the file has no value.
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        try:
            temporary.write_bytes(json.dumps(content).encode())
            os.replace(temporary, self._path)
        except OSError as error:
            _log.warning("the status could not be written: %s", error.strerror)
            return False
        return True


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run folder at one moment.

    rows_total: answers that the manifest asks for, None while nobody has counted them. rows_done: those with a
    result, of which rows_failed are errors, by type in errors. complete: whether results/ holds all of them.
    time: Unix time of reading.
    """

    out: Path
    run_id: str
    rows_total: int | None
    rows_done: int
    rows_failed: int
    errors: dict[str, int]
    complete: bool
    supervisors: tuple[Supervisor, ...]
    time: float

    @property
    def state(self) -> str:
        """`running` and the like while a supervisor is at work; else `finished` (the results are complete), `dead`, or
        how the last one ended; `not merged` and `incomplete` after supervisors that finished their own share."""
        states = [found.state for found in self.supervisors if found.at_work]
        if states:
            return states[0] if len(set(states)) == 1 else "running"
        if self.complete:
            return "finished"
        if any(supervisor.state == "dead" for supervisor in self.supervisors):
            return "dead"
        if not self.supervisors:
            return "not started"
        last = max(self.supervisors, key=lambda supervisor: supervisor.updated)
        if last.state != "finished":
            return last.state
        return "not merged" if self.rows_done == self.rows_total else "incomplete"

    @property
    def eta_seconds(self) -> float | None:
        """Until the last supervisor at work is done, as far as known."""
        active = [supervisor.eta_seconds for supervisor in self.supervisors if supervisor.at_work]
        known = [seconds for seconds in active if seconds is not None]
        return max(known) if known and len(known) == len(active) else None

    @property
    def gpu_hours(self) -> float:
        """Device time held so far."""
        return sum(supervisor.gpu_hours for supervisor in self.supervisors)

    @property
    def price(self) -> float | None:
        """What the device time cost, None where no price was given."""
        priced = [item for item in self.supervisors if item.snapshot.price_per_gpu_hour is not None]
        if not priced:
            return None
        return sum(item.gpu_hours * (item.snapshot.price_per_gpu_hour or 0.0) for item in priced)

    def as_dict(self) -> dict[str, Any]:
        """The status as JSON values."""
        active = [supervisor for supervisor in self.supervisors if supervisor.at_work]
        return {
            "out": str(self.out),
            "run_id": self.run_id,
            "state": self.state,
            "complete": self.complete,
            "rows_total": self.rows_total,
            "rows_done": self.rows_done,
            "rows_ok": self.rows_done - self.rows_failed,
            "rows_failed": self.rows_failed,
            "errors": self.errors,
            "rows_per_second": sum(supervisor.rows_per_second for supervisor in active),
            "tokens_per_second": sum(supervisor.tokens_per_second for supervisor in active),
            "generated_per_second": sum(supervisor.generated_per_second for supervisor in active),
            "eta_seconds": self.eta_seconds,
            "gpu_hours": self.gpu_hours,
            "price": self.price,
            "supervisors": [self._supervisor_dict(supervisor) for supervisor in self.supervisors],
        }

    def silence(self, supervisor: Supervisor) -> float:
        """Seconds since a supervisor wrote its file; 0 where its clock is ahead of ours."""
        return max(0.0, self.time - supervisor.updated)

    def _supervisor_dict(self, supervisor: Supervisor) -> dict[str, Any]:
        silence = self.silence(supervisor)
        table = asdict(supervisor.snapshot) | {
            "name": supervisor.name,
            "host": supervisor.host,
            "pid": supervisor.pid,
            "state": supervisor.state,
            "heartbeat_age": silence,
            "eta_seconds": supervisor.eta_seconds,
            "gpu_hours": supervisor.gpu_hours,
        }
        for worker in table["workers"]:
            worker["heartbeat_age"] += silence
        return table


class StatusReader:
    """Reads the status of a run folder again and again. Reading what is finished takes long in a folder of a million
    rows, so that is repeated only when a tenth of the time, or less, goes into it."""

    def __init__(self, out: Path) -> None:
        """Raises UsageError if there is no run folder."""
        self._folder = RunFolder.open(out)
        self._counts: tuple[int | None, dict[str, int]] = (None, {"ok": 0})
        self._due = 0.0

    def read(self) -> RunStatus:
        """The status of now. Raises DiskError where the disk refuses to read."""
        supervisors = read_supervisors(self._folder.work)
        begin = time.monotonic()
        if begin >= self._due:
            self._counts = _count(self._folder)
            self._due = begin + 10 * (time.monotonic() - begin)
        total, counts = self._counts
        num_done = sum(counts.values())
        success = read_success(self._folder)
        return RunStatus(
            out=self._folder.path,
            run_id=self._folder.run_id,
            rows_total=total,
            rows_done=num_done,
            rows_failed=num_done - counts["ok"],
            errors={kind: number for kind, number in counts.items() if kind != "ok"},
            complete=success is not None and total in (None, success.num_rows),
            supervisors=supervisors,
            time=time.time(),
        )


def read_status(out: Path) -> RunStatus:
    """The status of a run folder. Raises UsageError, DiskError."""
    return StatusReader(out).read()


def read_supervisors(work: Path) -> tuple[Supervisor, ...]:
    """Every supervisor of a run folder, at work or not, by name. One that holds the folder and has written no status
    yet is `starting`; status files that cannot be read are left out. Raises DiskError."""
    found = {}
    for path in sorted(work.glob("status-*.json")):
        supervisor = _read(path)
        if supervisor is not None:
            found[supervisor.name] = supervisor
    for holder in find_holders(work):
        known = found.get(holder.name)
        since = _unix_time(holder.since)
        # A process can have the number of an earlier one, in containers most of all; its status is older then.
        if known is None or (known.host, known.pid) != (holder.host, holder.pid) or known.updated < since:
            before = 0.0 if known is None else known.gpu_seconds_before + known.snapshot.gpu_seconds
            snapshot = Snapshot("starting", started=since)
            known = Supervisor(holder.name, holder.host, holder.pid, since, snapshot, 0.0, 0.0, 0.0, None, before)
        with disk_errors("look at the owner files in", work):
            found[holder.name] = replace(known, owns=True, alive=holder.is_alive(work))
    return tuple(found[name] for name in sorted(found))


def _unix_time(since: str) -> float:
    """Of an owner file's time, which is in whole seconds; 0 where it is damaged."""
    try:
        return datetime.fromisoformat(since).timestamp()
    except ValueError:
        return 0.0


def _count(folder: RunFolder) -> tuple[int | None, dict[str, int]]:
    """How many answers the manifest asks for (None: not counted yet), and how many there are, by `ok` and error."""
    done = scan(folder)
    index = RowIndex.load(index_path(folder), None)
    if index is None:
        return None, done.counts()
    places, _ = done.find(index.keys.answers)
    places = places[places >= 0]
    codes, numbers = np.unique(done.errors[places], return_counts=True)
    found = dict(zip(codes.tolist(), numbers.tolist(), strict=True))
    counts = {"ok": found.pop(-1, 0)}
    return len(index), counts | {done.error_types[code]: number for code, number in found.items()}


def _read(path: Path) -> Supervisor | None:
    try:
        content = json.loads(path.read_bytes())
        table = content.pop("snapshot")
        table["workers"] = tuple(_of(WorkerState, worker) for worker in table["workers"])
        known = {item.name for item in fields(Supervisor)}
        values = {name: value for name, value in content.items() if name in known}
        return Supervisor(**values, snapshot=_of(Snapshot, table))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _of(kind: type[Any], table: dict[str, Any]) -> Any:
    """A dataclass from a table that a newer version may have written."""
    known = {item.name for item in fields(kind)}
    return kind(**{name: value for name, value in table.items() if name in known})
