"""Sorting rows that do not fit in memory: dealt out to files by range of the final order, then sorted one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from longbatch.output.carried import cast
from longbatch.output.done import fixed_bytes
from longbatch.output.fidelity import Gaps
from longbatch.output.files import file_checksum
from longbatch.output.keys import join_answers
from longbatch.output.parquet import READ_ERRORS, FileFacts, open_checked
from longbatch.output.parts import Damage, diagnose
from longbatch.output.schema import RESULT_FIELDS

BUCKET_BYTES = 64 << 20
MAX_BUCKETS = 256
# What a row takes in memory beside its Parquet bytes: offsets and validity of some 70 mostly empty columns.
ROW_OVERHEAD_BYTES = 600
ORDER = pa.field("_order", pa.int64())


class DamagedPart(Exception):
    """A part does not hold what was written to it."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(str(damage))
        self.damage = damage


@dataclass(frozen=True, slots=True)
class Chosen:
    """The rows to keep, in their final order. files: int32 [n], index in paths. positions: int64 [n], row in
    that file. rows: int64 [n], number of the manifest row as it is now."""

    paths: tuple[Path, ...]
    files: NDArray[np.int32]
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.files)


class Buckets:
    """Files in `folder`, an empty one, that each hold one range of the final order, about 64 MiB in memory."""

    def __init__(
        self, folder: Path, chosen: Chosen, carried: list[pa.Field], ledger: dict[str, FileFacts], gaps: Gaps
    ) -> None:
        self._folder = folder
        self._chosen = chosen
        self._ledger = ledger
        self._gaps = gaps
        self._carried = carried
        self._schema = pa.schema([*RESULT_FIELDS, *carried, ORDER])
        self._by_file = np.lexsort((chosen.positions, chosen.files))
        self._num_buckets = 0

    def deal(self) -> None:
        """Read every part once and put its rows into their buckets. Raises DamagedPart, OSError."""
        buckets = self._assign()
        files = self._chosen.files[self._by_file]
        for file in np.unique(files).tolist():
            first, last = np.searchsorted(files, [file, file + 1])
            wanted = self._by_file[first:last]
            for table, orders in self._read(self._chosen.paths[file], wanted):
                self._put(table, orders, buckets[orders])

    def tables(self) -> Iterator[pa.Table]:
        """The rows in their final order, a bucket at a time. Raises OSError."""
        for number in range(self._num_buckets):
            path = self._path(number)
            with pa.OSFile(str(path)) as file:
                pieces = []
                while file.tell() < file.size():
                    pieces.append(pa.ipc.open_stream(file).read_all())
            table = pa.concat_tables(pieces).combine_chunks()
            del pieces
            order = np.argsort(table.column(ORDER.name).to_numpy(), kind="stable")
            table = table.drop_columns([ORDER.name]).take(pa.array(order))
            path.unlink()
            yield table

    def _assign(self) -> NDArray[np.int32]:
        """The bucket of each chosen row, by the bytes that stand before it in the final order."""
        weights = np.empty(len(self._chosen), dtype=np.float64)
        files = self._chosen.files[self._by_file]
        for file in np.unique(files).tolist():
            first, last = np.searchsorted(files, [file, file + 1])
            wanted = self._by_file[first:last]
            path = self._chosen.paths[file]
            starts, row_bytes = _row_groups(path, self._ledger.get(path.name))
            groups = np.searchsorted(starts, self._chosen.positions[wanted], side="right") - 1
            weights[wanted] = row_bytes[groups] + ROW_OVERHEAD_BYTES
        before = np.cumsum(weights) - weights
        size = max(BUCKET_BYTES, float(weights.sum()) / MAX_BUCKETS)
        # A range may be empty where a single row is larger than a bucket; only those that hold rows are numbered.
        ranges, buckets = np.unique((before / size).astype(np.int32), return_inverse=True)
        self._num_buckets = len(ranges)
        return buckets.astype(np.int32)

    def _read(self, path: Path, wanted: NDArray[np.int64]) -> Iterator[tuple[pa.Table, NDArray[np.int64]]]:
        """The wanted rows of a part, a row group at a time, each with its places in the final order."""
        facts = self._ledger.get(path.name)
        if facts is not None and file_checksum(path) != facts.crc32:
            raise DamagedPart(Damage(path, "the file does not match its checksum"))
        positions = self._chosen.positions[wanted]
        try:
            with open_checked(path) as file:
                start = 0
                for group in range(file.metadata.num_row_groups):
                    stop = start + file.metadata.row_group(group).num_rows
                    first, last = np.searchsorted(positions, [start, stop])
                    if first < last:
                        rows = pa.array(positions[first:last] - start)
                        yield file.read_row_group(group).take(rows), wanted[first:last]
                    start = stop
        except READ_ERRORS as error:
            raise DamagedPart(diagnose(path, error, facts)) from error

    def _put(self, table: pa.Table, orders: NDArray[np.int64], buckets: NDArray[np.int32]) -> None:
        by_bucket = np.argsort(buckets, kind="stable")
        buckets, orders = buckets[by_bucket], orders[by_bucket]
        table = self._in_final_types(table.take(pa.array(by_bucket)), orders)
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        bounds = np.flatnonzero(np.append(True, np.append(buckets[1:] != buckets[:-1], True)))
        for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            with (
                self._path(int(buckets[first])).open("ab") as file,
                pa.ipc.new_stream(file, self._schema, options=options) as stream,
            ):
                stream.write_table(table.slice(first, last - first))

    def _in_final_types(self, table: pa.Table, orders: NDArray[np.int64]) -> pa.Table:
        """The result columns with the row numbers of today, the carried columns as merged, and the order."""
        columns = [table.column(field.name).combine_chunks() for field in RESULT_FIELDS]
        columns[1] = pa.array(self._chosen.rows[orders], pa.int64())
        if len(self._gaps):
            place = RESULT_FIELDS.index(table.schema.field("attention"))
            columns[place] = self._gaps.fill(columns[place], _answers(table))
        names = set(table.schema.names)
        for field in self._carried:
            if field.name in names:
                columns.append(cast(table.column(field.name).combine_chunks(), field.type))
            else:
                columns.append(pa.nulls(len(table), field.type))
        return pa.Table.from_arrays([*columns, pa.array(orders, pa.int64())], schema=self._schema)

    def _path(self, number: int) -> Path:
        return self._folder / f"bucket-{number}.arrows"


def _answers(table: pa.Table) -> NDArray[np.bytes_]:
    """Key and fingerprint of each row of a part: S32."""
    key, fingerprint = (table.column(name).combine_chunks() for name in ("_key", "_fingerprint"))
    return join_answers(fixed_bytes(key), fixed_bytes(fingerprint))


def _row_groups(path: Path, facts: FileFacts | None) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """First row of each row group, and the uncompressed bytes of one of its rows on average."""
    try:
        with open_checked(path) as file:
            groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    except READ_ERRORS as error:
        raise DamagedPart(diagnose(path, error, facts)) from error
    num_rows = np.array([group.num_rows for group in groups], dtype=np.int64)
    sizes = np.array([group.total_byte_size for group in groups], dtype=np.float64)
    return np.cumsum(num_rows) - num_rows, sizes / np.maximum(num_rows, 1)
