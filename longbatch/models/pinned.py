"""Host memory that a GPU copies from and to while both go on computing."""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor

from longbatch.errors import DeviceError


class HostMemory:
    """Buffers of bytes in host memory, page-locked where the device is a GPU, for as long as this lives.

    They are locked where they are: torch's own pinned memory comes in powers of two, and a layer of 1.1 GiB would take
    two.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._locked: list[Tensor] = []
        if device.type == "cuda":
            # A process that ends lets go of everything by itself.
            weakref.finalize(self, _unlock, self._locked).atexit = False

    def empty(self, num_bytes: int) -> Tensor:
        """A buffer of so many bytes, uint8, without values yet. Raises DeviceError where it cannot be had."""
        try:
            return self._empty(num_bytes)
        except RuntimeError as error:
            raise DeviceError(
                f"{num_bytes:,} bytes of host memory cannot be had or page-locked: {str(error).splitlines()[0]}",
                hint="raise the limits of the job's memory and of locked memory (ulimit -l), or use --weights disk",
            ) from error

    def _empty(self, num_bytes: int) -> Tensor:
        # Whole pages of its own: a page can be locked once.
        page = mmap.PAGESIZE
        size = -(-num_bytes // page) * page
        buffer = torch.empty(size + page, dtype=torch.uint8)
        buffer = buffer[-buffer.data_ptr() % page :][:size]
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                torch.cuda.check_error(int(runtime.cudaHostRegister(buffer.data_ptr(), size, 0)))
            self._locked.append(buffer)
        return buffer[:num_bytes]


def _unlock(locked: list[Tensor]) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for buffer in locked:
        runtime.cudaHostUnregister(buffer.data_ptr())
    locked.clear()
