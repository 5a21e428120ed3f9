"""Parquet files: rows as a stream, or one row by its number."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from longbatch.core import Location
from longbatch.errors import RowError
from longbatch.manifest.lines import Record, Rejected
from longbatch.manifest.sources import Source

# Decoded bytes held at a time: a table of books has fewer rows in a batch than one of tweets.
BATCH_BYTES = 16 << 20
_MOST_BATCH_ROWS = 4096
# What pyarrow raises for a value that has no Python form.
_UNREADABLE = (ValueError, OverflowError, pa.ArrowException)


class ParquetTable:
    """An open Parquet file. columns: the names to decode, None for all. Raises RowError if there is no footer."""

    def __init__(self, source: Source, columns: frozenset[str] | None) -> None:
        self.source = source
        try:
            file = source.uri if source.is_local else source.open()
            self._file = pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
        except (OSError, pa.ArrowException) as error:
            raise _open_error(error) from None
        self.metadata = self._file.metadata
        self.names: list[str] = list(self._file.schema_arrow.names)
        self._columns = self.names if columns is None else [name for name in self.names if name in columns]
        starts = [0]
        for group in range(self.metadata.num_row_groups):
            starts.append(starts[-1] + self.metadata.row_group(group).num_rows)
        self._starts = starts

    def close(self) -> None:
        self._file.close()

    @property
    def num_rows(self) -> int:
        """Rows of the whole file."""
        return self._starts[-1]

    @property
    def largest_group_bytes(self) -> int:
        """Decoded size of the largest row group, as far as the footer tells."""
        groups = (self.metadata.row_group(index) for index in range(self.metadata.num_row_groups))
        return max((group.total_byte_size for group in groups), default=0)

    def batches(self, group: int, batch_bytes: int = BATCH_BYTES) -> Iterator[pa.RecordBatch]:
        """The batches of one row group. Raises OSError or ArrowException where the file is damaged."""
        metadata = self.metadata.row_group(group)
        row_bytes = max(1, metadata.total_byte_size // max(1, metadata.num_rows))
        num_rows = min(_MOST_BATCH_ROWS, max(1, batch_bytes // row_bytes))
        batches: Iterator[pa.RecordBatch] = self._file.iter_batches(
            num_rows, row_groups=[group], columns=self._columns, use_threads=False
        )
        return batches

    def readable_batches(self, group: int, batch_bytes: int = BATCH_BYTES) -> Iterator[pa.RecordBatch]:
        """The batches of one row group up to where it is damaged."""
        with suppress(OSError, pa.ArrowException):
            yield from self.batches(group, batch_bytes)

    def records(self, index: int) -> Iterator[Record]:
        """Every row. A damaged row group costs its own rows only: each becomes a Rejected row."""
        for group in range(self.metadata.num_row_groups):
            first, end = self._starts[group], self._starts[group + 1]
            row = first
            for batch in self.readable_batches(group):
                for values in row_values(batch):
                    yield Record(Location(index, row, 0), self.where(row), values)
                    row += 1
            error = RowError("unreadable_input", "the row group is damaged; write the file again")
            for lost in range(row, end):
                yield Record(Location(index, lost, 0), self.where(lost), Rejected(error, {}))

    def where(self, row: int) -> str:
        """The place of a row, for messages. Rows count from 0 inside their row group."""
        group = self.group(row)
        return f"{self.source.name}, row group {group}, row {row - self._starts[group]}"

    def group(self, row: int) -> int:
        """The row group that holds a row of the file."""
        return bisect_right(self._starts, row) - 1

    def start(self, group: int) -> int:
        """The first row of a row group."""
        return self._starts[group]

    def read_group(self, group: int) -> pa.Table:
        """A row group, decoded; one that is damaged up to where it is, as `records` reads it."""
        try:
            return self._file.read_row_group(group, columns=self._columns, use_threads=False)
        except (OSError, pa.ArrowException):
            return pa.Table.from_batches(list(self.readable_batches(group)), self.schema)

    @property
    def schema(self) -> pa.Schema:
        """The columns that are decoded."""
        full = self._file.schema_arrow
        return pa.schema([full.field(name) for name in self._columns])


def row_values(rows: pa.Table | pa.RecordBatch) -> list[dict[str, Any] | Rejected]:
    """The rows of a batch as dicts; a row with a value that Python cannot hold (text that is not UTF-8, a date beyond
    the year 9999, an unknown time zone) is rejected alone."""
    try:
        return [*rows.to_pylist()]
    except _UNREADABLE:
        return [_one_row(rows.slice(row, 1)) for row in range(rows.num_rows)]


def _one_row(row: pa.Table | pa.RecordBatch) -> dict[str, Any] | Rejected:
    values: dict[str, Any] = {}
    error = None
    for name in row.schema.names:
        try:
            values |= row.select([name]).to_pylist()[0]
        except UnicodeDecodeError:
            error = error or RowError("invalid_encoding", "the text is not UTF-8", field=name)
        except _UNREADABLE:
            message = "the value cannot be read (a date out of range, an unknown time zone?); cast the column to string"
            error = error or RowError("invalid_value", message, field=name)
    return values if error is None else Rejected(error, values)


def _open_error(error: Exception) -> RowError:
    text = str(error).lower()
    if "magic bytes" in text or "footer" in text or "file size" in text or "0 bytes" in text:
        return RowError("truncated_input", "the file has no Parquet footer: it is cut off or was never closed")
    return RowError("unreadable_input", "the file cannot be opened as Parquet; write it again")
