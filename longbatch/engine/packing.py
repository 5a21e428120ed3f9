"""From rows to prefill steps: families of token sequences are laid out, cut into chunks where they must be.

A family is a trunk that several branches continue (a document and its labels, or rows that share a beginning),
or a single branch without a trunk. The trunk runs once; the branches attend to it. A step holds at most
`step_tokens` tokens; what does not fit is cut and finds its earlier keys in pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch

from longbatch.attention import DenseKernels, Executed, Extent, Segment, SparseLayer, Step
from longbatch.cache import PAGE_TOKENS, Stretch, Writes

Owner = TypeVar("Owner")


@dataclass(slots=True)
class Branch(Generic[Owner]):
    """Tokens that follow the family's trunk.

    ids: int32 [n]. reads: half-open ranges of sequence positions (trunk included) whose hidden state is wanted.
    pages: block table over the whole sequence, trunk included, or None when K/V need not outlive the step. executed:
    as in `Segment`. open_block: as in `Stretch`.
    """

    owner: Owner
    ids: np.ndarray
    reads: tuple[tuple[int, int], ...]
    rope_length: int
    pages: np.ndarray | None = None
    executed: Executed | None = None
    open_block: int | None = None


@dataclass(slots=True)
class Family(Generic[Owner]):
    """trunk: int32 ids, a multiple of PAGE_TOKENS long so that its pages can be shared; may be empty. trunk_executed:
    as in `Segment`."""

    branches: list[Branch[Owner]]
    trunk: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    trunk_pages: np.ndarray | None = None
    trunk_executed: Executed | None = None

    def __post_init__(self) -> None:
        if len(self.trunk) % PAGE_TOKENS:
            raise ValueError("a trunk must end at a page boundary")

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return len(self.trunk) + sum(len(branch.ids) for branch in self.branches)


@dataclass(slots=True)
class PackedStep(Generic[Owner]):
    """A step, and whose positions its hidden rows are: (branch, first position, last position + 1) in order."""

    step: Step
    reads: list[tuple[Branch[Owner], int, int]]


@dataclass(slots=True)
class _Run(Generic[Owner]):
    """Consecutive tokens of one sequence before cutting."""

    ids: np.ndarray
    offset: int
    pages: np.ndarray | None
    branch: Branch[Owner] | None
    rope_length: int
    parent: _Run[Owner] | None
    executed: Executed | None
    open_block: int | None = None
    placed: list[Extent] = field(default_factory=list)


def pack(
    families: Sequence[Family[Owner]],
    *,
    step_tokens: int,
    tile_rows: int,
    device: torch.device,
    start: int = 0,
    attention: tuple[SparseLayer | None, ...] | None = None,
    whole_pages: bool = False,
    dense: DenseKernels | None = None,
) -> Iterator[PackedStep[Owner]]:
    """Lay out families in order. Each step must be run before the next is drawn.

    start: tokens of the first family's beginning whose K/V lie in its pages already; at least one more follows them.
    attention: the patterns of each layer, for the families that run sparse. whole_pages: whether K/V are stored in
    whole pages only; chunks then end at page boundaries too. dense: as in `Step`.
    Raises ValueError if the tokens need more than one step and some family has no pages.
    """
    runs = list(_runs(families))
    many = sum(len(run.ids) for run in runs) > step_tokens
    if many and any(run.pages is None for run in runs):
        raise ValueError("several steps need pages for every token")
    unit = math.lcm(tile_rows, PAGE_TOKENS) if whole_pages else tile_rows
    step_tokens = max(unit, step_tokens // unit * unit) if many else step_tokens
    pending: list[tuple[_Run[Owner], int, int]] = []
    filled = 0
    if start:
        runs[0].placed = [Extent(0, start, pages=runs[0].pages)]
    for run in runs:
        while start < len(run.ids):
            room = step_tokens - filled
            stop = min(len(run.ids), start + room)
            if stop < len(run.ids):
                # Chunks end at tile boundaries of the sequence, so that a chunked row runs in the same pieces.
                stop = (run.offset + stop) // unit * unit - run.offset
            if stop <= start:
                yield _build(pending, tile_rows, device, attention, whole_pages, dense)
                pending, filled = [], 0
                continue
            pending.append((run, start, stop))
            filled += stop - start
            start = stop
        start = 0
    if pending:
        yield _build(pending, tile_rows, device, attention, whole_pages, dense)


def _runs(families: Sequence[Family[Owner]]) -> Iterator[_Run[Owner]]:
    for family in families:
        trunk: _Run[Owner] | None = None
        if len(family.trunk):
            rope_length = max(branch.rope_length for branch in family.branches)
            trunk = _Run(family.trunk, 0, family.trunk_pages, None, rope_length, None, family.trunk_executed)
            yield trunk
        for branch in family.branches:
            offset = len(family.trunk)
            rope_length, executed = branch.rope_length, branch.executed
            yield _Run(branch.ids, offset, branch.pages, branch, rope_length, trunk, executed, branch.open_block)


def _build(
    pending: list[tuple[_Run[Owner], int, int]],
    tile_rows: int,
    device: torch.device,
    attention: tuple[SparseLayer | None, ...] | None,
    whole_pages: bool,
    dense: DenseKernels | None,
) -> PackedStep[Owner]:
    """One step of the pending parts; their runs then know these tokens as lying in pages."""
    segments: list[Segment] = []
    reads: list[tuple[Branch[Owner], int, int]] = []
    ids: list[np.ndarray] = []
    kept: list[Stretch] = []
    base = 0
    bases: dict[int, list[Extent]] = {}
    for run, start, stop in pending:
        low, high = run.offset + start, run.offset + stop
        wanted: list[tuple[int, int]] = []
        if run.branch is not None:
            for first, last in run.branch.reads:
                if max(first, low) < min(last, high):
                    wanted.append((max(first, low), min(last, high)))
                    reads.append((run.branch, *wanted[-1]))
        context = list(run.placed)
        if run.parent is not None:
            context = [*run.parent.placed, *bases.get(id(run.parent), []), *context]
        segments.append(Segment(base, low, stop - start, tuple(context), tuple(wanted), run.rope_length, run.executed))
        bases.setdefault(id(run), []).append(Extent(low, high, base=base))
        ids.append(run.ids[start:stop])
        if run.pages is not None:
            kept.append(Stretch(base, low, high, run.pages, run.open_block))
        base += stop - start
    step = Step.build(
        np.concatenate(ids),
        segments,
        Writes.of(kept, base, device, has_open=whole_pages),
        tile_rows=tile_rows,
        device=device,
        attention=attention,
        dense=dense,
    )
    for run, _, stop in pending:
        run.placed = [Extent(run.offset, run.offset + stop, pages=run.pages)]
    return PackedStep(step, reads)
