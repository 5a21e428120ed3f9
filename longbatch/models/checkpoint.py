"""The safetensors files of a model folder: which there are, and what their headers say. Torch-free.

A safetensors file is 8 bytes of header length (little-endian), a JSON header {name: {dtype, shape, data_offsets}},
and the numbers. Only this format is read: pickled checkpoints can run code when they are opened.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from longbatch.errors import UsageError
from longbatch.models.registry import read_json

FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_BYTES = {**FLOAT_BYTES, "F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. dtype: safetensors' name, such as BF16. start, stop: byte range in the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def checkpoint_files(model_dir: Path) -> tuple[Path, ...]:
    """The weight files of a model folder: those of the index, else the single file.

    Raises `UsageError` naming files that are absent, and for folders that hold only other formats.
    """
    if (model_dir / _INDEX).is_file():
        weight_map = read_json(model_dir / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UsageError(f"{model_dir / _INDEX} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise UsageError(f"{model_dir / _INDEX} names files outside the folder: {', '.join(outside)}")
        missing = [name for name in names if not (model_dir / name).is_file()]
        if missing:
            raise UsageError(
                f"{model_dir} lacks weight files: {', '.join(missing)}", hint="download the model again to complete it"
            )
        return tuple(model_dir / name for name in names)
    if (model_dir / _SINGLE).is_file():
        return (model_dir / _SINGLE,)
    raise UsageError(f"{model_dir} has neither {_SINGLE} nor {_INDEX}", hint=_other_formats(model_dir))


def _other_formats(model_dir: Path) -> str:
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in model_dir.glob(pattern))
    if pickled:
        return (
            f"{pickled[0]} is a pickle and is never opened; get the model's safetensors, or a GGUF file of it and run "
            "`longbatch convert FILE DIR`"
        )
    if any(model_dir.glob("*.gguf")):
        return "run `longbatch convert FILE DIR` on the GGUF file"
    return "download the model's safetensors files"


def stored_tensors(files: tuple[Path, ...]) -> dict[str, StoredTensor]:
    """Every tensor of the files by name. Raises `UsageError` for a damaged header or a tensor stored twice."""
    found: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in _header(file):
            if tensor.name in found:
                raise UsageError(f"tensor {tensor.name} is in both {found[tensor.name].file.name} and {file.name}")
            found[tensor.name] = tensor
    return found


def _header(file: Path) -> list[StoredTensor]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise UsageError(f"{file} is not a safetensors file, or was cut short")
            entries = json.loads(stream.read(length))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    if not isinstance(entries, dict):
        raise UsageError(f"{file} is not a safetensors file")
    base = 8 + length
    return [_entry(file, name, entry, base, size) for name, entry in entries.items() if name != "__metadata__"]


def _entry(file: Path, name: str, entry: Any, base: int, size: int) -> StoredTensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(extent) for extent in entry["shape"])
        start, stop = (base + int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"{file}: the header entry of {name} is damaged") from None
    if min(shape, default=0) < 0 or not base <= start <= stop:
        raise UsageError(f"{file}: the header entry of {name} is damaged")
    if stop > size:
        raise UsageError(f"{file} was cut short: {name} ends at byte {stop:,} of {size:,}")
    if dtype in _BYTES and prod(shape) * _BYTES[dtype] != stop - start:
        raise UsageError(f"{file}: {name} has {stop - start:,} bytes, its shape {list(shape)} in {dtype} needs others")
    return StoredTensor(name, file, dtype, shape, start, stop)
