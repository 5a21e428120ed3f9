"""Seconds of work on a device: CUDA events on a GPU, a wall clock elsewhere. And what measuring needs around it."""

from __future__ import annotations

import gc
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


def wait_for(device: torch.device) -> None:
    """Until a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    """Give back what nothing uses, so that measurements don't wear each other down."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _wall_seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
