"""When a run must have stopped: its own --max-time, or the end of the Slurm job it is in."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from longbatch.errors import UsageError
from longbatch.run import slurm

# An administrator or `scontrol update` may change the limit of a running job.
REREAD_SECONDS = 300.0
_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)([dhms])")


def parse_duration(text: str) -> float:
    """Seconds of `45`, `90m`, `2h30m`, `1.5h` or `1d12h`: each unit once, largest first. Raises UsageError."""
    cleaned = text.strip().lower()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", cleaned):
        total = float(cleaned)
    else:
        parts = _PART.findall(cleaned)
        units = "".join(unit for _, unit in parts)
        whole = "".join(number + unit for number, unit in parts) == cleaned
        if not parts or not whole or not re.fullmatch("d?h?m?s?", units):
            raise UsageError(f"{text!r} is no length of time", hint="write it as 90m, 2h30m, 1d12h, or seconds")
        total = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if total <= 0:
        raise UsageError(f"a length of time must be more than nothing, and {text!r} is not")
    return total


@dataclass
class Deadline:
    """The earlier of two ends, each of which may be absent.

    grace: seconds before the end that are kept for saving. own_end: on the monotonic clock, from --max-time; job: the
    Slurm job whose limit also counts.
    """

    grace: float
    own_end: float | None = None
    job: str | None = None
    _job_end: float | None = field(default=None, init=False)
    _read_at: float | None = field(default=None, init=False)

    @classmethod
    def find(cls, max_time: str | None, grace: float, environ: Mapping[str, str]) -> Deadline:
        """The deadline of a run that begins now. Raises UsageError when max_time cannot be read."""
        own_end = None if max_time is None else time.monotonic() + parse_duration(max_time)
        return cls(grace, own_end, slurm.job_id(environ))

    def seconds_left(self) -> float | None:
        """Seconds until the end, negative after it; None without one. Asks Slurm at most every five minutes, for up to
        ten seconds."""
        ends = [end for end in (self.own_end, self._slurm_end()) if end is not None]
        return min(ends) - time.monotonic() if ends else None

    def allows(self, seconds: float) -> bool:
        """Whether work that takes so long is done before the time kept for saving begins."""
        left = self.seconds_left()
        return left is None or seconds <= left - self.grace

    @property
    def is_slurm(self) -> bool:
        """Whether the job's limit comes first."""
        job_end = self._slurm_end()
        return job_end is not None and (self.own_end is None or job_end < self.own_end)

    def describe(self) -> str:
        """Whose end it is, for a message."""
        if self.is_slurm:
            return f"the time limit of Slurm job {self.job}"
        return "--max-time" if self.own_end is not None else "no deadline"

    def _slurm_end(self) -> float | None:
        now = time.monotonic()
        if self.job is None or (self._read_at is not None and now - self._read_at < REREAD_SECONDS):
            return self._job_end
        self._read_at = now
        found = slurm.ask(self.job)
        if found is not None and found.is_live:  # otherwise what was known before still holds
            self._job_end = None if found.seconds_left is None else now + found.seconds_left
        return self._job_end
