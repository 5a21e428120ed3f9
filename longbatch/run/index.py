"""Every row that a job asks for, small enough for millions: where it stands, how long it is, or why it cannot run.

Made by one pass over the manifest, stored in the run folder, and used again as long as manifest and settings are the
same, so that a continued run neither reads nor tokenizes what it has counted before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from longbatch.core import Fault, Location, MediaRef, Request, RowSize
from longbatch.errors import RowError
from longbatch.manifest import Manifest
from longbatch.output import KeyTable
from longbatch.output.files import disk_errors
from longbatch.prompt import PromptBuilder

VERSION = 1
BLOCK_ROWS = 1 << 16
TICK_ROWS = 256
_METADATA_KEY = b"longbatch.index"
_DTYPE = np.dtype(
    [
        ("source", np.int32),
        ("offset", np.int64),
        ("length", np.int64),
        ("prompt", np.int64),
        ("generated", np.int64),
        ("branch_tokens", np.int64),
        ("files", np.bool_),
    ]
)


@dataclass(frozen=True)
class RowIndex:
    """One entry per answer, in manifest order.

    keys: identity and content hash of each. entries: _DTYPE [n], location and size, and whether the row names files of
    its own. errors: by entry, why it cannot run. identity: what the index was made for.
    """

    keys: KeyTable
    entries: np.ndarray
    errors: dict[int, RowError]
    identity: str

    def __len__(self) -> int:
        return len(self.entries)

    def location(self, entry: int) -> Location:
        """Where the entry's row stands in the manifest."""
        found = self.entries[entry]
        return Location(int(found["source"]), int(found["offset"]), int(found["length"]))

    def key(self, entry: int) -> bytes:
        """The digest of the entry's key: 16 bytes."""
        return bytes(self.keys.answers[entry]).ljust(32, b"\0")[:16]

    def fingerprint(self, entry: int) -> bytes:
        """The content hash of the entry's row: 16 bytes."""
        # numpy drops trailing zero bytes of a fixed-width string.
        return bytes(self.keys.answers[entry]).ljust(32, b"\0")[16:]

    def entry(self, row: int, sample: int) -> int:
        """The entry of a row's sample: rows ascend, and a row's samples stand together."""
        return int(np.searchsorted(self.keys.rows, row)) + sample

    def find(self, sizes: Sequence[RowSize]) -> np.ndarray:
        """The entries of several rows' samples: int64 [n]."""
        places = np.array([(size.row, size.sample) for size in sizes], dtype=np.int64).reshape(-1, 2)
        entries: np.ndarray = np.searchsorted(self.keys.rows, places[:, 0]) + places[:, 1]
        return entries

    def sizes(self, entries: np.ndarray) -> Iterator[RowSize]:
        """Lengths of some entries."""
        chosen = self.entries[entries]
        columns = (
            self.keys.rows[entries],
            self.keys.samples[entries],
            chosen["prompt"],
            chosen["generated"],
            chosen["branch_tokens"],
        )
        return map(RowSize._make, zip(*(column.tolist() for column in columns), strict=True))

    def runnable(self) -> np.ndarray:
        """Entries without an error: int64."""
        able = np.ones(len(self), dtype=bool)
        able[list(self.errors)] = False
        return np.flatnonzero(able)

    @classmethod
    def build(cls, manifest: Manifest, builder: PromptBuilder, identity: str, tick: Callable[[], None]) -> RowIndex:
        """Read and count the whole manifest; constant memory but for the index itself. tick: called now and then."""
        blocks: list[np.ndarray] = []
        pending: list[tuple[int, ...]] = []
        errors: dict[int, RowError] = {}
        base = 0

        def counted() -> Iterator[Request | Fault]:
            nonlocal base
            for answer, size in builder.stream_sizes(manifest.rows()):
                if isinstance(size, RowError):
                    errors[base + len(pending)] = size
                    lengths = (0, 0, 0)
                else:
                    lengths = (size.prompt, size.generated, size.branch_tokens)
                pending.append((*answer.location, *lengths, _names_files(answer)))
                if len(pending) % TICK_ROWS == 0:
                    tick()
                if len(pending) == BLOCK_ROWS:
                    blocks.append(np.array(pending, dtype=_DTYPE))
                    base += len(pending)
                    pending.clear()
                yield answer

        keys = KeyTable.of(counted())
        blocks.append(np.array(pending, dtype=_DTYPE))
        return cls(keys, np.concatenate(blocks), errors, identity)

    def look_again(self, manifest: Manifest, builder: PromptBuilder, tick: Callable[[], None]) -> bool:
        """Read the rows again that may have changed though the manifest did not: those that name files, and those whose
        error may have passed. Returns whether any changed."""
        passing = [entry for entry, error in self.errors.items() if error.retryable]
        changed = False
        for number, entry in enumerate(sorted({*passing, *np.flatnonzero(self.entries["files"]).tolist()})):
            if number % TICK_ROWS == 0:
                tick()
            row, sample = int(self.keys.rows[entry]), int(self.keys.samples[entry])
            answers = manifest.read(self.location(entry), row)
            answer = answers[sample] if sample < len(answers) else answers[0]
            content = KeyTable.of([answer]).answers[0]
            if content == self.keys.answers[entry] and entry not in self.errors:
                continue
            size = answer.error if isinstance(answer, Fault) else builder.sizes([answer])[0]
            if isinstance(size, RowError):
                if content == self.keys.answers[entry]:
                    continue
                self.errors[entry] = size
            else:
                self.errors.pop(entry, None)
                for name in ("prompt", "generated", "branch_tokens"):
                    self.entries[name][entry] = getattr(size, name)
            self.keys.answers[entry] = content
            changed = True
        return changed

    def save(self, path: Path) -> None:
        """Write the index as one Parquet file, replacing an older one in one step. Raises DiskError."""
        facts = {
            "version": VERSION,
            "identity": self.identity,
            "errors": [[entry, error.type, error.message, error.field] for entry, error in sorted(self.errors.items())],
        }
        answers = pa.Array.from_buffers(pa.binary(32), len(self), [None, pa.py_buffer(self.keys.answers.tobytes())])
        columns: dict[str, Any] = {
            "answer": answers,
            "row": self.keys.rows,
            "sample": self.keys.samples,
            **{name: np.ascontiguousarray(self.entries[name]) for name in _DTYPE.names or ()},
        }
        table = pa.table(columns).replace_schema_metadata({_METADATA_KEY: json.dumps(facts).encode()})
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with disk_errors("store the row index", path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)
            os.replace(temporary, path)

    @classmethod
    def load(cls, path: Path, identity: str | None) -> RowIndex | None:
        """The stored index if it was made for `identity` (None: whatever it was made for); None if there is none, or
        it is damaged: making it again mends that."""
        try:
            table = pq.read_table(path, page_checksum_verification=True)
            facts = json.loads(table.schema.metadata[_METADATA_KEY])
            if facts["version"] != VERSION or identity not in (None, facts["identity"]):
                return None
            errors = {entry: RowError(kind, message, field=field) for entry, kind, message, field in facts["errors"]}
        except (OSError, pa.ArrowException, KeyError, ValueError, TypeError):
            return None
        table = table.combine_chunks()
        entries = np.empty(table.num_rows, dtype=_DTYPE)
        for name in _DTYPE.names or ():
            entries[name] = table[name].to_numpy()
        stored = table["answer"].chunk(0)
        answers = np.frombuffer(stored.buffers()[1], dtype="S32")[stored.offset :][: len(stored)].copy()
        keys = KeyTable(answers, table["row"].to_numpy(), table["sample"].to_numpy())
        return cls(keys, entries, errors, facts["identity"])


def _names_files(answer: Request | Fault) -> bool:
    """Whether a row's content lies partly in files beside the manifest."""
    if isinstance(answer, Fault):
        return False
    return any(isinstance(part, MediaRef) and part.path is not None for turn in answer.messages for part in turn.parts)
