"""Random access: the values of one row by its Location."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from longbatch.core import Location
from longbatch.errors import ManifestError, RowError
from longbatch.manifest.lines import Rejected, parse_line
from longbatch.manifest.sources import Source

if TYPE_CHECKING:
    import pyarrow as pa

_MOST_OPEN_FILES = 64
_MOST_CACHED_GROUPS = 2

Values = dict[str, Any] | Rejected


class RowFile(Protocol):
    """An open file whose rows can be read in any order."""

    def values(self, location: Location) -> tuple[str, Values]:
        """The place of a row, for messages, and its values."""

    def close(self) -> None: ...


class RandomAccess:
    """Opens files as their rows are asked for and keeps the last few open. Threads may share it.

    copies: by source index, the local copy to read instead.
    """

    def __init__(self, sources: tuple[Source, ...], copies: Mapping[int, Path], columns: frozenset[str] | None) -> None:
        self._sources = sources
        self._copies = copies
        self._columns = columns
        self._files: OrderedDict[int, RowFile] = OrderedDict()
        self._lock = Lock()

    def values(self, location: Location) -> tuple[str, Values]:
        """As `RowFile.values`. Raises ManifestError where a copy is needed and missing."""
        with self._lock:
            file = self._files.get(location.source)
            if file is None:
                file = self._files[location.source] = self._open(location.source)
                if len(self._files) > _MOST_OPEN_FILES:
                    self._files.popitem(last=False)[1].close()
            self._files.move_to_end(location.source)
            return file.values(location)

    def close(self) -> None:
        """Closes every file; a later read opens it again."""
        with self._lock:
            while self._files:
                self._files.popitem()[1].close()

    def _open(self, index: int) -> RowFile:
        source, copy = self._sources[index], self._copies.get(index)
        if copy is None and (source.compression or not source.is_local):
            raise ManifestError(f"{source.name}: needs a local copy (`spool`) before rows are read at random")
        if source.kind != "parquet":
            return _LineFile(source, copy or Path(source.uri))
        return _ParquetFile(source, self._columns) if copy is None else _ArrowFile(source, copy)


class _LineFile:
    def __init__(self, source: Source, path: Path) -> None:
        self._name = source.name
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def values(self, location: Location) -> tuple[str, Values]:
        line = b""
        while len(line) < location.length:
            piece = os.pread(self._file, location.length - len(line), location.offset + len(line))
            if not piece:
                message = "the file has become shorter since its rows were counted"
                return self._name, Rejected(RowError("unreadable_input", message), {})
            line += piece
        return f"{self._name}, byte {location.offset}", parse_line(line)

    def close(self) -> None:
        os.close(self._file)


class _ParquetFile:
    """Decodes whole row groups and keeps the last ones, since rows are often asked for in bunches."""

    def __init__(self, source: Source, columns: frozenset[str] | None) -> None:
        from longbatch.manifest.tables import ParquetTable

        self._table = ParquetTable(source, columns)
        self._groups: OrderedDict[int, pa.Table] = OrderedDict()

    def values(self, location: Location) -> tuple[str, Values]:
        where = self._table.where(location.offset)
        group = self._table.group(location.offset)
        rows = self._groups.get(group)
        if rows is None:
            rows = self._groups[group] = self._table.read_group(group)
            if len(self._groups) > _MOST_CACHED_GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(group)
        return where, _row(rows, location.offset - self._table.start(group))

    def close(self) -> None:
        self._table.close()


class _ArrowFile:
    """A copy made by `spool`: a row costs its own small batch only."""

    def __init__(self, source: Source, path: Path) -> None:
        import pyarrow as pa

        self._name = source.name
        self._starts = [0]
        with pa.memory_map(str(path)) as mapped:  # touches no page but those that tell the lengths
            batches = pa.ipc.open_file(mapped)
            for index in range(batches.num_record_batches):
                self._starts.append(self._starts[-1] + batches.get_batch(index).num_rows)
        # Read and not mapped from here on: mapped pages would count as this process's memory.
        self._file = pa.OSFile(str(path))
        self._batches = pa.ipc.open_file(self._file)

    def values(self, location: Location) -> tuple[str, Values]:
        index = bisect_right(self._starts, location.offset) - 1
        batch = self._batches.get_batch(index)
        return f"{self._name}, row {location.offset}", _row(batch, location.offset - self._starts[index])

    def close(self) -> None:
        self._file.close()


def _row(rows: pa.Table | pa.RecordBatch, row: int) -> Values:
    from longbatch.manifest.tables import row_values

    if row >= rows.num_rows:
        return Rejected(RowError("unreadable_input", "the row group is damaged; write the file again"), {})
    return row_values(rows.slice(row, 1))[0]
