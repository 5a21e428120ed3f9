"""What a GPU does at the same time: copies beside kernels, from a trace of torch's profiler in Chrome's format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Microseconds. copies: in which the host's memory was copied to the device. hidden: in which kernels ran
    meanwhile."""

    copies: float
    hidden: float

    @property
    def share(self) -> float:
        """Of the time of copies, how much was hidden."""
        return self.hidden / self.copies


def traced(work: Callable[[], object], path: Path) -> Overlap | None:
    """Run something under the profiler; the trace goes to the file. None where no copies were seen, as without a
    GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        work()
    profile.export_chrome_trace(str(path))
    return overlap(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def overlap(events: Iterable[dict[str, Any]]) -> Overlap | None:
    """From the events of a trace."""
    copies, kernels = [], []
    for event in events:
        if event.get("cat") == "kernel":
            kernels.append(_span(event))
        elif event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]:
            copies.append(_span(event))
    copied = merged(copies)
    if not copied:
        return None
    return Overlap(sum(stop - start for start, stop in copied), _common(copied, merged(kernels)))


def _span(event: dict[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time in spans that don't touch, in order."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def _common(left: list[Span], right: list[Span]) -> float:
    """Time that is in both; each in order and without touching."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total
