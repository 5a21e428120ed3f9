"""Errors as text that may stand in a log: where and of what kind, without what the data was.

Messages of Python and of most libraries quote the value at fault, which may be a piece of a prompt, an answer or a URL
with a token in it. Those of longbatch itself never do, and those of torch and of the system speak of shapes, devices
and files' states only.
"""

from __future__ import annotations

import errno
import logging
import sys
import threading
import traceback
from types import TracebackType

from longbatch.errors import LongbatchError

_SAFE_PACKAGES = ("torch", "triton")


def error_text(error: BaseException) -> str:
    """The kind of an exception, with its message where that cannot quote data."""
    kind = type(error)
    name = kind.__name__
    if isinstance(error, OSError) and error.errno is not None:
        return f"{name}: {errno.errorcode.get(error.errno, error.errno)}"
    if isinstance(error, LongbatchError):
        return f"{name}: {error.message}"
    # A plain RuntimeError is what torch raises for most things, a lost device included.
    if kind in (RuntimeError, MemoryError) or kind.__module__.partition(".")[0] in _SAFE_PACKAGES:
        message = str(error)
        return f"{name}: {message}" if message else name
    return name


def traceback_text(error: BaseException) -> str:
    """As Python prints an exception and those that led to it, each with its `error_text`."""
    blocks = []
    seen: set[int] = set()
    current: BaseException | None = error
    link = ""
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        frames = "".join(traceback.format_tb(current.__traceback__))
        blocks.append(f"Traceback (most recent call last):\n{frames}{error_text(current)}\n{link}")
        if current.__cause__ is not None:
            current, link = current.__cause__, "\nwhich was the cause of:\n\n"
        elif current.__suppress_context__:
            break
        else:
            current, link = current.__context__, "\nwhile that was handled:\n\n"
    return "".join(reversed(blocks))


class LogFormatter(logging.Formatter):
    """A formatter whose tracebacks hold no data."""

    def formatException(
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        """The `traceback_text` of what is being handled."""
        return "" if ei[1] is None else traceback_text(ei[1]).rstrip("\n")


def hide_data_in_tracebacks() -> None:
    """Let the exceptions that end this process, or one of its threads, be printed by `traceback_text`."""

    def print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, KeyboardInterrupt):
            sys.stderr.write(traceback_text(error))

    def print_thread_error(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
            sys.stderr.write(traceback_text(arguments.exc_value))

    sys.excepthook = print_error
    threading.excepthook = print_thread_error
