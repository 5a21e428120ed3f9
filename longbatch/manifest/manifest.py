"""A manifest: its files, its rows in order, and any row again by its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from longbatch.core import Fault, Location, Request
from longbatch.errors import ManifestError, RowError
from longbatch.manifest.access import RandomAccess
from longbatch.manifest.documents import DocumentFolder
from longbatch.manifest.lines import Record, Rejected, read_lines
from longbatch.manifest.options import ManifestOptions
from longbatch.manifest.rows import RowReader, read_id
from longbatch.manifest.sources import Source, common_folder, common_prefix, find_sources, fingerprint
from longbatch.manifest.spool import copy_source, needs_copy
from longbatch.manifest.texts import read_text_file

# Longer ids are remembered by their hash.
_LONGEST_KEPT_ID = 64


class Manifest:
    """The rows of a job, read as a stream. Nothing of them is kept but their ids, to find duplicates.

    sources: the files, in order. root: the folder that `MediaRef.path` is relative to, or None.
    """

    def __init__(self, sources: tuple[Source, ...], options: ManifestOptions) -> None:
        self.sources = sources
        self.options = options
        self.root = options.media_root.absolute() if options.media_root else common_folder(sources)
        self._reader = RowReader(options)
        self._copies: dict[int, Path] = {}
        self._access = RandomAccess(sources, self._copies, self._reader.columns)
        self._last_folder = (-1, DocumentFolder(None, None))
        self._text_prefix = common_prefix([source for source in sources if source.kind == "text"])
        self._text_field = "document" if options.prompt is None else "text"

    @classmethod
    def open(cls, sources: Sequence[str], options: ManifestOptions | None = None) -> Manifest:
        """Finds the files; no row is read yet. Raises ManifestError, and UsageError for a bad prompt template."""
        return cls(find_sources(sources), options or ManifestOptions())

    @property
    def warnings(self) -> list[str]:
        """What the last pass of `rows` found odd but not wrong, such as a column `max_token`."""
        return self._reader.warnings

    def fingerprint_sources(self) -> str:
        """A cheap hash over name, size and time of the files: equal means that a stored plan still fits."""
        return fingerprint(self.sources)

    def rows(self) -> Iterator[Request | Fault]:
        """Every sample of every row, in order; a row that cannot run is one Fault.

        The later of two rows with one id is a Fault without an id, so that the first keeps its result.
        Raises ManifestError if there is no row at all, or none with the id that `only` asks for.
        """
        self._reader.reset()
        first_rows: dict[str | bytes, int] = {}
        only, limit = self.options.only, self.options.limit
        row = num_rows = 0
        for record in self._records():
            if num_rows == limit:
                return
            if type(record.values) is dict and self.sources[record.location.source].kind == "jsonl":
                self._reader.watch(record.values.keys())
            answers = self._read(record, row)
            id = answers[0].id
            if only is None or id == only:
                if id is not None:
                    key = id if len(id) <= _LONGEST_KEPT_ID else blake2b(id.encode()).digest()
                    first = first_rows.setdefault(key, row)
                    if first != row:
                        answers = [self._duplicate(record, row, first, answers[0])]
                yield from answers
                num_rows += 1
                if only is not None:
                    return
            row += 1
        if only is not None:
            raise ManifestError(f"no row has the id {only!r}")
        if not row:
            names = ", ".join(source.name for source in self.sources[:3])
            raise ManifestError(f"{names}: the manifest holds no row", hint="it needs at least one")

    def read(self, location: Location, row: int) -> list[Request | Fault]:
        """One row again, all its samples; `row` is the number that `rows` gave it.

        Duplicates are not noticed here. Raises ManifestError for a source that must be copied first: see `spool`.
        """
        source = self.sources[location.source]
        if source.kind == "text":
            record = next(self._text_records(location.source))
            return self._read(record, row)
        try:
            where, values = self._access.values(location)
        except RowError as error:
            where, values = source.name, Rejected(error, {})
        except OSError as error:
            message = f"the row cannot be read again ({error.strerror or type(error).__name__})"
            where, values = source.name, Rejected(RowError("unreadable_input", message), {})
        return self._read(Record(location, where, values), row)

    def spool(self, folder: Path) -> None:
        """Writes local copies of the sources that `read` cannot open itself: compressed and remote ones, and Parquet
        files with huge row groups. Finished copies are used again, also by other processes. Raises DiskError."""
        for index, source in enumerate(self.sources):
            if index not in self._copies and needs_copy(source):
                self._copies[index] = copy_source(source, folder, self._reader.columns, self.options.max_expansion)
        self._access.close()

    def close(self) -> None:
        """Closes the files that `read` has opened."""
        self._access.close()

    def _records(self) -> Iterator[Record]:
        options = self.options
        for index, source in enumerate(self.sources):
            if source.kind == "jsonl":
                yield from read_lines(source, index, options.max_row_bytes, options.max_expansion)
            elif source.kind == "text":
                yield from self._text_records(index)
            else:
                yield from self._table_records(source, index)

    def _table_records(self, source: Source, index: int) -> Iterator[Record]:
        from longbatch.manifest.tables import ParquetTable  # deferred: it loads pyarrow

        try:
            table = ParquetTable(source, self._reader.columns)
        except RowError as error:
            yield Record(Location(index, 0, 0), source.name, Rejected(error, {}))
            return
        self._reader.watch(table.names, table.num_rows)
        yield from table.records(index)
        table.close()

    def _text_records(self, index: int) -> Iterator[Record]:
        source, copy = self.sources[index], self._copies.get(index)
        name = source.uri.removeprefix(self._text_prefix)
        return read_text_file(source, index, name, self.root, self._text_field, self.options.max_row_bytes, copy)

    def _read(self, record: Record, row: int) -> list[Request | Fault]:
        location, where, values = record
        reader = self._reader
        if isinstance(values, Rejected):
            try:
                id = read_id(values.values)
            except RowError:
                id = None
            return [reader.fault(values.error, {}, row, id, location, where)]
        return reader.read(values, row, location, self._folder(location.source), where)

    def _duplicate(self, record: Record, row: int, first: int, answer: Request | Fault) -> Fault:
        error = RowError("duplicate_id", f"row {first} has the same id; ids must be unique", field="id")
        fault = self._reader.fault(error, {}, row, None, record.location, record.where)
        return replace(fault, carried=answer.carried)

    def _folder(self, index: int) -> DocumentFolder:
        cached, folder = self._last_folder
        if cached != index:
            source = self.sources[index]
            is_shared = self.options.media_root is not None or self.root is None or not source.is_local
            folder = DocumentFolder(self.root if is_shared else Path(source.uri).parent, self.root)
            self._last_folder = (index, folder)
        return folder
