"""Bytes of one source, decompressed on the way, with a cap on how far they may expand."""

from __future__ import annotations

import io
import zlib
from typing import BinaryIO, Protocol

from longbatch.errors import RowError
from longbatch.manifest.sources import Source

BUFFER_BYTES = 1 << 20
# An expansion ratio means little before this many bytes.
FREE_BYTES = 16 << 20
_PIECE_BYTES = 16 << 10
# zstd's decompressor cannot be told to stop, and 4 bytes of input may become 128 KiB.
_ZSTD_PIECE_BYTES = 1 << 10


class _DamageError(Exception):
    """The compressed data is not what its format allows."""


class _Decoder(Protocol):
    def read(self, size: int) -> bytes:
        """The next decompressed bytes, at most `size`; b"" at the end.

        Raises EOFError where the input is cut off, _DamageError where it is damaged, OSError where it cannot be read.
        """


class SourceStream(io.RawIOBase):
    """Raw decompressed bytes of a source.

    Trouble ends the stream like the end of the file and is kept in `error`, so that a buffered reader on top still
    hands out everything that came before it. `failure` is set too where reading itself failed, which may pass.
    """

    def __init__(self, source: Source, max_expansion: int) -> None:
        self.error: RowError | None = None
        self.failure: OSError | None = None
        self._max_expansion = max_expansion
        self._num_read = 0
        self._file: BinaryIO | None = None
        try:
            self._file = source.open()
        except OSError as error:
            self._fail(error)
            return
        self._input = _Input(self._file)
        self._decoder: _Decoder = _DECODERS[source.compression](self._input) if source.compression else self._input
        self._is_capped = source.compression is not None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self.error is not None:
            return 0
        try:
            data = self._decoder.read(len(buffer))
        except EOFError:
            self.error = RowError("truncated_input", "the compressed file ends too early; fetch or write it again")
            return 0
        except _DamageError as error:
            self.error = RowError("unreadable_input", f"{error}; fetch or write the file again")
            return 0
        except OSError as error:
            self._fail(error)
            return 0
        self._num_read += len(data)
        if self._is_capped and self._num_read > max(FREE_BYTES, self._max_expansion * self._input.num_read):
            message = (
                f"the file expands to more than {self._max_expansion} times its size; decompress it yourself first"
            )
            self.error = RowError("file_too_large", message)
            return 0
        buffer[: len(data)] = data
        return len(data)

    def _fail(self, error: OSError) -> None:
        self.failure = error
        self.error = RowError("unreadable_input", f"the file cannot be read ({error.strerror or error})")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


def open_stream(source: Source, max_expansion: int) -> tuple[SourceStream, io.BufferedReader]:
    """The raw stream, whose `error` tells how it ended, and the buffered reader to use. Closing one closes both."""
    raw = SourceStream(source, max_expansion)
    return raw, io.BufferedReader(raw, BUFFER_BYTES)


class _Input:
    """Compressed bytes, counted. It is its own decoder for a plain file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_read = 0

    def read(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except OSError:
            raise
        except Exception as error:  # drivers of remote file systems have exceptions of their own
            raise OSError(type(error).__name__) from error
        self.num_read += len(data)
        return data


class _GzipDecoder:
    """Gzip members one after the other; zero padding after the last one is allowed, as gzip itself allows it."""

    def __init__(self, source: _Input) -> None:
        self._source = source
        self._member = zlib.decompressobj(wbits=31)
        self._pending = b""
        self._is_started = self._is_past_first = False

    def read(self, size: int) -> bytes:
        while True:
            if self._member.eof:
                self._pending = self._member.unused_data
                self._member = zlib.decompressobj(wbits=31)
                self._is_started, self._is_past_first = False, True
            if not self._pending:
                self._pending = self._source.read(_PIECE_BYTES)
                if not self._pending:
                    if self._is_started:
                        raise EOFError
                    return b""
            if not self._is_started and self._is_past_first:
                self._pending = self._pending.lstrip(b"\0")
                if not self._pending:
                    continue
            self._is_started = True
            try:
                data = self._member.decompress(self._pending, size)
            except zlib.error:
                raise _DamageError("the gzip data is damaged") from None
            self._pending = self._member.unconsumed_tail
            if data:
                return data


class _ZstdDecoder:
    """Zstandard frames one after the other."""

    def __init__(self, source: _Input) -> None:
        import zstandard

        self._source = source
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame = self._decompressor.decompressobj()
        self._error = zstandard.ZstdError
        self._pending = self._ready = b""
        self._is_started = False

    def read(self, size: int) -> bytes:
        while not self._ready:
            piece = self._pending or self._source.read(_ZSTD_PIECE_BYTES)
            if not piece:
                if self._is_started:
                    raise EOFError
                return b""
            try:
                self._ready = self._frame.decompress(piece)
            except self._error as error:
                large = "memory" in str(error)
                raise _DamageError(
                    "the zstd window is too large; compress without --long" if large else "the zstd data is damaged"
                ) from None
            self._pending, self._is_started = b"", True
            if self._frame.eof:
                self._pending, self._is_started = self._frame.unused_data, False
                self._frame = self._decompressor.decompressobj()
        data, self._ready = self._ready[:size], self._ready[size:]
        return data


_DECODERS: dict[str, type[_GzipDecoder] | type[_ZstdDecoder]] = {"gzip": _GzipDecoder, "zstd": _ZstdDecoder}
