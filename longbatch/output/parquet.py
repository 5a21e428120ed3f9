"""Parquet files as longbatch writes and reads them: checksummed pages, zstd, row groups of at most 32 MiB."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from longbatch.output.files import ChecksummedFile
from longbatch.output.schema import DICTIONARY_COLUMNS, STATISTICS_COLUMNS

ROW_GROUP_BYTES = 32 << 20
# What a damaged file can raise while it is read.
READ_ERRORS = (pa.ArrowException, OSError, KeyError, UnicodeDecodeError)


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What was written: checked again when the file is read."""

    num_rows: int
    size: int
    crc32: int


class ParquetSink:
    """Writes one new file, under a name that readers do not look for until the caller publishes it."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self.num_rows = 0
        self._schema = schema
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        self._file = ChecksummedFile(path)
        self._writer = pq.ParquetWriter(
            self._file,
            schema,
            compression="zstd",
            use_dictionary=DICTIONARY_COLUMNS,
            write_statistics=STATISTICS_COLUMNS,
            write_page_checksum=True,
        )

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._file.size

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows; a row group is written when 32 MiB have come together. Raises OSError."""
        for piece in _pieces(batch):
            if self._pending and self._pending_bytes + piece.nbytes > ROW_GROUP_BYTES:
                self._write_group()
            self._pending.append(piece)
            self._pending_bytes += piece.nbytes

    def finish(self) -> FileFacts:
        """Write what is left and wait until the file is on the disk. Raises OSError."""
        if self._pending:
            self._write_group()
        self._writer.close()
        self._file.sync()
        self._file.close()
        return FileFacts(self.num_rows, self._file.size, self._file.checksum)

    def discard(self) -> None:
        """Remove the file, finished or not."""
        with suppress(OSError):
            self._writer.close()
        self._file.close()
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    def _write_group(self) -> None:
        table = pa.Table.from_batches(self._pending, self._schema)
        self._pending, self._pending_bytes = [], 0
        self._writer.write_table(table, row_group_size=table.num_rows)
        self.num_rows += table.num_rows


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.nbytes <= ROW_GROUP_BYTES or batch.num_rows <= 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _pieces(batch.slice(0, half))
    yield from _pieces(batch.slice(half))


def open_checked(path: Path) -> pq.ParquetFile:
    """Open a file so that a page with a flipped bit raises; see `READ_ERRORS`."""
    return pq.ParquetFile(path, page_checksum_verification=True)
