"""Reading everything again: is each file what was written, and is there one row for each answer?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from longbatch.output.done import RowState, scan
from longbatch.output.files import disk_errors, file_checksum
from longbatch.output.folder import RunFolder
from longbatch.output.keys import KeyTable
from longbatch.output.merge import read_success, result_files
from longbatch.output.parquet import READ_ERRORS, FileFacts, open_checked
from longbatch.output.parts import Damage, diagnose, list_journals, list_parts, read_ledgers, set_aside


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found. num_answers: distinct ones in parts and journals, of which num_ok are ok.

    num_missing: answers that the manifest asks for and nothing holds; None if no manifest was given.
    num_results: rows in `results/`. complete: whether `_SUCCESS.json` is there and agrees.
    """

    num_parts: int
    num_journals: int
    num_answers: int
    num_ok: int
    num_missing: int | None
    num_results: int
    complete: bool
    damage: tuple[Damage, ...]

    def lines(self) -> list[str]:
        """The report as a person reads it."""
        lines = [f"{self.num_answers:,} answers ({self.num_ok:,} ok) in {self.num_parts:,} parts"]
        if self.num_journals:
            lines[0] += f" and {self.num_journals:,} journals"
        if self.num_missing is not None:
            lines.append(f"{self.num_missing:,} answers missing")
        lines.append(f"{self.num_results:,} rows in results/" + ("" if self.complete else ", not complete"))
        lines.extend(f"damaged: {found}" for found in self.damage)
        return lines

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "num_parts": self.num_parts,
            "num_journals": self.num_journals,
            "num_answers": self.num_answers,
            "num_ok": self.num_ok,
            "num_missing": self.num_missing,
            "num_results": self.num_results,
            "complete": self.complete,
            "damage": [{"path": str(found.path), "reason": found.reason} for found in self.damage],
        }


def verify(folder: RunFolder, expected: KeyTable | None = None, *, mend: bool = False) -> VerifyReport:
    """Read every part, journal and result file and compare them with what was noted when they were written.

    mend: move damaged parts to `_work/damaged`, so that the next run computes their rows again, and withdraw
    `_SUCCESS.json` if the results are damaged, so that the next merge writes them again. Raises DiskError.
    """
    ledger = read_ledgers(folder)
    parts = list_parts(folder)
    damage = [found for path in parts if (found := _check(path, ledger.get(path.name))) is not None]
    bad_parts = {found.path for found in damage}
    done = scan(folder)
    damage.extend(found for found in done.damage if found.path not in bad_parts)
    result_damage, num_results, complete = _check_results(folder)
    num_missing = None
    if expected is not None:
        num_missing = int(np.count_nonzero(done.find(expected.answers)[0] < 0))
    if mend:
        for found in damage:
            if found.path.suffix == ".parquet" and found.path.exists():
                set_aside(folder, found.path)
        if result_damage:
            with disk_errors("withdraw", folder.success):
                folder.success.unlink(missing_ok=True)
    return VerifyReport(
        num_parts=len(parts),
        num_journals=len(list_journals(folder)),
        num_answers=len(done),
        num_ok=int(np.count_nonzero(done.states == RowState.OK)),
        num_missing=num_missing,
        num_results=num_results,
        complete=complete and not result_damage,
        damage=(*damage, *result_damage),
    )


def _check(path: Path, facts: FileFacts | None) -> Damage | None:
    """Compare a file with what was written, or, if that is not known, read all of its pages."""
    try:
        if facts is not None:
            with disk_errors("read", path):
                intact = path.stat().st_size == facts.size and file_checksum(path) == facts.crc32
            return None if intact else Damage(path, "the file does not match its checksum")
        with open_checked(path) as file:
            for group in range(file.metadata.num_row_groups):
                file.read_row_group(group)
    except READ_ERRORS as error:
        return diagnose(path, error, facts)
    return None


def _check_results(folder: RunFolder) -> tuple[list[Damage], int, bool]:
    """Damage, rows found, and whether the results are complete and in order."""
    success = read_success(folder)
    known = {} if success is None else success.files
    found = {path.name: path for path in result_files(folder)}
    damage = [Damage(folder.results / name, "the file is missing") for name in known if name not in found]
    num_rows = 0
    last = (-1, -1)
    for name, path in found.items():
        flaw = _check(path, known.get(name))
        if flaw is None and success is not None and name not in known:
            flaw = Damage(path, "the file is not listed in _SUCCESS.json")
        if flaw is not None:
            damage.append(flaw)
            continue
        with open_checked(path) as file:
            for group in range(file.metadata.num_row_groups):
                table = file.read_row_group(group, columns=["row", "sample"])
                rows, samples = table["row"].to_numpy(), table["sample"].to_numpy()
                num_rows += len(rows)
                steps = np.diff(rows, prepend=last[0])
                if np.any((steps < 0) | ((steps == 0) & (np.diff(samples, prepend=last[1]) <= 0))):
                    damage.append(Damage(path, "rows are out of order, or twice there"))
                    break
                last = (int(rows[-1]), int(samples[-1]))
    return damage, num_rows, success is not None and num_rows == success.num_rows
