"""Who works on a run folder: one file per supervisor, `_work/owner-NAME.json`, published by link and taken over from
the dead.

A holder whose process can be looked at is dead when that process is gone, or when the machine was started again since.
One on another machine is dead when Slurm no longer knows its job, or when neither its owner file nor its status file
was touched for ten minutes; both times are the file system's, so that clocks need not agree.

Two starters may find the same dead holder. Whoever links the claim on that holder's token may replace its file, and
nobody else: a claim whose maker died is itself claimed the same way. The claim is checked against the file again after
it was made, so one that comes too late changes nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from types import TracebackType

from longbatch.errors import DiskError, RunningError
from longbatch.output.files import as_json, disk_errors, publish, temporary_path, write_synced
from longbatch.run import slurm

HEARTBEAT_SECONDS = 600.0
WHOLE_RUN = "run"
# Time for a process that is taking over to finish doing so.
_CLAIM_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Holder:
    """What an owner file says of its process. started: the process's start as the system gives it, which tells it from
    a later one with the same id. machine, boot, pid_space: "" where the system does not say."""

    name: str
    token: str
    host: str
    machine: str
    boot: str
    pid_space: str
    pid: int
    started: str
    since: str
    slurm_job: str | None = None
    slurm_restarts: int = 0

    @classmethod
    def this_process(cls, name: str, environ: Mapping[str, str]) -> Holder:
        """A new holder, for the process that asks."""
        pid = os.getpid()
        return cls(
            name=name,
            token=secrets.token_hex(8),
            host=socket.gethostname(),
            machine=_first_line("/etc/machine-id"),
            boot=_first_line("/proc/sys/kernel/random/boot_id"),
            pid_space=_pid_space(),
            pid=pid,
            started=_process_start(pid) or "",
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            slurm_job=slurm.job_id(environ),
            slurm_restarts=slurm.restart_count(environ),
        )

    def is_alive(self, work: Path, environ: Mapping[str, str] | None = None) -> bool:
        """Whether the process can still be at work. work: the folder with its owner and status files."""
        environ = os.environ if environ is None else environ
        return self._is_alive([owner_path(work, self.name), work / f"status-{self.name}.json"], environ)

    def _is_alive(self, touched: list[Path], environ: Mapping[str, str]) -> bool:
        me = Holder.this_process(self.name, environ)
        same_boot = self.boot == me.boot
        if same_boot and (self.host, self.machine, self.pid_space) == (me.host, me.machine, me.pid_space):
            return bool(self.started) and _process_start(self.pid) == self.started
        if not same_boot and (self.host, self.machine) == (me.host, me.machine):
            return False
        if self.slurm_job is not None:
            if self.slurm_job == me.slurm_job:
                return self.slurm_restarts >= me.slurm_restarts  # an earlier start of this very job has ended
            job = slurm.ask(self.slurm_job)
            if job is not None and not job.is_live:
                return False
            if job is not None and job.state == "SUSPENDED":
                return True
        return _silence(touched) < HEARTBEAT_SECONDS

    def describe(self) -> str:
        """Host, process and start, for a message."""
        job = f", Slurm job {self.slurm_job}" if self.slurm_job else ""
        return f"process {self.pid} on {self.host} since {self.since}{job}"


class Owner:
    """The right to work on a run folder under one name, kept until `release` or the end of the context."""

    def __init__(self, work: Path, holder: Holder) -> None:
        self._work = work
        self.holder = holder

    @classmethod
    def acquire(cls, work: Path, name: str, environ: Mapping[str, str] | None = None) -> Owner:
        """Become the owner. name: `run` for a whole run, `s0`, `s1`.. for shares; a whole run excludes shares.

        Raises RunningError while another process holds the name, or one that excludes it; DiskError.
        """
        environ = os.environ if environ is None else environ
        holder = Holder.this_process(name, environ)
        with disk_errors("write the owner file in", work):
            work.mkdir(mode=0o700, parents=True, exist_ok=True)
            _take(work, holder, environ)
        owner = cls(work, holder)
        try:
            for other in find_holders(work):
                excluded = other.name != name and WHOLE_RUN in (other.name, name)
                if excluded and other.is_alive(work, environ):
                    raise _running(work, other)
        except BaseException:
            owner.release()
            raise
        return owner

    def still_holds(self) -> bool:
        """False when another process took over, which it does only after this one was silent for ten minutes."""
        found = read_holder(self._work, self.holder.name)
        return found is not None and found.token == self.holder.token

    def release(self) -> None:
        """Give the name up; nothing happens if it is another's by now."""
        if self.still_holds():
            with suppress(FileNotFoundError):
                owner_path(self._work, self.holder.name).unlink()

    def __enter__(self) -> Owner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def owner_path(work: Path, name: str) -> Path:
    """The owner file of a name."""
    return work / f"owner-{name}.json"


def read_holder(work: Path, name: str) -> Holder | None:
    """The holder of a name, dead or alive; None where there is none."""
    return _read(owner_path(work, name), name)


def find_holders(work: Path) -> list[Holder]:
    """Every holder of a run folder, dead or alive, by name."""
    names = sorted(path.name[len("owner-") : -len(".json")] for path in work.glob("owner-*.json"))
    return [holder for holder in (read_holder(work, name) for name in names) if holder is not None]


def _take(work: Path, holder: Holder, environ: Mapping[str, str]) -> None:
    """Make `holder` the one that its owner file names."""
    path = owner_path(work, holder.name)
    give_up = time.monotonic() + _CLAIM_SECONDS
    while True:
        found = read_holder(work, holder.name)
        if found is None:
            if _publish(path, holder):
                return
            found = read_holder(work, holder.name)
        if found is None:  # it was released between two looks
            continue
        if found.token == holder.token:  # the link was made although the file server reported a failure
            return
        if found.is_alive(work, environ):
            raise _running(work, found)
        rival = _replace(work, found, holder, environ)
        if rival is None and read_holder(work, holder.name) == holder:
            return
        if time.monotonic() > give_up:
            raise _running(work, rival or found)
        time.sleep(0.02)


def _replace(work: Path, dead: Holder, holder: Holder, environ: Mapping[str, str]) -> Holder | None:
    """Put `holder` in the place of a dead one. Returns the live process that is doing so already, None otherwise."""
    claims: list[Path] = []
    token = dead.token
    while True:
        claim = work / f".owner-{holder.name}.{token}.claim"
        if _publish(claim, holder):
            claims.append(claim)
            break
        rival = _read(claim, holder.name)
        if rival is None or rival._is_alive([claim], environ):
            return rival
        claims.append(claim)
        token = rival.token
    try:
        found = read_holder(work, holder.name)
        if found is None or found.token != dead.token:
            return None
        path = owner_path(work, holder.name)
        temporary = temporary_path(path)
        write_synced(temporary, as_json(asdict(holder)))
        os.replace(temporary, path)
    finally:
        for claim in reversed(claims):
            claim.unlink(missing_ok=True)
    return None


def _publish(path: Path, holder: Holder) -> bool:
    """Write a file that is not there yet; False if it is."""
    temporary = temporary_path(path)
    try:
        write_synced(temporary, as_json(asdict(holder)))
        publish(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _read(path: Path, name: str) -> Holder | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DiskError(f"cannot read {path}: {error.strerror}") from error
    try:
        values = json.loads(content)
        known = {item.name for item in fields(Holder)}
        return Holder(**{key: value for key, value in values.items() if key in known})
    except (ValueError, TypeError, AttributeError):
        # Published whole, so this is damage. Nothing is known of the holder but that its file was touched.
        token = blake2b(content, digest_size=8).hexdigest()
        return Holder(name, token, "an unknown host", "", "", "", 0, "", "an unknown time")


def _running(work: Path, holder: Holder) -> RunningError:
    out = work.parent
    hint = f"wait for it, end it with `longbatch stop {out}`, or pass --skip-if-running"
    if holder.host != socket.gethostname() or holder.pid_space != _pid_space():
        hint += f"; if it is dead, that shows after {HEARTBEAT_SECONDS / 60:.0f} minutes of silence"
    return RunningError(f"{out} is being worked on by {holder.describe()}", hint=hint)


def _silence(touched: list[Path]) -> float:
    """Seconds since the last of some files was touched, by the file system's clock."""
    probe = temporary_path(touched[0])
    try:
        probe.touch()
        now = probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
    last = 0.0
    for path in touched:
        with suppress(FileNotFoundError):
            last = max(last, path.stat().st_mtime)
    return now - last


def _process_start(pid: int) -> str | None:
    """When a process started, in the system's own terms; None if there is no such process, or only its remains."""
    try:
        # The command's name may hold spaces and brackets; state is the first field after it, starttime the twentieth.
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else rest[18]
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return None
    except ProcessLookupError:
        return None
    except OSError:
        pass
    done = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)],
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
        check=False,
    )
    return done.stdout.strip() or None


def _pid_space() -> str:
    """Which set of process ids this is: two containers on one machine have the same boot and different processes."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
