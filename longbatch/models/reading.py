"""Checkpoint tensors out of their files, one weight at a time: as stored, dequantized, with an adapter's update."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from longbatch.errors import DiskError, UsageError
from longbatch.models.adapter import Update
from longbatch.models.checkpoint import StoredTensor
from longbatch.models.matching import Match
from longbatch.models.quantized import Scheme

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


class Files(Protocol):
    """Open checkpoint files."""

    def read(self, stored: StoredTensor, into: Tensor | None = None) -> Tensor:
        """A tensor as it is stored, on the CPU. into: contiguous and of its shape; may be filled with the numbers and
        returned, where it has their type."""


def read_weights(
    matches: Iterable[Match],
    scheme: Scheme | None,
    updates: Mapping[str, Update],
    device: torch.device,
    files: Files,
    into: Callable[[Match], Tensor | None] = lambda match: None,
) -> Iterator[tuple[Match, Tensor]]:
    """Every match with its numbers, in the order of the files. into: where those of a match may be put, see `Files`;
    asked for such as are taken as they are stored. What is computed is so on the device, in float32: a
    quantized weight takes a few times its own size there for as long as it is asked for.

    Raises `UsageError` naming a quantized weight whose stored numbers are odd.
    """
    for match in sorted(matches, key=lambda match: (match.first.file, match.first.start)):
        update = updates.get(match.source.name)
        if scheme is not None and match.quantized:
            weight = _dequantized(match, scheme, files, device)
        else:
            weight = files.read(match.first, into(match) if update is None else None)
        if update is not None:
            weight = weight.to(device, torch.float32, copy=True)
            a, b = (files.read(part).to(device, torch.float32) for part in (update.a, update.b))
            weight.addmm_(b, a, alpha=update.scale)
        yield match, weight


class MappedFiles:
    """Files that are read once: mapped, each opened once, as parts of one weight may lie in several."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> MappedFiles:
        return self

    def __exit__(self, *fault: object) -> None:
        self._stack.close()

    def read(self, stored: StoredTensor, into: Tensor | None = None) -> Tensor:
        """The tensor as it is stored, on the CPU: the file's own pages."""
        if stored.file not in self._open:
            self._open[stored.file] = self._stack.enter_context(safe_open(stored.file, framework="pt", device="cpu"))
        tensor: Tensor = self._open[stored.file].get_tensor(stored.name)
        return tensor


class KeptFiles:
    """Files that are read again and again while a run goes on. They stay open, so that one that is deleted or replaced
    is still what it was; and they are read and not mapped, as a mapped file that is cut short kills the process that
    looks at it. Raises `DiskError` for one that cannot be opened or read or was changed."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._open: dict[Path, FileIO] = {}
        self._looked: dict[Path, tuple[int, int]] = {}
        for path in paths:
            with _weights_of(path):
                self._open[path] = FileIO(path)
                weakref.finalize(self, self._open[path].close)
                self._looked[path] = self._look(path)

    def read(self, stored: StoredTensor, into: Tensor | None = None) -> Tensor:
        """See `Files`. By one thread at a time."""
        if into is not None and into.dtype == _TYPES[stored.dtype]:
            data = into.view(-1).view(torch.uint8)
        else:
            data = torch.empty(stored.stop - stored.start, dtype=torch.uint8)
        left, file = data.numpy().data, self._open[stored.file]
        with _weights_of(stored.file):
            file.seek(stored.start)
            while len(left):
                num_read = file.readinto(left)
                if not num_read:
                    raise _changed(stored.file)
                left = left[num_read:]
        return data.view(_TYPES[stored.dtype]).view(stored.shape)

    def check(self, paths: Iterable[Path]) -> None:
        """Raise `DiskError` if one of the files is not what it was when it was opened."""
        for path in paths:
            with _weights_of(path):
                if self._look(path) != self._looked[path]:
                    raise _changed(path)

    def _look(self, path: Path) -> tuple[int, int]:
        facts = os.fstat(self._open[path].fileno())
        return facts.st_size, facts.st_mtime_ns


@contextmanager
def _weights_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"the weights in {path} cannot be read: {error.strerror or error}",
            hint="with --weights disk the model's files are needed until the run ends",
        ) from error


def _changed(path: Path) -> DiskError:
    return DiskError(
        f"the weights in {path} were changed or cut short while the run reads them",
        hint="bring the model's files back and run the same command again, or keep the weights with --weights host",
    )


def _dequantized(match: Match, scheme: Scheme, files: Files, device: torch.device) -> Tensor:
    out, inputs = match.source.shape
    try:
        return scheme.weight(
            {name: files.read(stored).to(device) for name, stored in match.parts.items()}, (out, inputs)
        )
    except ValueError as error:
        raise UsageError(f"{match.source.name} cannot be dequantized ({scheme.title}): {error}") from None
