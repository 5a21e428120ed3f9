"""Decode forwards as CUDA graphs: the kernels of a step in one launch, instead of hundreds that the device waits for.

A graph belongs to a shape, the rows and the key ranges of its step, both rounded up. A shape runs as it is when it
comes first, which compiles its kernels, and is captured when it comes again. All graphs have their memory from one pool
and write the logits into one buffer, so that together they need what the largest of them needs.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The one used longest ago gives way to the next; each holds some MiB of the driver's memory.
MOST_GRAPHS = 32
_log = logging.getLogger(__name__)


class StepShape(NamedTuple):
    """rows: of the batch, those included that only fill it up. splits: ranges of keys that the longest row may have."""

    rows: int
    splits: int


# Runs a step of a shape: logits float32 [rows, vocab], in the tensor given if one is.
Forward = Callable[[StepShape, Tensor | None], Tensor]


def round_up(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: few numbers, and less than half as much again."""
    power = 1 << max(0, count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


class StepGraphs:
    """forward: what is captured; it reads and writes the same memory in every step. most_rows, vocab: of the logits."""

    def __init__(self, forward: Forward, most_rows: int, vocab: int, device: torch.device) -> None:
        self._forward, self._size, self._device = forward, (most_rows, vocab), device
        self._met: set[StepShape] = set()
        self._has_failed = False
        self.release()

    def __len__(self) -> int:
        return len(self._graphs)

    def release(self) -> None:
        """Give all of their memory back; they are captured anew when they are asked for."""
        self._graphs: OrderedDict[StepShape, torch.cuda.CUDAGraph] = OrderedDict()
        self._logits: Tensor | None = None
        self._pool: Any = None

    def run(self, shape: StepShape) -> Tensor:
        """Logits float32 [rows, vocab] of a step, which the next step may overwrite."""
        if shape not in self._graphs and (shape not in self._met or self._has_failed or not self._capture(shape)):
            self._met.add(shape)
            return self._forward(shape, None)
        assert self._logits is not None
        self._graphs.move_to_end(shape)
        self._graphs[shape].replay()
        return self._logits[: shape.rows]

    def _capture(self, shape: StepShape) -> bool:
        """Make the graph of a shape; False, and no other is tried, where that fails."""
        stream = torch.cuda.current_stream(self._device)
        try:
            if self._logits is None:
                self._logits = torch.empty(self._size, dtype=torch.float32, device=self._device)
                self._pool = torch.cuda.graph_pool_handle()
            if len(self._graphs) == MOST_GRAPHS:
                # It may still run.
                stream.synchronize()
                self._graphs.popitem(last=False)
            graph = torch.cuda.CUDAGraph()
            # What other threads ask of the device meanwhile is their own affair.
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                self._forward(shape, self._logits[: shape.rows])
        except RuntimeError as fault:
            # An invalid capture leaves its own stream as the current one.
            torch.cuda.set_stream(stream)
            self._has_failed = True
            self.release()
            _log.warning("decode steps run without CUDA graphs: %s", fault)
            return False
        self._graphs[shape] = graph
        return True
