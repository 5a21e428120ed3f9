"""What a run folder already holds: one entry an answer, in sorted numpy columns of about 70 bytes each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from longbatch.core import Fault, Request
from longbatch.output.folder import RunFolder
from longbatch.output.journal import JournalReader
from longbatch.output.keys import KEY_DTYPE, KeyTable, join_answers, key_part
from longbatch.output.parquet import READ_ERRORS, FileFacts, open_checked
from longbatch.output.parts import Damage, diagnose, list_journals, list_parts, read_ledgers

COLUMNS = ["_key", "_fingerprint", "row", "sample", "status", "attempt", "error.type", "error.retryable"]
JOURNAL_COLUMNS = ["_key", "_fingerprint", "row", "sample", "status", "attempt", "error"]
MATCH_ROWS = 8192


class RowState(IntEnum):
    """What is known about an answer. CHANGED: only an answer to other content under the same key exists."""

    MISSING = 0
    OK = 1
    FAILED = 2
    RETRYABLE = 3
    CHANGED = 4


class Match(NamedTuple):
    """A row of the manifest beside what is known of it. attempt: of the answer found, 0 without one.

    error_type: of the answer found, if it is an error row.
    """

    source: Request | Fault
    state: RowState
    attempt: int
    error_type: str | None


@dataclass(frozen=True, slots=True)
class Done:
    """Every answer in a run folder, the best of each: ok before error, then the newest attempt.

    answers: S32 [n], key and fingerprint, sorted. states: uint8 [n], a RowState. rows, samples: as recorded.
    errors: int16 [n], index in `error_types`, -1 for none. files, positions: in which of `paths` it stands,
    and at which row. damage: files that could not be read, or are missing; their rows are not counted.
    """

    answers: NDArray[np.bytes_]
    states: NDArray[np.uint8]
    attempts: NDArray[np.int32]
    rows: NDArray[np.int64]
    samples: NDArray[np.int32]
    errors: NDArray[np.int16]
    files: NDArray[np.int32]
    positions: NDArray[np.int64]
    paths: tuple[Path, ...]
    error_types: tuple[str, ...]
    damage: tuple[Damage, ...]

    def __len__(self) -> int:
        return len(self.answers)

    def counts(self) -> dict[str, int]:
        """Number of answers: `ok`, and each error type."""
        counts = {"ok": int(np.count_nonzero(self.states == RowState.OK))}
        found = Counter(self.errors[self.errors >= 0].tolist())
        return counts | {self.error_types[code]: number for code, number in sorted(found.items())}

    def find(self, answers: NDArray[np.bytes_]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Index in this table (-1 for none) and RowState of each of [n] S32 answers."""
        if len(self.answers) == 0:
            return np.full(len(answers), -1, np.int64), np.full(len(answers), RowState.MISSING, np.uint8)
        place = np.searchsorted(self.answers, answers)
        after = np.minimum(place, len(self.answers) - 1)
        exact = self.answers[after] == answers
        # Answers sort by key first, so another answer of the same key is a neighbour of the place.
        keys, wanted = key_part(self.answers), key_part(answers)
        same_key = (keys[after] == wanted) | (keys[np.maximum(place - 1, 0)] == wanted)
        states = np.where(same_key, np.uint8(RowState.CHANGED), np.uint8(RowState.MISSING))
        return np.where(exact, after, -1), np.where(exact, self.states[after], states)

    def match(self, sources: Iterable[Request | Fault]) -> Iterator[Match]:
        """Each row of a manifest beside what is known of it, in the manifest's order and constant memory."""
        remaining = iter(sources)
        while chunk := list(islice(remaining, MATCH_ROWS)):
            places, states = self.find(KeyTable.of(chunk).answers)
            for source, place, state in zip(chunk, places.tolist(), states.tolist(), strict=True):
                if place < 0:
                    yield Match(source, RowState(state), 0, None)
                    continue
                error = int(self.errors[place])
                error_type = None if error < 0 else self.error_types[error]
                yield Match(source, RowState(state), int(self.attempts[place]), error_type)


def scan(folder: RunFolder, *, journals: bool = True) -> Done:
    """Read what is done from parts and, unless told otherwise, from journals; changes nothing on the disk.

    Files that do not hold what was written are reported in `damage` and their rows left out, so that they run
    again. Raises DiskError where the disk refuses to read.
    """
    builder = _Builder()
    # Journals first: one that is published meanwhile is then found among the parts.
    for path in list_journals(folder) if journals else ():
        builder.add_journal(path)
    ledger = read_ledgers(folder)
    parts = list_parts(folder)
    for path in parts:
        builder.add_part(path, ledger.pop(path.name, None))
    for name in sorted(ledger):
        if not (folder.damaged / name).exists():
            builder.damage.append(Damage(folder.parts / name, "the file is missing"))
    return builder.build()


class _Builder:
    """Collects the columns of all files, then keeps the best answer of each key and fingerprint."""

    def __init__(self) -> None:
        self.damage: list[Damage] = []
        self._paths: list[Path] = []
        self._error_codes: dict[str, int] = {}
        self._chunks: list[tuple[NDArray[Any], ...]] = []

    def add_part(self, path: Path, facts: FileFacts | None) -> None:
        try:
            size = path.stat().st_size
            if facts is not None and size != facts.size:
                self.damage.append(Damage(path, f"the file has {size} bytes, {facts.size} were written"))
                return
            with open_checked(path) as file:
                table = file.read(columns=COLUMNS, use_threads=False)
            self._add(path, table)
        except READ_ERRORS as error:
            self.damage.append(diagnose(path, error, facts))

    def add_journal(self, path: Path) -> None:
        reader = JournalReader(path)
        try:
            batches = [batch.select(JOURNAL_COLUMNS) for batch in reader.batches()]
        except FileNotFoundError:
            return
        if batches:
            self._add(path, pa.Table.from_batches(batches))
        if reader.report.num_damaged:
            self.damage.append(Damage(path, f"{reader.report.num_damaged} writes do not match their checksums"))

    def _add(self, path: Path, table: pa.Table) -> None:
        position = 0
        for batch in table.combine_chunks().to_batches():
            self._chunks.append(self._columns(batch, len(self._paths), position))
            position += batch.num_rows
        self._paths.append(path)

    def _columns(self, batch: pa.RecordBatch, file: int, position: int) -> tuple[NDArray[Any], ...]:
        num_rows = batch.num_rows
        types = pc.struct_field(batch.column("error"), "type").dictionary_encode()
        codes = [self._error_codes.setdefault(name, len(self._error_codes)) for name in types.dictionary.to_pylist()]
        places = types.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        retryable = _flags(pc.struct_field(batch.column("error"), "retryable"))
        failed = np.where(retryable, np.uint8(RowState.RETRYABLE), np.uint8(RowState.FAILED))
        return (
            join_answers(fixed_bytes(batch.column("_key")), fixed_bytes(batch.column("_fingerprint"))),
            np.where(_flags(pc.equal(batch.column("status"), "ok")), np.uint8(RowState.OK), failed),
            batch.column("attempt").to_numpy(),
            batch.column("row").to_numpy(),
            batch.column("sample").to_numpy(),
            np.array([*codes, -1], np.int16)[places],
            np.full(num_rows, file, np.int32),
            np.arange(position, position + num_rows, dtype=np.int64),
        )

    def build(self) -> Done:
        answers, states, attempts, rows, samples, errors, files, positions = self._concatenated()
        best = best_of(answers, states == RowState.OK, attempts)
        return Done(
            answers[best],
            states[best],
            attempts[best],
            rows[best],
            samples[best],
            errors[best],
            files[best],
            positions[best],
            tuple(self._paths),
            tuple(self._error_codes),
            tuple(self.damage),
        )

    def _concatenated(self) -> list[NDArray[Any]]:
        if not self._chunks:
            return [np.empty(0, kind) for kind in ("S32", "u1", "i4", "i8", "i4", "i2", "i4", "i8")]
        columns = [np.concatenate(chunks) for chunks in zip(*self._chunks, strict=True)]
        self._chunks = []
        return columns


def best_of(names: NDArray[np.bytes_], is_ok: NDArray[np.bool_], attempts: NDArray[np.int32]) -> NDArray[np.int64]:
    """For each distinct name the index of its best entry (ok, then the newest attempt, then the last), by name."""
    order = np.lexsort((attempts, is_ok))  # worst first; stable, like the next sort
    order = order[np.argsort(names[order], kind="stable")]
    ordered = names[order]
    return order[np.append(ordered[1:] != ordered[:-1], True)] if len(order) else order


def _flags(column: pa.Array) -> NDArray[np.bool_]:
    """A boolean column as numpy, null as false."""
    flags: NDArray[np.bool_] = column.fill_null(False).to_numpy(zero_copy_only=False)
    return flags


def fixed_bytes(column: pa.Array) -> NDArray[np.bytes_]:
    """A binary(16) column without nulls as numpy S16."""
    buffer = column.buffers()[1]
    return np.frombuffer(buffer, KEY_DTYPE)[column.offset : column.offset + len(column)]
