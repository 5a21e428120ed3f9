"""The merge: from parts in the order of completion to results in the order of the manifest, one row an answer.

The rows to keep are chosen in memory by key alone; `buckets` then sorts their content outside memory.
Readers find `results/` complete or not at all, and `_SUCCESS.json`, written last, says that it is.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from longbatch.errors import InterruptedRun
from longbatch.output.buckets import Buckets, Chosen, DamagedPart
from longbatch.output.carried import unify_fields
from longbatch.output.done import Done, RowState, best_of, scan
from longbatch.output.fidelity import Gaps, read_gaps
from longbatch.output.files import as_json, disk_errors, fsync_folder, replace_file
from longbatch.output.folder import RunFolder
from longbatch.output.keys import KeyTable, key_part
from longbatch.output.parquet import FileFacts, ParquetSink, open_checked
from longbatch.output.parts import Damage, read_ledgers, set_aside
from longbatch.output.schema import SCHEMA_VERSION, carried_fields, result_schema

RESULT_FILE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class MergeSummary:
    """What `results/` holds. counts: rows by `ok` and error type. num_missing: answers left out (`partial`).

    files: name in `results/`, with its rows, bytes and crc32. inputs: hash of what was merged.
    """

    num_rows: int
    num_missing: int
    counts: dict[str, int]
    files: dict[str, FileFacts]
    inputs: str

    @property
    def num_failed(self) -> int:
        return self.num_rows - self.counts["ok"]


def merge(folder: RunFolder, expected: KeyTable | int, *, partial: bool = False) -> MergeSummary:
    """Write `results/` from the parts; journals must have become parts before (`recover`).

    expected: the answers that the manifest asks for, in its order; results of rows that are no longer in it
    are left out. Or only their number, where the manifest cannot be read: then rows stand in the order that
    was recorded. partial: write what there is, without `_SUCCESS.json`. If the same was merged before, nothing
    is written.

    A damaged part is set aside, so that its rows run again; a missing one is noted there once they have. Raises
    InterruptedRun if an answer is missing and not `partial`, DiskError.
    """
    damage: list[Damage] = []
    with disk_errors("merge into", folder.results):
        # Of a merge that was killed; also of one that was killed when all but its clearing up was done.
        for stale in folder.work.glob(".merge-*"):
            shutil.rmtree(stale)
    while True:
        done = scan(folder, journals=False)
        for found in done.damage:
            damage.append(found)
            if found.path.exists():
                set_aside(folder, found.path)
        picks, rows, num_missing, num_changed = _choose(done, expected)
        if num_missing and not partial:
            raise InterruptedRun(_incomplete(num_missing, num_changed, damage), hint=_mend(num_changed))
        if not num_missing:
            _write_off(folder, damage)
        gaps = read_gaps(folder)
        inputs = _inputs(done, picks, rows, gaps)
        known = read_success(folder)
        if known is not None and known.inputs == inputs and num_missing == 0 and _is_whole(folder, known):
            return known
        chosen = Chosen(done.paths, done.files[picks], done.positions[picks], rows)
        counts = _counts(done, picks)
        del done, picks
        try:
            return _write(folder, chosen, counts, num_missing, inputs, gaps)
        except DamagedPart as error:
            damage.append(error.damage)
            set_aside(folder, error.damage.path)


def _write_off(folder: RunFolder, damage: list[Damage]) -> None:
    """A part that is gone is no damage any more once every answer is there again."""
    gone = [found.path.name for found in damage if found.path.parent == folder.parts and not found.path.exists()]
    if gone:
        with disk_errors("note missing parts in", folder.damaged):
            folder.damaged.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in gone:
                (folder.damaged / name).touch()


def read_success(folder: RunFolder) -> MergeSummary | None:
    """What `_SUCCESS.json` says, or None if the results are not complete."""
    try:
        content = json.loads(folder.success.read_bytes())
        files = {name: FileFacts(**facts) for name, facts in content["files"].items()}
        return MergeSummary(content["num_rows"], 0, content["counts"], files, content["inputs"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def result_files(folder: RunFolder) -> list[Path]:
    """The merged files, in order."""
    return sorted(folder.results.glob("*.parquet"))


def _choose(done: Done, expected: KeyTable | int) -> tuple[NDArray[np.int64], NDArray[np.int64], int, int]:
    """Indices in `done` in the final order, the row number of each, and how many are missing and changed."""
    if isinstance(expected, KeyTable):
        places, states = done.find(expected.answers)
        found = places >= 0
        num_changed = int(np.count_nonzero(states == RowState.CHANGED))
        return places[found], expected.rows[found], int(np.count_nonzero(~found)), num_changed
    order = best_of(key_part(done.answers), done.states == RowState.OK, done.attempts)
    order = order[np.lexsort((done.samples[order], done.rows[order]))]
    return order, done.rows[order], max(0, expected - len(order)), 0


def _counts(done: Done, picks: NDArray[np.int64]) -> dict[str, int]:
    errors = done.errors[picks]
    counts = {"ok": int(np.count_nonzero(done.states[picks] == RowState.OK))}
    for code, name in enumerate(done.error_types):
        number = int(np.count_nonzero(errors == code))
        if number:
            counts[name] = number
    return counts


def _inputs(done: Done, picks: NDArray[np.int64], rows: NDArray[np.int64], gaps: Gaps) -> str:
    """A hash of the chosen rows, where they stand, their order, and what was measured of them since."""
    summary = blake2b(digest_size=16)
    for path in done.paths:
        summary.update(f"{path.name} {path.stat().st_size}\n".encode())
    columns: Iterable[NDArray[Any]] = (done.answers[picks], done.files[picks], done.positions[picks], rows)
    if len(gaps):
        columns = (*columns, gaps.answers, gaps.gaps)
    for column in columns:
        summary.update(np.ascontiguousarray(column).view(np.uint8).data)
    return summary.hexdigest()


def _is_whole(folder: RunFolder, known: MergeSummary) -> bool:
    """Whether the merged files are there with their sizes; `verify` reads them."""
    sizes = {path.name: path.stat().st_size for path in result_files(folder)}
    return sizes == {name: facts.size for name, facts in known.files.items()}


def _incomplete(num_missing: int, num_changed: int, damage: list[Damage]) -> str:
    lines = [f"{num_missing:,} rows have no result yet"]
    if num_changed:
        lines.append(f"{num_changed:,} of them have one for other content under the same id")
    lines.extend(f"damaged and set aside: {found}" for found in damage)
    return "\n".join(lines)


def _mend(num_changed: int) -> str:
    again = "run the same command again to compute them, or merge what there is with --partial"
    return f"{again}; changed rows run with --update" if num_changed else again


def _write(
    folder: RunFolder, chosen: Chosen, counts: dict[str, int], num_missing: int, inputs: str, gaps: Gaps
) -> MergeSummary:
    with disk_errors("merge into", folder.results):
        work = folder.work / f".merge-{os.getpid()}"
        new = work / "results"
        new.mkdir(mode=0o700, parents=True)
        try:
            files = _write_files(folder, chosen, work, new, gaps)
            summary = MergeSummary(len(chosen), num_missing, counts, files, inputs)
            _swap(folder, new, work / "old")
            if not num_missing:
                _write_success(folder, summary)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return summary


def _write_files(folder: RunFolder, chosen: Chosen, work: Path, new: Path, gaps: Gaps) -> dict[str, FileFacts]:
    carried = unify_fields(carried_fields(_schema(path)) for path in chosen.paths)
    schema = result_schema(pa.schema(carried))
    buckets = Buckets(work, chosen, carried, read_ledgers(folder), gaps)
    buckets.deal()
    files: dict[str, FileFacts] = {}
    sink = ParquetSink(new / "results-00000.parquet", schema)
    try:
        for table in buckets.tables():
            if sink.size >= RESULT_FILE_BYTES:
                files[sink.path.name] = sink.finish()
                sink = ParquetSink(new / f"results-{len(files):05d}.parquet", schema)
            for batch in table.replace_schema_metadata(schema.metadata).to_batches():
                sink.write(batch)
        files[sink.path.name] = sink.finish()
    except BaseException:
        sink.discard()
        raise
    fsync_folder(new)
    return files


def _schema(path: Path) -> pa.Schema:
    with open_checked(path) as file:
        return file.schema_arrow


def _swap(folder: RunFolder, new: Path, old: Path) -> None:
    """Put the new results in place of the old ones; `_SUCCESS.json` is absent while they change."""
    with suppress(FileNotFoundError):
        folder.success.unlink()
    fsync_folder(folder.path)
    with suppress(FileNotFoundError):
        os.rename(folder.results, old)
    os.rename(new, folder.results)
    fsync_folder(folder.path)


def _write_success(folder: RunFolder, summary: MergeSummary) -> None:
    content = {
        "schema_version": SCHEMA_VERSION,
        "run_id": folder.run_id,
        "config_hash": folder.config_hash,
        "merged": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "num_rows": summary.num_rows,
        "counts": summary.counts,
        "files": {name: asdict(facts) for name, facts in summary.files.items()},
        "inputs": summary.inputs,
    }
    replace_file(folder.success, as_json(content))
