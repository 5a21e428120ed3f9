"""A worker's process as the supervisor holds it: how it is started, and when it last gave a sign of life."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from longbatch.device import DeviceInfo
from longbatch.output import RunFolder
from longbatch.output.files import disk_errors
from longbatch.run.channel import Channel
from longbatch.run.job import WorkerSetup


@dataclass(slots=True)
class WorkerProcess:
    """beat: when it last gave a sign of life, on the monotonic clock. wave_seconds: estimate of the wave it works on.
    counters: as it reported them."""

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
    stuck: bool = False
    counters: dict[str, float] = field(default_factory=dict)

    @classmethod
    def start(cls, setup: WorkerSetup, logs: Path) -> WorkerProcess:
        """A new process, in a session of its own so that Ctrl-C does not reach it. Raises DiskError."""
        with disk_errors("write a log in", logs):
            log = (logs / f"worker-{setup.worker}-{setup.attempt}.log").open("ab")
        ours, theirs = socket.socketpair()
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
        return cls(setup.worker, setup.rank, setup.attempt, setup.device, process, channel, log, time.monotonic())


def newest_attempt(folder: RunFolder, worker: str) -> int:
    """How often a worker of this name has been started in a run folder."""
    names = [path.name for path in folder.parts.glob(f"part-{worker}-*")]
    names += [f"part-{worker}-{path.name.removeprefix('journal-')}" for path in folder.worker(worker).glob("journal-*")]
    logs = [path.name for path in folder.logs.glob(f"worker-{worker}-*.log")]
    pattern = re.compile(rf"(?:part|worker)-{re.escape(worker)}-(\d+)[-.]")
    return max((int(match[1]) for name in names + logs if (match := pattern.match(name))), default=0)
