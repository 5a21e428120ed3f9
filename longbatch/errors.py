"""The exception tree, the closed list of row error types, and exit codes.

    LongbatchError            exit code
    +-- UsageError            2   a flag, a setting or the model folder is wrong
    |   +-- RunningError      2   the same run is already under way
    +-- ManifestError         4   nothing in the manifest can run
    +-- DeviceError           5   no usable device
    +-- DiskError             6   the disk is full or refuses a write
    +-- FidelityError         7   a sparse run differs from dense by more than --max-gap
    +-- AbortError            8   too many rows failed (--abort-on-failures)
    +-- InterruptedRun        75  stopped early; everything finished is saved
    +-- RowError              -   one row cannot be answered; never ends a run

A `RowError` is caught where rows are handled and becomes one result row with status `error`. Every other
exception ends the command with its exit code; anything outside this tree is a bug and exits with 1.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit codes, part of the public interface."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    FAILED_ROWS = 3
    MANIFEST = 4
    DEVICE = 5
    DISK = 6
    FIDELITY = 7
    ABORTED = 8
    INTERRUPTED = 75
    KILLED = 130


# Every value that `error.type` may take, and whether running the row again can help.
ROW_ERROR_TYPES: dict[str, bool] = {
    # reading the manifest
    "invalid_json": False,
    "invalid_encoding": False,
    "row_too_large": False,
    "truncated_input": False,
    "unreadable_input": True,
    # the meaning of a row
    "duplicate_id": False,
    "invalid_id": False,
    "missing_field": False,
    "invalid_type": False,
    "invalid_value": False,
    "ambiguous_row": False,
    "unsupported_field": False,
    "unknown_role": False,
    "unknown_part": False,
    "empty_messages": False,
    "assistant_last": False,
    # documents
    "file_missing": True,
    "file_refused": False,
    "file_too_large": False,
    "undecodable_text": False,
    "unsupported_media": False,
    # prompts and plan
    "template_error": False,
    "template_timeout": False,
    "empty_prompt": False,
    "prompt_too_long": False,
    "does_not_fit": False,
    # running
    "nonfinite_logits": False,
    "out_of_memory": True,
    "row_timeout": True,
    "crashed_engine": True,
    "io_error": True,
    "internal": True,
}


class LongbatchError(Exception):
    """Base of every error that longbatch raises on purpose; `hint` says what to do about it."""

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(LongbatchError):
    """A flag, a setting, a path or a model is wrong; nothing was started."""

    exit_code = ExitCode.USAGE


class RunningError(UsageError):
    """The same run is already under way in another process; nothing was started."""


class ManifestError(LongbatchError):
    """The manifest cannot be read at all, or none of its rows can run."""

    exit_code = ExitCode.MANIFEST


class DeviceError(LongbatchError):
    """The requested device is absent or unusable."""

    exit_code = ExitCode.DEVICE


class DiskError(LongbatchError):
    """A write failed, or weights could not be read while a run goes on; what was published before it is intact."""

    exit_code = ExitCode.DISK


class FidelityError(LongbatchError):
    """The measured gap to dense attention exceeds the limit, or could not be measured where there is one."""

    exit_code = ExitCode.FIDELITY


class AbortError(LongbatchError):
    """So many rows failed that going on would be waste."""

    exit_code = ExitCode.ABORTED


class InterruptedRun(LongbatchError):
    """The run stopped before its end; running the same command again continues it."""

    exit_code = ExitCode.INTERRUPTED


class RowError(LongbatchError):
    """One row cannot be answered.

    type: a key of `ROW_ERROR_TYPES`. field: the manifest field at fault, or None when it is the whole row.
    The message names what is wrong and what would mend it; it never quotes the row's content.
    """

    def __init__(self, type: str, message: str, *, field: str | None = None) -> None:
        if type not in ROW_ERROR_TYPES:
            raise ValueError(f"unknown row error type {type!r}")
        super().__init__(message)
        self.type = type
        self.field = field

    @property
    def retryable(self) -> bool:
        """Whether the same row may succeed when it is run again."""
        return ROW_ERROR_TYPES[self.type]

    def __reduce__(self) -> tuple[object, ...]:
        return _row_error, (self.type, self.message, self.field)


def _row_error(type: str, message: str, field: str | None) -> RowError:
    return RowError(type, message, field=field)
