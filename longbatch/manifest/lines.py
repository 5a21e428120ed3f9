"""JSON lines: one object a line, read as a stream or by byte offset."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterator
from io import BufferedReader
from typing import Any, NamedTuple

import orjson

from longbatch.core import Location
from longbatch.errors import RowError
from longbatch.manifest.fields import describe, not_finite
from longbatch.manifest.sources import Source
from longbatch.manifest.streams import BUFFER_BYTES, open_stream

_NEWLINE = 10


class Rejected(NamedTuple):
    """A row whose values cannot be used. values: what could be read all the same, to know its id."""

    error: RowError
    values: dict[str, Any]


class Record(NamedTuple):
    """One row as its file holds it. where: its place in the file, for messages."""

    location: Location
    where: str
    values: dict[str, Any] | Rejected


def read_lines(source: Source, index: int, max_row_bytes: int, max_expansion: int) -> Iterator[Record]:
    """Every row of a file, blank lines left out. Holds at most one line. Trouble becomes a Rejected row."""
    raw, stream = open_stream(source, max_expansion)
    limit = max_row_bytes + 1
    name = source.name
    number = offset = 0
    is_told = False
    with stream:
        while line := stream.readline(limit):
            number += 1
            size = len(line)
            values: dict[str, Any] | Rejected
            if line.isspace():
                offset += size
                continue
            if line[-1] == _NEWLINE:
                values = parse_line(line)
            elif size == limit:
                size += _skip_line(stream)
                message = f"the line has {size} bytes, and the limit is {max_row_bytes}; put long text into a file"
                values = Rejected(RowError("row_too_large", message), {})
            elif raw.error is not None:
                is_told = True
                values = Rejected(raw.error, {})
            else:
                values = parse_line(line)
            yield Record(Location(index, offset, size), f"{name}:{number}", values)
            offset += size
    if raw.error is not None and not is_told:
        yield Record(Location(index, offset, 0), f"{name}:{number + 1}", Rejected(raw.error, {}))


def parse_line(line: bytes) -> dict[str, Any] | Rejected:
    """The object on a line, or why there is none."""
    try:
        values = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return _diagnose(line, error)
    if type(values) is dict:
        return values
    mend = "; write one object a line, without an enclosing list" if isinstance(values, list) else ""
    error_ = RowError("invalid_type", f"a row must be a JSON object, got {describe(values)}{mend}")
    return Rejected(error_, {})


def _skip_line(stream: BufferedReader) -> int:
    """Passes over the rest of a line without keeping it."""
    num_bytes = 0
    while piece := stream.readline(BUFFER_BYTES):
        num_bytes += len(piece)
        if piece[-1] == _NEWLINE:
            break
    return num_bytes


def _diagnose(line: bytes, error: orjson.JSONDecodeError) -> dict[str, Any] | Rejected:
    """Says exactly why a line is not JSON, and saves what can be saved."""
    if line.startswith(codecs.BOM_UTF8):  # files put together by cat have one in the middle
        return parse_line(line.removeprefix(codecs.BOM_UTF8))
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return _reject("invalid_encoding", "the file is UTF-16; convert it: iconv -f UTF-16 -t UTF-8")
    if b"\0" in line:
        return _reject("invalid_json", "the line holds null bytes; the file is damaged, or in another encoding")
    try:
        line.decode()
    except UnicodeDecodeError as damage:
        message = f"the line is not UTF-8: byte 0x{line[damage.start]:02x} at offset {damage.start}"
        return _reject("invalid_encoding", message)
    try:
        values = json.loads(line)  # more lenient: it takes NaN and half surrogate pairs
    except (ValueError, RecursionError):
        stripped = line.strip()
        if stripped in (b"[", b"{"):
            return _reject("invalid_json", "JSON over several lines; write one object a line (jq -c '.[]' makes them)")
        if line[-1] != _NEWLINE and error.pos >= len(line.decode().rstrip()):
            return _reject("truncated_input", "the last line ends inside its JSON; the file was cut off")
        return _reject("invalid_json", f"not JSON: {error.msg} at character {error.pos}")
    if not isinstance(values, dict):
        return _reject("invalid_json", f"not JSON: {error.msg} at character {error.pos}")
    field = next((name for name, value in values.items() if _holds_nonfinite(value)), None)
    if field is not None:
        return Rejected(not_finite(field), values)
    return Rejected(RowError("invalid_encoding", "a \\u escape stands for half a surrogate pair"), values)


def _reject(kind: str, message: str) -> Rejected:
    return Rejected(RowError(kind, message), {})


def _holds_nonfinite(value: Any) -> bool:
    """Without recursion: json takes deeper nesting than Python's own calls."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, float) and not math.isfinite(item):
            return True
        if isinstance(item, dict):
            left += item.values()
        elif isinstance(item, list):
            left += item
    return False
