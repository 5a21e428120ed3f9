"""Writing files so that a reader sees a whole file or none, even after a kill or a power cut."""

from __future__ import annotations

import errno
import io
import json
import os
import secrets
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from longbatch.errors import DiskError

NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
CHUNK = 1 << 20


@contextmanager
def disk_errors(what: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `DiskError` that says what could not be done, where, and what would help."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        hint = "free some space and run the same command again" if error.errno in FULL else None
        raise DiskError(f"cannot {what} {path}: {reason}", hint=hint) from error


def is_full(error: BaseException) -> bool:
    """Whether a `DiskError` means that there is no space left."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL


def fsync_folder(folder: Path) -> None:
    """Make the folder's entries durable. Some network file systems refuse fsync on a folder, and need none."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def publish(temporary: Path, final: Path) -> None:
    """Give a complete, synced file its final name, durably; raise `FileExistsError` if the name is taken.

    A hard link never overwrites, which rename does; rename serves only where links are not supported.
    """
    try:
        os.link(temporary, final)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if final.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final)) from None
        os.rename(temporary, final)
    else:
        os.unlink(temporary)
    fsync_folder(final.parent)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def temporary_path(final: Path, folder: Path | None = None) -> Path:
    """A name that no process on any host uses, beside `final` or in another folder of the same file system.

    The dot makes dataset readers skip the file.
    """
    return (folder or final.parent) / f".{final.name}.{secrets.token_hex(4)}.tmp"


def replace_file(path: Path, content: bytes) -> None:
    """Write a file durably in place of the old one, if there is one."""
    temporary = temporary_path(path)
    try:
        write_synced(temporary, content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def as_json(value: dict[str, Any]) -> bytes:
    """JSON for people to read."""
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"


def file_checksum(path: Path) -> int:
    """crc32 of the whole file."""
    checksum = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


class ChecksummedFile(io.RawIOBase):
    """A write-only file that keeps the crc32 and the size of what was written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file: IO[bytes] = path.open("xb", buffering=0)
        self.checksum = 0
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.checksum = zlib.crc32(view, self.checksum)
        self.size += len(view)
        written = 0
        while written < len(view):
            written += self._file.write(view[written:])
        return len(view)

    def tell(self) -> int:
        return self.size

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        super().close()
