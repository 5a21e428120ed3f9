"""Local copies of sources that cannot be read at random: compressed, remote, or Parquet in huge row groups."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from longbatch.errors import DiskError, RowError
from longbatch.manifest.sources import Source, fingerprint
from longbatch.manifest.streams import BUFFER_BYTES, open_stream

# Reading one row decodes its whole row group; beyond this size a copy in small batches is worth its disk.
MOST_GROUP_BYTES = 64 << 20
# Of a table's copy: what is read for one row.
_BATCH_BYTES = 1 << 20


def needs_copy(source: Source) -> bool:
    """Whether rows of the source can be read at random only from a copy (for Parquet: quickly only)."""
    if source.compression is not None or not source.is_local:
        return True
    if source.kind != "parquet":
        return False
    from longbatch.manifest.tables import ParquetTable  # deferred: it loads pyarrow

    try:
        table = ParquetTable(source, None)
    except RowError:
        return False  # it has no rows to read
    is_large = table.largest_group_bytes > MOST_GROUP_BYTES
    table.close()
    return is_large


def copy_source(source: Source, folder: Path, columns: frozenset[str] | None, max_expansion: int) -> Path:
    """The copy of a source in `folder`, written unless it is there already, and named by the source's fingerprint.

    Lines and text are decompressed; tables become Arrow files of small batches. Where a file is cut off or damaged the
    copy ends as `rows` does. Raises DiskError where reading or writing fails.
    """
    suffix = {"jsonl": ".jsonl", "parquet": ".arrow"}.get(source.kind, os.path.splitext(source.uri)[1])
    path = folder / f"{fingerprint([source])}{suffix}"
    if path.exists():
        return path
    partial = folder / f".{path.name}.{os.getpid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if source.kind == "parquet":
            _copy_table(source, partial, columns)
        else:
            _copy_bytes(source, partial, max_expansion)
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise DiskError(f"{folder}: no local copy of {source.name} could be made: {error.strerror or error}") from error
    return path


def _copy_bytes(source: Source, path: Path, max_expansion: int) -> None:
    raw, stream = open_stream(source, max_expansion)
    with stream, open(path, "wb") as file:
        shutil.copyfileobj(stream, file, BUFFER_BYTES)
        if raw.failure is not None:  # may pass, so what was read must not be taken for the whole
            raise raw.failure
        file.flush()
        os.fsync(file.fileno())


def _copy_table(source: Source, path: Path, columns: frozenset[str] | None) -> None:
    """Row numbers stay: rows of a damaged row group, which nobody asks for, are filled with nulls."""
    import pyarrow as pa

    from longbatch.manifest.tables import ParquetTable

    try:
        table = ParquetTable(source, columns)
    except RowError:
        path.touch()
        return
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        for group in range(table.metadata.num_row_groups):
            num_missing = table.metadata.row_group(group).num_rows
            for batch in table.readable_batches(group, _BATCH_BYTES):
                writer.write_batch(batch)
                num_missing -= batch.num_rows
            if num_missing:
                nulls = [pa.nulls(num_missing, column.type) for column in table.schema]
                writer.write_batch(pa.record_batch(nulls, schema=table.schema))
    table.close()
