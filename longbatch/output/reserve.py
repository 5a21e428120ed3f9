"""Space set aside beforehand, given back when the disk is full, so that what is finished can still be written."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from longbatch.output.files import CHUNK, disk_errors

RESERVE_BYTES = 64 << 20


class Reserve:
    """A file that only takes up space. Its name makes `recover` remove it when its owner has died."""

    def __init__(self, folder: Path, size: int = RESERVE_BYTES) -> None:
        """Take the space. Raises DiskError if there is not enough; nothing is left behind then."""
        self._path = folder / ".reserve.tmp"
        try:
            with disk_errors(f"reserve {size >> 20} MiB in", folder), self._path.open("wb") as file:
                _allocate(file.fileno(), size)
        except BaseException:
            self.release()
            raise

    def release(self) -> bool:
        """Give the space back; False if that was done before."""
        with suppress(FileNotFoundError):
            os.unlink(self._path)
            return True
        return False


def _allocate(descriptor: int, size: int) -> None:
    allocate = getattr(os, "posix_fallocate", None)
    if allocate is not None:
        if size:
            allocate(descriptor, 0, size)
        return
    for start in range(0, size, CHUNK):  # macOS has no posix_fallocate
        os.write(descriptor, bytes(min(CHUNK, size - start)))
