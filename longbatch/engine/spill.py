"""Spilled rows: after each chunk of a long prefill its K/V go to the disk, and a restart goes on from there.

    FOLDER/<key digest>-<content fingerprint>/chunk-<n>.safetensors

A file holds K and V of positions start..stop-1 of every layer, as they are stored, and what the row's reader has made
of the positions before `stop`. Its header says what the numbers belong to; its last tensor is the checksum of all
that comes before. A file that is torn, damaged or another row's is removed, and the row goes on from the last chunk
before it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
import zlib
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longbatch.attention import Step
from longbatch.cache import KVCache
from longbatch.core import Request, Result
from longbatch.engine.jobs import Owner
from longbatch.engine.packing import Family
from longbatch.engine.readout import Reader
from longbatch.output.files import CHUNK, ChecksummedFile, fsync_folder, temporary_path
from longbatch.output.keys import digest_of, padded_fingerprint

_FORMAT = "longbatch chunk 1"
_CHECKSUM = "checksum"
_CHECKSUM_BYTES = 4
_READER = "reader."
_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
_log = logging.getLogger(__name__)


class Spill:
    """The folder in which an engine keeps its long rows. model: hash of the weights that K/V come from."""

    def __init__(self, folder: Path, model: str) -> None:
        self._folder = folder
        self._model = model

    def row(self, family: Family[Owner], cache: KVCache) -> SpilledRow:
        """The state of a row that is about to be prefilled; what an older version of the row left is removed."""
        sequence = family.branches[0].owner.sequence
        folder = self.folder_of(sequence.request)
        for other in self._folder.glob(f"{folder.name.partition('-')[0]}-*"):
            if other != folder:
                _delete(other)
        return SpilledRow(folder, family, cache, self._model)

    def folder_of(self, source: Request | Result) -> Path:
        """Where a row keeps its state, if it does."""
        return self._folder / f"{digest_of(source).hex()}-{padded_fingerprint(source.fingerprint).hex()}"

    def remove(self, folder: Path) -> None:
        """Remove a row's state: its result is safe."""
        _delete(folder)

    def close(self) -> None:
        """Remove the folder itself if nothing is left in it."""
        with suppress(OSError):
            self._folder.rmdir()


class SpilledRow:
    """One row's chunks: `resume` once, then `save` after every step."""

    def __init__(self, folder: Path, family: Family[Owner], cache: KVCache, model: str) -> None:
        branch = family.branches[0]
        # Of several branches only their trunk is kept, and nobody reads it.
        self._reader: Reader | None = None if len(family.trunk) else branch.owner.reader
        self._pages = family.trunk_pages if len(family.trunk) else branch.pages
        self._executed = family.trunk_executed if len(family.trunk) else branch.executed
        # At least one token follows what is kept: the one whose hidden state tells the answer.
        self._most = len(family.trunk) or len(branch.ids) - 1
        self._folder, self._cache = folder, cache
        self._owner = {
            "format": _FORMAT,
            "model": model,
            "content": _content(family),
            "dtype": str(cache.dtype),
            "kv": cache.kv.name,
        }
        self._num_chunks = self._position = 0
        self._failed = False

    def resume(self) -> int:
        """Load the chunks that are whole into the row's pages: how many tokens need not be prefilled again."""
        while self._load(self._path(self._num_chunks)):
            self._num_chunks += 1
        kept = {self._path(number).name for number in range(self._num_chunks)}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path.name not in kept:
                _delete(path)
        return self._position

    def save(self, step: Step) -> None:
        """Keep what a step has added, unless the prefill ends with it. A disk that refuses costs the row nothing."""
        segment = step.segments[0]
        if len(step.segments) > 1 or segment.offset != self._position or segment.stop > self._most or self._failed:
            return
        path = self._path(self._num_chunks)
        temporary = temporary_path(path)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with ChecksummedFile(temporary) as file:
                self._write(file, segment.stop)
                file.sync()
            os.replace(temporary, path)
            fsync_folder(self._folder)
        except OSError as error:
            _log.warning("a row's state cannot be kept in %s: %s", self._folder.parent, error.strerror)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._failed = True
            return
        self._num_chunks, self._position = self._num_chunks + 1, segment.stop

    def _path(self, number: int) -> Path:
        return self._folder / f"chunk-{number}.safetensors"

    def _write(self, file: ChecksummedFile, stop: int) -> None:
        """One layer at a time, so that a chunk is never in memory twice."""
        state = {} if self._reader is None else self._reader.state()
        assert self._pages is not None
        layers, where = range(len(self._cache.keys)), (self._pages, self._position, stop)
        entries = [entry for layer in layers for entry in self._cache.described(layer, *where)]
        entries += [(_READER + name, tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()]
        facts = {"start": str(self._position), "stop": str(stop)}
        if self._executed is not None:
            facts |= {"selected": repr(float(self._executed.selected)), "causal": repr(self._executed.causal)}
        file.write(_header(entries, {**self._owner, **facts}))
        for layer in layers:
            for tensor in self._cache.stored(layer, *where).values():
                file.write(_bytes(tensor))
        for tensor in state.values():
            if tensor.numel():
                file.write(_bytes(tensor))
        file.write(struct.pack("<I", file.checksum))

    def _load(self, path: Path) -> bool:
        """Take a chunk over if it is whole and goes on where the row stands."""
        try:
            if not _is_whole(path):
                return False
            with safe_open(path, framework="pt") as file:
                found = dict(file.metadata() or {})
                start, stop = int(found.pop("start")), int(found.pop("stop"))
                selected, causal = float(found.pop("selected", 0.0)), float(found.pop("causal", 0.0))
                if found != self._owner or start != self._position or not start < stop <= self._most:
                    return False
                names = set(file.keys())
                assert self._pages is not None
                for layer in range(len(self._cache.keys)):
                    described = self._cache.described(layer, self._pages, start, stop)
                    tensors = {name: file.get_tensor(name) for name, _, _ in described}
                    self._cache.restore(layer, self._pages, start, stop, tensors)
                if self._reader is not None:
                    tensors = {n.removeprefix(_READER): file.get_tensor(n) for n in names if n.startswith(_READER)}
                    self._reader.restore(tensors)
        except (OSError, ValueError, KeyError, SafetensorError):
            return False
        if self._executed is not None:
            self._executed.selected, self._executed.causal = selected, causal
        self._position = stop
        return True


def _content(family: Family[Owner]) -> str:
    """A hash of everything in the row that its K/V and its readers depend on."""
    sequence, branch = family.branches[0].owner.sequence, family.branches[0]
    digest = blake2b(sequence.prompt.ids.tobytes(), digest_size=16)
    request = sequence.request
    facts = (request.task.name, request.pooling, request.sampling.logprobs, branch.reads, branch.rope_length)
    digest.update(repr((facts, len(family.trunk))).encode())
    return digest.hexdigest()


def _header(entries: list[tuple[str, torch.dtype, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """The beginning of a safetensors file with these tensors in this order, and the checksum after them."""
    content: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for name, dtype, shape in entries:
        size = dtype.itemsize * torch.Size(shape).numel()
        content[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": (at, at + size)}
        at += size
    content[_CHECKSUM] = {"dtype": "U8", "shape": (_CHECKSUM_BYTES,), "data_offsets": (at, at + _CHECKSUM_BYTES)}
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes(tensor: Tensor) -> np.ndarray:
    """A tensor's numbers as uint8, in order."""
    numbers: np.ndarray = tensor.contiguous().cpu().view(torch.uint8).numpy()
    return numbers


def _is_whole(path: Path) -> bool:
    """Whether a file ends with the checksum of what comes before."""
    checksum, left = 0, path.stat().st_size - _CHECKSUM_BYTES
    with path.open("rb", buffering=0) as file:
        while left > 0 and (part := file.read(min(CHUNK, left))):
            checksum = zlib.crc32(part, checksum)
            left -= len(part)
        return left == 0 and file.read() == struct.pack("<I", checksum)


def _delete(path: Path) -> None:
    """Remove a file or a folder, if it is there and lets itself be removed."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
