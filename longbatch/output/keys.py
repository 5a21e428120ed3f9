"""What identifies an answer, as fixed-width bytes that numpy sorts and searches quickly.

A key is 16 bytes of blake2b over (id or row number, sample): with 128 bits of a cryptographic hash, equal
digests mean equal keys. A content fingerprint is 16 bytes as well, so one answer to one input is 32 bytes.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longbatch.core import Fault, Request, Result
from longbatch.output.files import disk_errors, replace_file

DIGEST_BYTES = 16
KEY_DTYPE = np.dtype("S16")
ANSWER_DTYPE = np.dtype("S32")

_ID = Struct("<cI")
_ROW = Struct("<cIQ")


def key_digest(id: str | None, row: int, sample: int, *, duplicate: bool = False) -> bytes:
    """Digest of a key. The id "7" and row 7 differ. A row refused as a duplicate of an earlier id is told
    apart by its row number, so that it does not take the place of the row that owns the id."""
    if id is None:
        return blake2b(_ROW.pack(b"r", sample, row), digest_size=DIGEST_BYTES).digest()
    name = id.encode("utf-8", "surrogatepass")
    head = _ROW.pack(b"d", sample, row) if duplicate else _ID.pack(b"i", sample)
    return blake2b(head + name, digest_size=DIGEST_BYTES).digest()


def digest_of(source: Request | Fault | Result) -> bytes:
    """The key's digest of a row on its way in or out; equal for a request and its result."""
    if isinstance(source, Request):
        return key_digest(source.id, source.row, source.sample)
    duplicate = source.error is not None and source.error.type == "duplicate_id"
    key = source.key
    return key_digest(key.id, source.row, key.sample, duplicate=duplicate)


def padded_fingerprint(fingerprint: bytes) -> bytes:
    """The fingerprint as exactly 16 bytes (shorter ones only come from callers that set none)."""
    if len(fingerprint) > DIGEST_BYTES:
        raise ValueError(f"a fingerprint has {DIGEST_BYTES} bytes, got {len(fingerprint)}")
    return fingerprint.ljust(DIGEST_BYTES, b"\0")


def join_answers(keys: NDArray[np.bytes_], fingerprints: NDArray[np.bytes_]) -> NDArray[np.bytes_]:
    """[n] S16 keys and [n] S16 fingerprints side by side as [n] S32."""
    joined = np.empty((len(keys), 2), dtype=KEY_DTYPE)
    joined[:, 0] = keys
    joined[:, 1] = fingerprints
    return joined.view(ANSWER_DTYPE).reshape(-1)


def key_part(answers: NDArray[np.bytes_]) -> NDArray[np.bytes_]:
    """The S16 keys of [n] S32 answers, as a view."""
    return answers.view(KEY_DTYPE).reshape(-1, 2)[:, 0]


@dataclass(frozen=True, slots=True)
class KeyTable:
    """Every answer that a manifest asks for: 44 bytes each, in the manifest's order.

    answers: S32 [n], key and fingerprint. rows: int64 [n]. samples: int32 [n].
    """

    answers: NDArray[np.bytes_]
    rows: NDArray[np.int64]
    samples: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.answers)

    @classmethod
    def of(cls, sources: Iterable[Request | Fault]) -> KeyTable:
        """Read a whole manifest once; only keys stay in memory."""
        answers = bytearray()
        rows: list[NDArray[np.int64]] = []
        samples: list[NDArray[np.int32]] = []
        pending: list[tuple[int, int]] = []

        def spill() -> None:
            columns = np.array(pending, dtype=np.int64).reshape(-1, 2)
            rows.append(columns[:, 0].copy())
            samples.append(columns[:, 1].astype(np.int32))
            pending.clear()

        for source in sources:
            answers += digest_of(source)
            answers += padded_fingerprint(source.fingerprint)
            pending.append((source.row, source.sample if isinstance(source, Request) else 0))
            if len(pending) == 1 << 16:
                spill()
        spill()
        return cls(np.frombuffer(bytes(answers), ANSWER_DTYPE), np.concatenate(rows), np.concatenate(samples))

    def save(self, path: Path) -> None:
        """Keep the table in a file, so that an unchanged manifest need not be read again. Raises DiskError."""
        content = io.BytesIO()
        np.savez(content, answers=self.answers, rows=self.rows, samples=self.samples)
        with disk_errors("write", path):
            replace_file(path, content.getvalue())

    @classmethod
    def load(cls, path: Path) -> KeyTable | None:
        """A table that was saved; None if there is none, or if it is damaged."""
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as columns:
                return cls(columns["answers"], columns["rows"], columns["samples"])
        except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
            return None

    def digest(self) -> str:
        """A hash of the table, to tell whether two runs ask for the same."""
        summary = blake2b(digest_size=DIGEST_BYTES)
        columns: tuple[NDArray[Any], ...] = (self.answers, self.rows, self.samples)
        for column in columns:
            summary.update(np.ascontiguousarray(column).view(np.uint8).data)
        return summary.hexdigest()
