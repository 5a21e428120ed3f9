"""A real Slurm of one node, from Debian's packages, that the tests of a module share."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = Path(__file__).with_name("slurm_local.sh")
CPUS = 8
Found = TypeVar("Found")


@dataclass
class Cluster:
    """A running Slurm. folder: where jobs are submitted; environment: what finds Slurm, longbatch and nothing of the
    user's."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def call(self, *command: str, check: bool = True) -> str:
        """What a command printed, without the last newline."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert not check or done.returncode == 0, f"{shlex.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.rstrip("\n")

    def submit(self, script: str, *options: str) -> str:
        """Submit a bash script whose log is JOB.log (JOB_TASK.log in arrays); its id."""
        log = "%A_%a.log" if any(option.startswith("--array") for option in options) else "%j.log"
        path = self.folder / "job.sh"
        path.write_text("#!/bin/bash\n" + script)
        return self.call("sbatch", "--parsable", "--open-mode=append", f"--output={log}", *options, str(path))

    def python(self, program: str) -> str:
        """A script that becomes a Python process with longbatch in its path."""
        return f"exec {shlex.quote(sys.executable)} -u -c {shlex.quote(program)}\n"

    def jobs(self, job: str) -> list[dict[str, str]]:
        """Every record of a job or array, finished ones too, as `scontrol show job` has it."""
        lines = self.call("scontrol", "--oneliner", "show", "job", job).splitlines()
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]

    def states(self, job: str) -> list[str]:
        return sorted(record["JobState"] for record in self.jobs(job))

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def start_now(self, job: str) -> None:
        """Lift the two minutes that Slurm lets requeued jobs wait, until none of them waits any more."""
        # A start in the second in which the job was ended fails: "Job already killed, do not launch batch job".
        time.sleep(2)

        def lifted() -> bool:
            waiting = [record for record in self.jobs(job) if record["JobState"] == "PENDING"]
            for record in waiting:
                self.call("scontrol", "update", f"JobId={record['JobId']}", "StartTime=now", check=False)
            return not waiting

        wait_until(lifted, f"job {job} to start")

    def wait_for(self, job: str, *states: str, seconds: float = 60) -> None:
        """Until every record of a job is in one of some states."""
        what = f"job {job} to be {' or '.join(states)}"
        try:
            wait_until(lambda: set(self.states(job)) <= set(states), what, seconds)
        except pytest.fail.Exception as failure:
            logs = {path.name: path.read_text()[-2000:] for path in self.folder.glob(f"{job}*.log")}
            pytest.fail(f"{failure}: {self.states(job)}, {logs}, {self.call('sinfo', '--list-reasons')}")


def wait_until(ask: Callable[[], Found], what: str, seconds: float = 60) -> Found:
    """The first true answer. Fails when there is none in time."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        found = ask()
        if found:
            return found
        time.sleep(0.1)
    pytest.fail(f"waited {seconds} s in vain for {what}")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    """A Slurm with 8 CPUs and 2 GPUs in name, and its own empty folder, ended with the module's tests."""
    _require()
    folder = Path(tempfile.mkdtemp(prefix="longbatch-slurm-"))
    options = {"SLURM_LOCAL_CPUS": str(CPUS), "SLURM_LOCAL_KILLWAIT": "5"}
    if os.geteuid() == 0:
        options["SLURM_LOCAL_GPUS"] = "2"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    environment |= options | {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(["bash", SCRIPT, "start", folder], env=environment, capture_output=True, text=True)
    try:
        assert done.returncode == 0, done.stderr
        (folder / "jobs").mkdir()
        yield Cluster(folder / "jobs", environment)
    finally:
        subprocess.run(["bash", SCRIPT, "stop", folder], env=environment, check=True)
        shutil.rmtree(folder)


def _require() -> None:
    """Install Slurm where that is possible. On CI it must be."""
    if subprocess.run(["bash", SCRIPT, "check"], capture_output=True).returncode == 0:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip("needs Slurm: as root, tests/slurm_local.sh install")
    done = subprocess.run(["bash", SCRIPT, "install"], capture_output=True, text=True, timeout=240)
    if done.returncode == 0:
        return
    reachable = subprocess.run(["apt-get", "update", "-qq"], capture_output=True).returncode == 0
    if os.environ.get("CI") == "true" and reachable:
        pytest.fail(f"Slurm cannot be installed: {done.stderr[-1000:]}")
    pytest.skip("needs Slurm, and its packages cannot be installed here")
