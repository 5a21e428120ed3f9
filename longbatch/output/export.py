"""Merged results in other formats, as a stream: a million rows take no more memory than a thousand."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from longbatch.errors import UsageError
from longbatch.output.files import disk_errors, temporary_path
from longbatch.output.folder import RunFolder
from longbatch.output.merge import result_files
from longbatch.output.openai import openai_line

CHUNK_BYTES = 1 << 20
Row = dict[str, Any]


def export(folder: RunFolder, format: str, target: Path | None = None) -> int:
    """Write the merged results as `jsonl`, `csv` or `openai-jsonl` (the lines of a batch's output file).

    target: the file, which appears only when it is complete; standard output if None. Returns the number of
    records, the header of a CSV file included. Raises UsageError (an unknown format, nothing merged), DiskError.
    """
    if format not in FORMATS:
        raise UsageError(f"unknown export format {format!r}", hint=f"choose one of {', '.join(FORMATS)}")
    files = result_files(folder)
    if not files:
        raise UsageError(f"{folder.path} has no merged results", hint="run `longbatch merge` on it first")
    lines = FORMATS[format](folder, files)
    if target is None:
        return _write(lines, sys.stdout.buffer)
    temporary = temporary_path(target)
    with disk_errors("export to", target):
        try:
            with temporary.open("wb") as file:
                num_lines = _write(lines, file)
            os.replace(temporary, target)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
    return num_lines


def _write(lines: Iterable[bytes], file: BinaryIO) -> int:
    num_lines = 0
    for line in lines:
        file.write(line)
        num_lines += 1
    file.flush()
    return num_lines


def _tables(files: list[Path], columns: list[str] | None = None) -> Iterator[pa.Table]:
    """The results in slices of about 1 MiB, which as Python objects take some 30 times as much."""
    for path in files:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for group in range(file.metadata.num_row_groups):
                table = file.read_row_group(group, columns=columns)
                step = max(1, CHUNK_BYTES * table.num_rows // max(1, table.nbytes))
                for start in range(0, table.num_rows, step):
                    yield table.slice(start, step)


def _rows(files: list[Path]) -> Iterator[Row]:
    for table in _tables(files):
        yield from table.to_pylist()


def _jsonl(folder: RunFolder, files: list[Path]) -> Iterator[bytes]:
    """One object a row, in the order and with the names of the columns; nulls are left out."""
    for row in _rows(files):
        yield orjson.dumps(_without_nulls(row), default=str, option=orjson.OPT_APPEND_NEWLINE)


def _without_nulls(value: Row) -> Row:
    kept: Row = {}
    for name, item in value.items():
        if isinstance(item, dict):
            item = _without_nulls(item) or None
        if item is not None:
            kept[name] = item
    return kept


def _csv(folder: RunFolder, files: list[Path]) -> Iterator[bytes]:
    """One line a row; `usage.prompt_tokens` and the like for nested fields, lists as JSON, nothing for null."""
    yield _csv_line(_flattened(pq.read_schema(files[0]).empty_table()).schema.names)
    for table in _tables(files):
        columns = [column.to_pylist() for column in _flattened(table).columns]
        for values in zip(*columns, strict=True):
            yield _csv_line([_cell(value) for value in values])


def _csv_line(cells: list[Any]) -> bytes:
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue().encode()


def _flattened(table: pa.Table) -> pa.Table:
    while any(pa.types.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    return table


def _cell(value: Any) -> Any:
    if isinstance(value, list | dict):
        return orjson.dumps(value, default=str).decode()
    return ("true" if value else "false") if isinstance(value, bool) else value


def _openai(folder: RunFolder, files: list[Path]) -> Iterator[bytes]:
    """One line a manifest row, whose samples become choices."""
    for _, samples in groupby(_rows(files), key=lambda row: row["row"]):
        line = openai_line(folder, list(samples))
        yield orjson.dumps(line, default=str, option=orjson.OPT_APPEND_NEWLINE)


FORMATS: dict[str, Callable[[RunFolder, list[Path]], Iterator[bytes]]] = {
    "openai-jsonl": _openai,
    "jsonl": _jsonl,
    "csv": _csv,
}
