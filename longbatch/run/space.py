"""Whether the disk has room for a run, asked before it starts."""

from __future__ import annotations

import os
from pathlib import Path

from longbatch.errors import DiskError
from longbatch.output import RunFolder
from longbatch.output.files import disk_errors
from longbatch.output.parts import list_parts
from longbatch.output.reserve import RESERVE_BYTES
from longbatch.output.rolling import PART_BYTES
from longbatch.report.units import bytes_text

# What an answer takes at most while results are merged, when parts, sorted pieces and results are all there: measured
# with 200,000 empty answers (72 bytes each) and 2,000 of 1,000 random words (4.6 bytes a token).
ROW_BYTES = 100
TOKEN_BYTES = 5
# A row in a journal where each is a write of its own.
JOURNAL_ROW_BYTES = 6000
# What merging adds to the bytes of a part: its rows once as sorted pieces, which are packed less, and once as results.
MERGE_FACTOR = 2.5


def estimate(rows: int, tokens: int, *, num_workers: int = 1, stored: int = 0) -> int:
    """Bytes that a run takes at most, beside what is there, until its results are merged.

    rows, tokens: answers to come and the most tokens that they have. stored: bytes of the parts that are there.
    Carried columns are not counted.
    """
    answers = rows * ROW_BYTES + tokens * TOKEN_BYTES
    per_worker = RESERVE_BYTES + min(PART_BYTES, rows * JOURNAL_ROW_BYTES + tokens * TOKEN_BYTES)
    return int(answers + stored * MERGE_FACTOR + num_workers * per_worker)


def stored_bytes(folder: RunFolder) -> int:
    """Bytes of the parts of a run folder. Raises DiskError."""
    with disk_errors("read", folder.parts):
        return sum(path.stat().st_size for path in list_parts(folder))


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write where `path` is, or is to be. Raises DiskError."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    with disk_errors("look at the space of", existing):
        facts = os.statvfs(existing)
    return facts.f_bavail * facts.f_frsize


def check(out: Path, needed: int) -> None:
    """Raise DiskError if there is less space than `needed` where `out` is, or is to be. Quotas are not seen here; a run
    that meets one saves what it has."""
    free = free_bytes(out)
    if free < needed:
        raise DiskError(
            f"the run may need {bytes_text(needed)} in {out}, and {bytes_text(free)} are free",
            hint="free some space, or ask for less with --max-tokens or --limit",
        )
