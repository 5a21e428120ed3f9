"""Reading a GGUF file without trusting it: header, metadata and tensor directory, then rows of tensors.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, two counts, key-value
pairs, tensor directory, padding, tensor data. Every count is checked against the bytes that are left before
anything is allocated for it, so a damaged file costs no more time or memory than its own size.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

Scalar: TypeAlias = str | int | float | bool
Value: TypeAlias = Scalar | list[Any]

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_UINT32, _UINT64 = _SCALARS[4], _SCALARS[10]

# Far above any published model: 2,000 tensors, 300,000 tokens, templates of 30 KB, 5 dimensions at most.
_MAX_ENTRIES = 100_000
_MAX_ARRAY = 16_000_000
_MAX_STRING = 16 * 1024 * 1024
_MAX_DIMENSIONS = 4
_CHUNK_VALUES = 8 * 1024 * 1024


class GgufError(Exception):
    """The file is damaged, or of a kind that cannot be converted; the message says which."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor directory. shape: slowest dimension first, as numpy counts. offset: of the data,
    in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """Rows of the tensor seen as a matrix [num_rows, shape[-1]]; 1 for a vector."""
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The directory of a GGUF file. Raises `GgufError` from `open` and from every getter."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Reads everything but the tensor data."""
        # Non-blocking, so that a named pipe is refused instead of waited for.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=1 << 20) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise GgufError("it is not a regular file")
            return _read_directory(path, _Cursor(file, status.st_size))

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, value, "an integer")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer below 2^31."""
        value = self.integer(key, default)
        if not 0 < value < 1 << 31:
            raise GgufError(f"its metadata key {key} is {value}, which is no possible size")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number. A 32-bit float comes back as its shortest decimal: 1e-05, not 9.999999747e-06."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise self._wrong(key, value, "a finite number")
        short = float(str(np.float32(value)))
        return short if np.float32(short) == np.float32(value) else float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def array(self, key: str, kind: type[Scalar]) -> list[Any]:
        """A list of values of one kind: str, int or float."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self._wrong(key, value, f"an array of {kind.__name__}")
        return value

    def rows(
        self, tensor: GgufTensor, start: int = 0, stop: int | None = None, step: int = 1
    ) -> Iterator[NDArray[np.float32]]:
        """Rows start to stop of a tensor as float32 [n, shape[-1]], in chunks of at most 32 MiB, each but the
        last a multiple of `step` rows (which may make it larger). Raises `GgufError` for NaN and infinity."""
        stop = tensor.num_rows if stop is None else stop
        columns = tensor.shape[-1]
        row_bytes = tensor.num_bytes // tensor.num_rows
        rows = max(step, _CHUNK_VALUES // columns // step * step)
        with self.path.open("rb") as file:
            file.seek(tensor.offset + start * row_bytes)
            for first in range(start, stop, rows):
                count = min(rows, stop - first)
                data = file.read(count * row_bytes)
                if len(data) < count * row_bytes:
                    raise GgufError("it was shortened while it was read")
                packed = np.frombuffer(data, dtype=np.uint8).reshape(count, row_bytes)
                values = np.asarray(dequantize(packed, tensor.type), dtype=np.float32).reshape(count, columns)
                if not np.isfinite(values).all():
                    raise GgufError(f"its tensor {tensor.name} holds NaN or infinity")
                yield values

    @staticmethod
    def _wrong(key: str, value: Value | None, wanted: str) -> GgufError:
        if value is None:
            return GgufError(f"its metadata key {key} is missing")
        return GgufError(f"its metadata key {key} is not {wanted}")


class _Cursor:
    """Reads forward through a file of known size and refuses to read past its end."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self.size = size
        self.position = 0

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.position:
            raise GgufError(f"it ends inside {what}: it is truncated or damaged")
        data = self._file.read(count)
        if len(data) < count:
            raise GgufError("it was shortened while it was read")
        self.position += count
        return data

    def uint32(self, what: str) -> int:
        value: int = _UINT32.unpack(self.take(4, what))[0]
        return value

    def uint64(self, what: str) -> int:
        value: int = _UINT64.unpack(self.take(8, what))[0]
        return value

    def count(self, what: str, limit: int, bytes_each: int) -> int:
        """A count of things that take at least bytes_each bytes of the file each."""
        value = self.uint64(what)
        if value > limit or value * bytes_each > self.size - self.position:
            raise GgufError(f"it announces {value} {what}, which its size rules out: it is truncated or damaged")
        return value

    def text(self, what: str) -> str:
        length = self.uint64(what)
        if length > _MAX_STRING:
            raise GgufError(f"it announces a string of {length} bytes for {what}: it is damaged")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise GgufError(f"it holds bytes that are not UTF-8 in {what}: it is damaged") from error


def _read_directory(path: Path, cursor: _Cursor) -> GgufFile:
    magic = cursor.take(4, "the magic number")
    if magic != b"GGUF":
        raise GgufError("it does not start with the GGUF magic number")
    version = cursor.uint32("the version")
    if version not in (2, 3):
        big_endian = version & 0xFFFF == 0
        raise GgufError("it is a big-endian GGUF file" if big_endian else f"its GGUF version {version} is not 2 or 3")
    num_tensors = cursor.count("tensors", _MAX_ENTRIES, 24)
    num_keys = cursor.count("metadata keys", _MAX_ENTRIES, 13)
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise GgufError(f"it has the metadata key {key[:80]} twice: it is damaged")
        metadata[key] = _read_value(cursor, cursor.uint32("a metadata type"), f"the metadata key {key[:80]}")
    entries = [_read_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise GgufError("its metadata key general.alignment is not a power of two")
    start = -(-cursor.position // alignment) * alignment
    return GgufFile(path, metadata, _place(entries, start, cursor.size))


def _read_value(cursor: _Cursor, kind: int, what: str) -> Value:
    if kind == _STRING:
        return cursor.text(what)
    if kind != _ARRAY:
        scalar = _scalar(kind, what)
        value: Scalar = scalar.unpack(cursor.take(scalar.size, what))[0]
        return value
    item = cursor.uint32(what)
    if item == _STRING:
        return [cursor.text(what) for _ in range(cursor.count(f"strings in {what}", _MAX_ARRAY, 8))]
    scalar = _scalar(item, what)
    count = cursor.count(f"values in {what}", _MAX_ARRAY, scalar.size)
    return [value for (value,) in scalar.iter_unpack(cursor.take(count * scalar.size, what))]


def _scalar(kind: int, what: str) -> struct.Struct:
    if kind not in _SCALARS:
        raise GgufError(f"it holds a value of the unknown type {kind} in {what}: it is damaged")
    return _SCALARS[kind]


def _read_entry(cursor: _Cursor) -> GgufTensor:
    """A tensor directory entry whose offset still counts from the start of the data section."""
    name = cursor.text("a tensor name")
    what = f"the directory entry of tensor {name[:80]}"
    num_dimensions = cursor.uint32(what)
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise GgufError(f"its tensor {name[:80]} has {num_dimensions} dimensions: it is damaged")
    shape = tuple(reversed([cursor.uint64(what) for _ in range(num_dimensions)]))
    number, offset = cursor.uint32(what), cursor.uint64(what)
    try:
        kind = GGMLQuantizationType(number)
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise GgufError(f"its tensor {name[:80]} has the unknown quantization type {number}") from error
    num_values = 1
    for size in shape:
        num_values *= size
    if num_values == 0 or shape[-1] % block_values:
        raise GgufError(f"its tensor {name[:80]} has the shape {list(shape)}, which {kind.name} does not allow")
    return GgufTensor(name, shape, kind, offset, num_values // block_values * block_bytes)


def _place(entries: list[GgufTensor], start: int, file_size: int) -> dict[str, GgufTensor]:
    """The directory by name, with offsets from the start of the file, after checking that all data lie inside
    the file and nothing is stored twice (small overlapping tensors could unfold into any amount of data)."""
    end = start
    placed: dict[str, GgufTensor] = {}
    for entry in sorted(entries, key=lambda entry: entry.offset):
        offset = start + entry.offset
        if offset < end:
            raise GgufError(f"its tensor {entry.name[:80]} overlaps another one: it is damaged")
        end = offset + entry.num_bytes
        if end > file_size:
            raise GgufError(f"it ends inside the data of tensor {entry.name[:80]}: it is truncated or damaged")
        if entry.name in placed:
            raise GgufError(f"it has the tensor {entry.name[:80]} twice: it is damaged")
        placed[entry.name] = GgufTensor(entry.name, entry.shape, entry.type, offset, entry.num_bytes)
    return placed
