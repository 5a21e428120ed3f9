"""How rows attended, read back from parts and results; and the gaps that were measured afterwards.

Gaps are results of their own: a run folder inside the run folder, `_work/verify`, holds one row without an answer for
each row that was measured. They survive what results survive, and the merge puts them where they belong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from longbatch.errors import UsageError
from longbatch.output.done import Done, RowState, scan
from longbatch.output.folder import RunFolder
from longbatch.output.parquet import READ_ERRORS, open_checked
from longbatch.output.schema import ATTENTION

FOLDER = "verify"


@dataclass(frozen=True, slots=True)
class Gaps:
    """answers: S32 [n], key and fingerprint, sorted. gaps: float64 [n], NaN where a row had nothing to compare. What
    cannot be read is not among them."""

    answers: NDArray[np.bytes_]
    gaps: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.answers)

    def of(self, answers: NDArray[np.bytes_]) -> NDArray[np.float64]:
        """The gap of each of [n] answers, NaN where none was measured."""
        if not len(self):
            return np.full(len(answers), np.nan)
        return np.where(self.has(answers), self.gaps[self._places(answers)], np.nan)

    def has(self, answers: NDArray[np.bytes_]) -> NDArray[np.bool_]:
        """Which of [n] answers were looked at, whether or not they had something to compare."""
        if not len(self):
            return np.zeros(len(answers), dtype=bool)
        found: NDArray[np.bool_] = self.answers[self._places(answers)] == answers
        return found

    def _places(self, answers: NDArray[np.bytes_]) -> NDArray[np.int64]:
        return np.minimum(np.searchsorted(self.answers, answers), len(self) - 1)

    def fill(self, attention: pa.StructArray, answers: NDArray[np.bytes_]) -> pa.StructArray:
        """The column `attention` of some answers with their gaps filled in."""
        columns = [attention.field(number) for number in range(attention.type.num_fields)]
        place = ATTENTION.get_field_index("gap")
        columns[place] = pa.array(self.of(answers), pa.float64(), from_pandas=True)
        return pa.StructArray.from_arrays(columns, fields=list(ATTENTION), mask=attention.is_null())


@dataclass(frozen=True, slots=True)
class Fidelity:
    """What the merged results say of attention. num_sparse: rows that ran sparse; mean_density: of those, 1 where there
    are none. num_measured: rows with a gap; mean_gap and worst_gap over those, in nats."""

    num_sparse: int = 0
    mean_density: float = 1.0
    num_measured: int = 0
    mean_gap: float = 0.0
    worst_gap: float = 0.0


def verify_folder(folder: RunFolder) -> RunFolder:
    """Where gaps are kept, made where it is not there yet. Raises UsageError, DiskError."""
    return RunFolder.create_or_open(folder.work / FOLDER, folder.identity, {})


def read_gaps(folder: RunFolder) -> Gaps:
    """Every gap that was measured. Damaged parts count as not there. Raises DiskError."""
    try:
        inner = RunFolder.open(folder.work / FOLDER)
    except UsageError:
        return Gaps(np.empty(0, "S32"), np.empty(0))
    done = scan(inner, journals=False)
    ok = np.flatnonzero(done.states == RowState.OK)
    gaps, is_known = np.full(len(done), np.nan), np.zeros(len(done), dtype=bool)
    for chosen, column in _attention_of(done, ok, "gap"):
        gaps[chosen] = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        # Null says that there was nothing to compare; a number that is none is damage.
        is_known[chosen] = np.isfinite(gaps[chosen]) | column.is_null().to_numpy(zero_copy_only=False)
    return Gaps(done.answers[is_known], gaps[is_known])


def ran_sparse(done: Done) -> NDArray[np.bool_]:
    """Which answers are good ones that ran sparse: bool [n]. Only those in parts are looked at."""
    sparse = np.zeros(len(done), dtype=bool)
    for chosen, column in _attention_of(done, np.flatnonzero(done.states == RowState.OK), "mode"):
        sparse[chosen] = pc.equal(column, "sparse").fill_null(False).to_numpy(zero_copy_only=False)
    return sparse


def fidelity(files: Iterable[Path]) -> Fidelity:
    """What merged results say."""
    num_sparse = num_measured = 0
    density = total = worst = 0.0
    for path in files:
        with open_checked(path) as file:
            for group in range(file.metadata.num_row_groups):
                names = ["attention.mode", "attention.density", "attention.gap"]
                column = file.read_row_group(group, columns=names).column("attention").combine_chunks()
                sparse = pc.equal(pc.struct_field(column, "mode"), "sparse").fill_null(False)
                shares = pc.struct_field(column, "density").filter(sparse).drop_null().to_numpy()
                gaps = pc.struct_field(column, "gap").drop_null().to_numpy()
                num_sparse, density = num_sparse + len(shares), density + float(shares.sum())
                num_measured, total = num_measured + len(gaps), total + float(gaps.sum())
                worst = max(worst, float(gaps.max(initial=0.0)))
    return Fidelity(
        num_sparse,
        density / num_sparse if num_sparse else 1.0,
        num_measured,
        total / num_measured if num_measured else 0.0,
        worst,
    )


def _attention_of(done: Done, chosen: NDArray[np.int64], name: str) -> Iterable[tuple[NDArray[np.int64], pa.Array]]:
    """A field of `attention` for some answers that stand in parts, file by file: (which of them, the values)."""
    files = done.files[chosen]
    for number in np.unique(files).tolist():
        path = done.paths[number]
        if path.suffix != ".parquet":
            continue
        own = chosen[files == number]
        try:
            with open_checked(path) as file:
                table = file.read(columns=[f"attention.{name}"])
        except READ_ERRORS:
            continue  # whoever reads the rows themselves will say that the part is damaged
        column = pc.struct_field(table.column("attention").combine_chunks(), name)
        yield own, column.take(pa.array(done.positions[own]))
