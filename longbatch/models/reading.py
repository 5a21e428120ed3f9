"""Checkpoint tensors out of their files, one weight at a time: as stored, dequantized, with an adapter's update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from longbatch.errors import UsageError
from longbatch.models.adapter import Update
from longbatch.models.checkpoint import StoredTensor
from longbatch.models.matching import Match
from longbatch.models.quantized import Scheme


def read_weights(
    matches: list[Match], scheme: Scheme | None, updates: Mapping[str, Update], device: torch.device
) -> Iterator[tuple[Match, Tensor]]:
    """Every match with its numbers, in the order of the files. What is computed is so on the device, in float32: a
    quantized weight takes a few times its own size there for as long as it is asked for.

    Raises `UsageError` naming a quantized weight whose stored numbers are odd.
    """
    with ExitStack() as stack:
        readers = _Readers(stack)
        for match in sorted(matches, key=lambda match: (match.first.file, match.first.start)):
            update = updates.get(match.source.name)
            if scheme is not None and match.quantized:
                weight = _dequantized(match, scheme, readers, device)
            else:
                weight = readers.read(match.first)
            if update is not None:
                weight = weight.to(device, torch.float32, copy=True)
                a, b = (readers.read(part).to(device, torch.float32) for part in (update.a, update.b))
                weight.addmm_(b, a, alpha=update.scale)
            yield match, weight


class _Readers:
    """The files that are open, each opened once: parts of one weight may lie in several."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._open: dict[Path, Any] = {}

    def read(self, stored: StoredTensor) -> Tensor:
        """The tensor as it is stored, on the CPU."""
        if stored.file not in self._open:
            self._open[stored.file] = self._stack.enter_context(safe_open(stored.file, framework="pt", device="cpu"))
        tensor: Tensor = self._open[stored.file].get_tensor(stored.name)
        return tensor


def _dequantized(match: Match, scheme: Scheme, readers: _Readers, device: torch.device) -> Tensor:
    out, inputs = match.source.shape
    try:
        return scheme.weight(
            {name: readers.read(stored).to(device) for name, stored in match.parts.items()}, (out, inputs)
        )
    except ValueError as error:
        raise UsageError(f"{match.source.name} cannot be dequantized ({scheme.title}): {error}") from None
