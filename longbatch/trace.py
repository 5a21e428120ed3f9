"""Where the time goes: seconds per named stage. Knows nothing of what the stages are."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any


class Trace:
    """Accumulates seconds and a count per stage name; safe to use from several threads.

    on_gpu: stages are measured by CUDA events on the current stream, without waiting for the GPU; `totals`
    waits for those still running. Otherwise they are measured by the monotonic clock. A stage inside another
    counts in both.
    """

    def __init__(self, on_gpu: bool = False) -> None:
        self.on_gpu = on_gpu
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._running: list[tuple[str, Any, Any]] = []  # (name, start event, end event) not yet read

    def stage(self, name: str) -> Stage:
        """A context manager that adds the time of its body to `name`."""
        return GpuStage(self, name) if self.on_gpu else Stage(self, name)

    def add(self, name: str, seconds: float) -> None:
        """Add a time measured elsewhere."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            self._counts[name] = self._counts.get(name, 0) + 1

    def add_events(self, name: str, start: Any, end: Any) -> None:
        """Add the time between two recorded CUDA events, once the GPU has passed both."""
        with self._lock:
            self._running.append((name, start, end))
            finished = self._take_finished()
        for done, seconds in finished:
            self.add(done, seconds)

    def totals(self) -> dict[str, float]:
        """Seconds per stage name so far."""
        with self._lock:
            running, self._running = self._running, []
        for name, start, end in running:
            end.synchronize()
            self.add(name, start.elapsed_time(end) / 1000)
        with self._lock:
            return dict(self._seconds)

    def counts(self) -> dict[str, int]:
        """How often each stage ran, as far as its time was read."""
        with self._lock:
            return dict(self._counts)

    def _take_finished(self) -> list[tuple[str, float]]:
        # Events on one stream finish in order, so the scan stops at the first that is still running.
        finished = []
        while self._running and self._running[0][2].query():
            name, start, end = self._running.pop(0)
            finished.append((name, start.elapsed_time(end) / 1000))
        return finished


class Stage:
    """One measured stretch of code, by the monotonic clock. seconds: its length, set on leaving."""

    def __init__(self, trace: Trace, name: str) -> None:
        self.trace = trace
        self.name = name
        self.seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> Stage:
        self._start = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.seconds = time.monotonic() - self._start
        self.trace.add(self.name, self.seconds)


class GpuStage(Stage):
    """One measured stretch of GPU work on the current stream. seconds stays 0: the GPU may not be done yet."""

    def __enter__(self) -> Stage:
        import torch

        make_event: Any = torch.cuda.Event
        self._events = make_event(enable_timing=True), make_event(enable_timing=True)
        self._events[0].record()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        start, end = self._events
        end.record()
        self.trace.add_events(self.name, start, end)
