"""The most bytes that tensors hold at once: by the allocator on a GPU, elsewhere by watching every operation.

What is watched are storages: each counts from the operation that makes or first uses it until nothing refers to it.
What operations allocate inside themselves is not seen; on a GPU it is.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Watch(Protocol):
    """What is being watched."""

    def reset(self) -> None:
        """Forget the peak so far: it begins with what is held now."""

    @property
    def peak(self) -> int:
        """The most bytes since then."""


class LiveBytes(TorchDispatchMode):
    """See `Watch`; for tensors of one device that are first used while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def reset(self) -> None:
        """See `Watch`."""
        self._forget()
        self.peak = self._now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs))
        found = func(*args, **(kwargs or {}))
        self._note(found)
        self._forget()
        self.peak = max(self.peak, self._now)
        return found

    def _note(self, tensors: Any) -> None:
        for tensor in tree_iter(tensors):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            place, num_bytes = storage._cdata, storage.nbytes()
            if place in self._live and not self._is_gone(place):
                continue
            # The place of a storage that is gone may be another one's by now.
            self._drop(place)
            self._live[place] = StorageWeakRef(storage), num_bytes  # type: ignore[no-untyped-call]
            self._now += num_bytes

    def _forget(self) -> None:
        for place in [place for place in self._live if self._is_gone(place)]:
            self._drop(place)

    def _is_gone(self, place: int) -> bool:
        return bool(self._live[place][0].expired())  # type: ignore[no-untyped-call]

    def _drop(self, place: int) -> None:
        if place in self._live:
            self._now -= self._live.pop(place)[1]


class Allocated:
    """See `Watch`; by CUDA's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        """See `Watch`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def peak(self) -> int:
        """See `Watch`."""
        return int(torch.cuda.max_memory_allocated(self._device))


@contextmanager
def watched(device: torch.device) -> Iterator[Watch]:
    """Watch what a device's tensors take from now on."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        yield Allocated(device)
        return
    with LiveBytes() as live:
        yield live
