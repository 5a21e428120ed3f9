"""The identity of a model folder, cheap enough to take at every start.

Two fine-tunes of a model agree in every name, shape and size, so the numbers must count too; but reading all of a
100 GB checkpoint takes minutes. Training touches every tensor nearly everywhere, so a few 4 KiB blocks of each
tensor tell checkpoints apart: 2 to 16 per tensor, about 64 MiB altogether, small tensors whole. What this can miss
is a change by hand of a few numbers inside a large tensor.
"""

from __future__ import annotations

import hashlib
import json
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from longbatch.models.checkpoint import StoredTensor, checkpoint_files, stored_tensors
from longbatch.models.registry import read_json, read_spec

_BLOCK = 4096
_TOTAL_BYTES = 64 * 2**20
# Keys of config.json that say where a model came from and not what it computes.
_PROVENANCE = ("transformers_version", "_name_or_path")


def hash_model(model_dir: Path) -> str:
    """blake2b (32 hex digits) over config.json, the end-of-text ids, and each tensor's name, dtype, shape and
    sampled bytes. Independent of sharding, folder name and file times. Raises `UsageError` like a load."""
    digest = hashlib.blake2b(digest_size=16)
    config = {key: value for key, value in read_json(model_dir / "config.json").items() if key not in _PROVENANCE}
    digest.update(json.dumps([config, read_spec(model_dir).eos_ids], sort_keys=True).encode())
    tensors = sorted(stored_tensors(checkpoint_files(model_dir)).values(), key=lambda tensor: tensor.name)
    blocks = min(16, max(2, _TOTAL_BYTES // _BLOCK // max(1, len(tensors))))
    samples: dict[str, bytes] = {}
    for file, own in groupby(sorted(tensors, key=lambda tensor: (tensor.file, tensor.start)), lambda t: t.file):
        with file.open("rb") as stream:
            for tensor in own:
                samples[tensor.name] = _sample(stream, tensor, blocks)
    for tensor in tensors:
        digest.update(json.dumps([tensor.name, tensor.dtype, tensor.shape]).encode())
        digest.update(samples[tensor.name])
    return digest.hexdigest()


def _sample(stream: BinaryIO, tensor: StoredTensor, blocks: int) -> bytes:
    """A 16-byte hash of the tensor's bytes: all of them, or `blocks` evenly spaced ones, both ends included."""
    digest = hashlib.blake2b(digest_size=16)
    size = tensor.stop - tensor.start
    if size <= blocks * _BLOCK:
        stream.seek(tensor.start)
        digest.update(stream.read(size))
        return digest.digest()
    for block in range(blocks):
        stream.seek(tensor.start + (size - _BLOCK) * block // (blocks - 1))
        digest.update(stream.read(_BLOCK))
    return digest.digest()
