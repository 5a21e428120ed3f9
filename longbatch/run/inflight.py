"""Which rows were under way when a worker died, across any number of deaths.

A worker names the rows it begins in a file before it begins them. Whoever finds that file after the worker's death
gives each of those rows that has no result a strike: one strike, and the row runs alone; two, and it is put aside as an
error row. Where the whole run was killed, which says little about any row, strikes of their own kind are given: two,
and the row runs alone. A strike belongs to one attempt: it is void once the row has a result of that attempt or a later
one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from longbatch.output.files import disk_errors

FILE = "inflight.json"
STRIKES = "strikes-{}.jsonl"
# The reason of a strike when the whole run was killed and nothing is known of why.
INTERRUPTED = "interrupted"


class Begun(NamedTuple):
    """A row that a worker has begun. key: its key digest in hex. attempt: the number its result would have."""

    row: int
    sample: int
    key: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Strike:
    """A death while the row was under way. reason: `crashed_engine`, `row_timeout` or INTERRUPTED."""

    key: str
    attempt: int
    reason: str


def write_begun(folder: Path, rows: Iterable[Begun]) -> None:
    """Name the rows under way in a worker's folder, replacing the file in one step. Raises DiskError."""
    temporary = folder / f".{FILE}.tmp"
    with disk_errors("note the rows under way in", folder):
        temporary.write_text(json.dumps([list(row) for row in rows]))
        os.replace(temporary, folder / FILE)


def read_begun(folder: Path) -> list[Begun]:
    """The rows named in a worker's folder; none where it ended well."""
    try:
        return [Begun(*row) for row in json.loads((folder / FILE).read_text())]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError):
        # A power cut can leave an empty file; the rows then simply run again.
        return []


def find_begun(work: Path, prefix: str = "") -> list[Path]:
    """The folders of workers, whose names begin with `prefix`, that did not end well or are at work."""
    return sorted(path.parent for path in work.glob(f"{prefix}*/{FILE}"))


def clear_begun(folder: Path) -> None:
    """Nothing is under way here any more."""
    (folder / FILE).unlink(missing_ok=True)


class StrikeBook:
    """All strikes in a run folder; this process adds to its own file."""

    def __init__(self, work: Path, supervisor: str) -> None:
        self._path = work / STRIKES.format(supervisor)
        self._strikes: dict[str, list[Strike]] = {}
        for path in sorted(work.glob(STRIKES.format("*"))):
            for strike in _read(path):
                self._strikes.setdefault(strike.key, []).append(strike)

    def add(self, strikes: Iterable[Strike]) -> None:
        """Record deaths, on the disk first. Raises DiskError."""
        strikes = list(strikes)
        if not strikes:
            return
        lines = "".join(json.dumps([s.key, s.attempt, s.reason]) + "\n" for s in strikes)
        with disk_errors("write", self._path), self._path.open("ab", buffering=0) as file:
            # The line break comes first, so that a line which a kill cut short cannot swallow this one.
            file.write(b"\n" + lines.encode())
            os.fsync(file.fileno())
        for strike in strikes:
            self._strikes.setdefault(strike.key, []).append(strike)

    def against(self, key: str, attempt: int) -> list[Strike]:
        """Strikes that count for a row whose next result would have this attempt number."""
        return [strike for strike in self._strikes.get(key, ()) if strike.attempt >= attempt]

    def __bool__(self) -> bool:
        return bool(self._strikes)


def _read(path: Path) -> Iterator[Strike]:
    for line in path.read_text().splitlines():
        try:
            yield Strike(*json.loads(line))
        except (ValueError, TypeError):
            continue  # the torn end of a killed supervisor's last write
