"""What other processes ask of a run, as files in its folder: to stop, and to run failed rows again."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longbatch.output.files import as_json, disk_errors, fsync_folder, replace_file
from longbatch.output.keys import DIGEST_BYTES, KEY_DTYPE, key_part

STOP_FILE = "stop"
RETRY_FILE = "retry.jsonl"


def request_stop(work: Path) -> None:
    """Ask every supervisor that runs now, on whatever machine, to save and end. Raises DiskError."""
    content = {"request": secrets.token_hex(8), "host": socket.gethostname(), "time": time.time()}
    with disk_errors("write", work / STOP_FILE):
        replace_file(work / STOP_FILE, as_json(content))


def last_stop(work: Path) -> str:
    """What names the newest request to stop, answered or not; empty where there never was one. A supervisor reads it
    at its start, because such a request is not meant for it."""
    try:
        return str(json.loads((work / STOP_FILE).read_bytes())["request"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError):
        return "unreadable"


def stop_requested(work: Path, known: str = "") -> bool:
    """Whether there is a request to stop other than `known`, which is what `last_stop` said at the start.

    The request stays in its file: of several supervisors none can take it away before the others have seen it.
    """
    return last_stop(work) not in ("", known)


@dataclass(frozen=True, slots=True)
class RetryMarks:
    """Failed rows to run again. keys: S16 [n], sorted. attempts: int32 [n], of the failed answer when it was marked:
    a later answer settles the mark."""

    keys: NDArray[np.bytes_]
    attempts: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def load(cls, work: Path) -> RetryMarks:
        """The marks of a run folder; of several for one key the newest. A torn line, from a kill, is left out.

        Raises DiskError.
        """
        path = work / RETRY_FILE
        with disk_errors("read", path):
            lines = path.read_bytes().split(b"\n") if path.exists() else []
        newest: dict[bytes, int] = {}
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                key, attempt = bytes.fromhex(entry["key"]), int(entry["attempt"])
                if len(key) == DIGEST_BYTES:
                    newest[key] = max(attempt, newest.get(key, 0))
        keys = np.array(sorted(newest), dtype=KEY_DTYPE)
        # numpy leaves out trailing zero bytes, which padding brings back.
        attempts = [newest[key.ljust(DIGEST_BYTES, b"\0")] for key in keys.tolist()]
        return cls(keys, np.array(attempts, dtype=np.int32))

    def wanted(self, answers: NDArray[np.bytes_], attempts: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which of [n] S32 answers, whose newest results have these attempts, were marked and not run since. Only
        those that failed are to run again."""
        if not len(self.keys):
            return np.zeros(len(answers), dtype=bool)
        keys = key_part(answers)
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        found: NDArray[np.bool_] = (self.keys[place] == keys) & (attempts <= self.attempts[place])
        return found


def mark_for_retry(work: Path, keys: Iterable[bytes], attempts: Sequence[int]) -> None:
    """Mark answers to run again. keys: 16 bytes each, attempts: of the results that they have. Raises DiskError."""
    entries = [
        json.dumps({"key": key.ljust(DIGEST_BYTES, b"\0").hex(), "attempt": attempt}).encode()
        for key, attempt in zip(keys, attempts, strict=True)
    ]
    if not entries:
        return
    path = work / RETRY_FILE
    with disk_errors("write", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "ab", buffering=0) as file:
            # The line break comes first, so that a line which a kill cut short cannot swallow this one.
            content = memoryview(b"\n" + b"\n".join(entries))
            while content:
                content = content[file.write(content) :]
            os.fsync(file.fileno())
        fsync_folder(work)
