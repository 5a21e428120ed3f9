"""Seconds of work on a device: CUDA events on a GPU, a wall clock elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def median_seconds(work: Callable[[], object], device: torch.device, *, repeats: int, warmups: int = 1) -> float:
    """Median of `repeats` runs after `warmups` others, which also compile what is compiled on first use.

    On a GPU the time is that between two events on the current stream, so waiting for the host counts.
    """
    for _ in range(warmups):
        work()
    if device.type != "cuda":
        return statistics.median(_wall_seconds(work) for _ in range(repeats))
    new_event: Any = torch.cuda.Event
    events = [(new_event(enable_timing=True), new_event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize(device)
    return float(statistics.median(start.elapsed_time(end) for start, end in events)) / 1e3


def _wall_seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
