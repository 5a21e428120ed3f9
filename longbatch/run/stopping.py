"""Signals: the first asks the run to stop and save, a second Ctrl-C ends it at once (what is journaled is safe)."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType

from longbatch.errors import ExitCode

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequest:
    """A context in which TERM, INT and HUP set `requested` instead of ending the process."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            os._exit(ExitCode.KILLED)
        self.requested = True
