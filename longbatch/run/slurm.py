"""What Slurm says about its jobs, and how a job puts itself back into the queue. Knows nothing of runs."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

# A controller that does not answer must not hold up a run.
ASK_SECONDS = 10.0
# In these states the job's processes exist; suspended ones do nothing until they are resumed.
LIVE_STATES = frozenset({"RUNNING", "COMPLETING", "CONFIGURING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"})
GONE = "GONE"
RESTART_COUNT = "SLURM_RESTART_COUNT"


@dataclass(frozen=True, slots=True)
class JobState:
    """state: Slurm's name, or GONE for a job that the queue no longer knows. seconds_left: until the time limit, None
    where there is none."""

    state: str
    seconds_left: float | None

    @property
    def is_live(self) -> bool:
        """Whether processes of the job can exist."""
        return self.state in LIVE_STATES


def job_id(environ: Mapping[str, str]) -> str | None:
    """The id of the job this process is in; of an array element, its own. None outside Slurm."""
    found = environ.get("SLURM_JOB_ID", "")
    return found if found.isdigit() else None


def restart_count(environ: Mapping[str, str]) -> int:
    """How often the job was requeued; Slurm sets the variable from the second start on."""
    found = environ.get(RESTART_COUNT, "")
    return int(found) if found.isdigit() else 0


def ask(job: str) -> JobState | None:
    """The state of a job; None where Slurm cannot be asked, so that nothing is known."""
    # The last element of an array has the array's id, and squeue then lists every element: %A tells them apart.
    done = _call("squeue", "--noheader", f"--jobs={job}", "--format=%A|%T|%L")
    if done is None:
        return None
    if done.returncode != 0:
        return JobState(GONE, None) if "invalid job id" in done.stderr.lower() else None
    for line in done.stdout.splitlines():
        number, _, rest = line.strip().partition("|")
        state, _, left = rest.partition("|")
        if number == job:
            return JobState(state, parse_time_left(left))
    return JobState(GONE, None)


def parse_time_left(text: str) -> float | None:
    """Seconds of Slurm's `[[D-]HH:]MM:SS`; None for UNLIMITED, NOT_SET and whatever else is no time."""
    match = re.fullmatch(r"(-?)(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return None
    sign, days, hours, minutes, seconds = match.groups()
    total = int(days or 0) * 86400 + int(hours or 0) * 3600 + int(minutes) * 60 + int(seconds)
    return float(-total if sign else total)


def requeue(environ: Mapping[str, str], *, num_finished: int, most: int) -> str | None:
    """Put the job of this process back into the queue, if that leads anywhere; call it last, Slurm ends the process.

    num_finished: rows that this start finished. most: requeues after which it stays out. Returns None when the job
    was requeued, otherwise why not, as one line for the log. A job that was cancelled or that ran into its limit is
    no longer RUNNING, and is left alone.
    """
    job = job_id(environ)
    if job is None:
        return "not in a Slurm job"
    if num_finished == 0:
        return f"Slurm job {job} is not requeued: no row was finished since it started"
    if restart_count(environ) >= most:
        return f"Slurm job {job} is not requeued: it was {restart_count(environ)} times already"
    found = ask(job)
    if found is None or found.state != "RUNNING":
        return f"Slurm job {job} is not requeued: its state is {'unknown' if found is None else found.state}"
    done = _call("scontrol", "requeue", job)
    if done is not None and done.returncode > 0:
        return f"Slurm job {job} is not requeued: {done.stderr.strip()}"
    # Slurm ends all processes of the job, and often scontrol before it can report its success.
    return f"Slurm job {job} is not requeued: scontrol does not answer" if done is None else None


def _call(*command: str) -> subprocess.CompletedProcess[str] | None:
    """The finished command, or None where the program is missing or the controller did not answer in time."""
    environ = {**os.environ, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
            env=environ,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
