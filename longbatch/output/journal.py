"""The journal: finished results on their way to a part, safe from the moment they are written.

A journal is an Arrow IPC stream with one envelope a write: `crc32`, and `payload`, which is itself an IPC
message. The first payload is the results' schema, every further one a record batch of it. The envelope makes
the checksum cover exactly the bytes that were written. A kill leaves at most a torn last envelope; what was
written before it is read back, and a payload whose checksum differs is left out.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import pyarrow as pa

from longbatch.output.files import fsync_folder

ENVELOPE = pa.schema([pa.field("crc32", pa.uint32()), pa.field("payload", pa.large_binary())])
CHECKSUM_SEED = 0x6C6F6E67


class Journal:
    """An open journal. One thread of one process writes it; every method raises OSError when the disk refuses."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        """Create the file, which must not exist (FileExistsError), with the schema in it."""
        self.path = path
        self.schema = schema
        self.size = 0
        self.num_rows = 0
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "wb", buffering=0)
        try:
            # The stream writer fills a buffer that is emptied into the file, so that a write that the disk
            # refuses half-way can be cut off and made again.
            self._buffer = pa.BufferOutputStream()
            self._put(ENVELOPE.serialize().to_pybytes() + _envelope(schema.serialize()))
            fsync_folder(path.parent)
        except BaseException:
            self._file.close()
            path.unlink()
            raise

    def append(self, batch: pa.RecordBatch) -> None:
        """Write a batch of the journal's schema; it survives a kill of this process when this returns."""
        self._put(_envelope(batch.serialize()))
        self.num_rows += batch.num_rows

    def sync(self) -> None:
        """Wait until everything appended is on the disk, so that it survives a power cut too."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; the journal stays until its part is published."""
        self._file.close()

    def _put(self, content: bytes) -> None:
        view = memoryview(content)
        written = 0
        try:
            while written < len(view):
                written += self._file.write(view[written:])
        except OSError:
            self._file.truncate(self.size)
            self._file.seek(self.size)
            raise
        self.size += len(view)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _envelope(payload: pa.Buffer) -> bytes:
    """One IPC message that holds the payload and its checksum."""
    offsets = pa.py_buffer(len(payload).to_bytes(8, "little").rjust(16, b"\0"))
    column = pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, payload])
    checksum = pa.array([_checksum(payload)], pa.uint32())
    message: bytes = pa.RecordBatch.from_arrays([checksum, column], schema=ENVELOPE).serialize().to_pybytes()
    return message


@dataclass(slots=True)
class JournalReport:
    """What reading a journal found. torn: bytes after the last whole envelope (normal after a kill).

    num_damaged: envelopes whose content does not match its checksum, or cannot be read.
    """

    num_rows: int = 0
    torn: int = 0
    num_damaged: int = 0


class JournalReader:
    """Reads what is valid in a journal, whether its writer lives or not; `report` is complete after `batches`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.report = JournalReport()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The record batches whose checksums match, in the order of writing.

        Raises FileNotFoundError if the journal has been published meanwhile.
        """
        schema: pa.Schema | None = None
        for payload in self._payloads():
            if schema is None:
                schema = pa.ipc.read_schema(payload)
                continue
            batch = pa.ipc.read_record_batch(payload, schema)
            self.report.num_rows += batch.num_rows
            yield batch

    def _payloads(self) -> Iterator[pa.Buffer]:
        content = pa.py_buffer(self.path.read_bytes())
        stream = pa.BufferReader(content)
        valid = 0
        try:
            reader = pa.ipc.open_stream(stream)
            if reader.schema != ENVELOPE:
                raise pa.ArrowInvalid("not a journal")
            valid = stream.tell()
            first = True
            while True:
                envelope = reader.read_next_batch()
                valid = stream.tell()
                payload = _checked(envelope)
                if payload is not None:
                    yield payload
                else:
                    self.report.num_damaged += 1
                    if first:  # without the schema nothing after it can be read
                        return
                first = False
        except (StopIteration, pa.ArrowException, OSError):
            self.report.torn = len(content) - valid


def _checked(envelope: pa.RecordBatch) -> pa.Buffer | None:
    """The payload of an envelope, None if it is not what was written."""
    try:
        envelope.validate(full=True)
    except pa.ArrowInvalid:
        return None
    if envelope.num_rows != 1 or envelope.column(0).null_count or envelope.column(1).null_count:
        return None
    payload = envelope.column(1)[0].as_buffer()
    return payload if _checksum(payload) == envelope.column(0)[0].as_py() else None


def _checksum(payload: pa.Buffer) -> int:
    """crc32 from a start value other than 0, with which no bytes at all would match a checksum of zeros."""
    return zlib.crc32(payload, (len(payload) ^ CHECKSUM_SEED) & 0xFFFFFFFF)
