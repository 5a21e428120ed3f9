"""The rows that were drawn to be measured against dense attention, kept beside the gaps, and what came of them.

A merge long after the run, or after a stop in the middle of it, then knows what is missing.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longbatch.errors import UsageError
from longbatch.output import RowState, RunFolder, read_gaps, scan
from longbatch.output.fidelity import FOLDER
from longbatch.output.files import as_json, disk_errors, replace_file
from longbatch.run.shard import Shard

NOTHING = "nothing to compare"


@dataclass(frozen=True, slots=True)
class Sample:
    """num_wanted: rows that ran sparse and were asked for. num_measured: of those, with a gap. reasons: why others
    could not be measured, and how many. num_left: not tried yet."""

    num_wanted: int
    num_measured: int
    reasons: Counter[str]
    num_left: int

    def describe(self) -> str:
        """One line for a person, empty where every row was measured."""
        if self.num_measured == self.num_wanted:
            return ""
        text = f"measured {self.num_measured:,} of {self.num_wanted:,}"
        if self.reasons:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.reasons.most_common())
            text += f", {self.reasons.total():,} could not be measured: {reasons}"
        return text + (f", {self.num_left:,} not measured yet" if self.num_left else "")


def save_sample(inner: RunFolder, shard: Shard | None, num_wanted: int, answers: NDArray[np.bytes_]) -> None:
    """Keep what a share drew, in the folder of gaps. answers: S32 [n]. num_wanted: rows that it was to draw; those of
    them that have nothing to compare are not drawn. Raises DiskError."""
    index, count = (0, 1) if shard is None else (shard.index, shard.count)
    path = inner.work / f"sample-{index}-of-{count}.json"
    content = {"index": index, "count": count, "wanted": num_wanted, "answers": [one.hex() for one in answers.tolist()]}
    with disk_errors("write", path):
        replace_file(path, as_json(content))


def read_sample(folder: RunFolder, wanted: int, num_sparse: int) -> Sample:
    """What came of the sample of a run. wanted: rows that its command asks for. num_sparse: rows that ran sparse; of a
    share that has drawn nothing yet as many are taken as missing as it may draw. Raises DiskError."""
    try:
        inner = RunFolder.open(folder.work / FOLDER)
    except UsageError:
        missing = min(wanted, num_sparse)
        return Sample(missing, 0, Counter(), missing)
    drawn = _drawn(inner)
    count = next(iter(drawn.values()))["count"] if drawn else 1
    undrawn = sum(wanted // count + (index < wanted % count) for index in range(count) if index not in drawn)
    undrawn = min(undrawn, num_sparse)
    answers = np.array([bytes.fromhex(one) for share in drawn.values() for one in share["answers"]], dtype="S32")
    num_wanted = sum(share["wanted"] for share in drawn.values())
    reasons: Counter[str] = Counter({NOTHING: num_wanted - len(answers)} if num_wanted > len(answers) else {})
    done, gaps = scan(inner), read_gaps(folder)
    places, states = done.find(answers)
    known, measured = gaps.has(answers), ~np.isnan(gaps.of(answers))
    failed = ((states == RowState.FAILED) | (states == RowState.RETRYABLE)) & ~known
    reasons.update(done.error_types[code] for code in done.errors[places[failed]].tolist())
    reasons.update([NOTHING] * int(np.count_nonzero(known & ~measured)))
    num_left = int(np.count_nonzero(~known & ~failed)) + undrawn
    return Sample(num_wanted + undrawn, int(np.count_nonzero(measured)), reasons, num_left)


def _drawn(inner: RunFolder) -> dict[int, dict[str, Any]]:
    """What each share drew last; only of the division into shares that was used last."""
    paths: list[Path] = sorted(inner.work.glob("sample-*.json"), key=lambda path: path.stat().st_mtime_ns)
    found = []
    for path in paths:
        try:
            found.append(json.loads(path.read_bytes()))
        except (OSError, ValueError):
            continue  # a damaged one counts as not drawn
    return {share["index"]: share for share in found if share["count"] == found[-1]["count"]}
