"""Where the K/V of a forward's tokens go: the same in every layer, so it is worked out once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longbatch.cache.pages import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens of one sequence, at positions start..stop-1 and packed rows from `row` on. pages: the
    sequence's block table. open_block: its open block, None where it has none; what is not a whole page is then not
    kept."""

    row: int
    start: int
    stop: int
    pages: np.ndarray
    open_block: int | None = None


@dataclass(frozen=True, slots=True)
class Blocks:
    """Whole blocks that become pages. rows: int64 [P], where each begins. pages: int64 [P]."""

    rows: Tensor
    pages: Tensor


@dataclass(frozen=True, slots=True)
class Writes:
    """What a forward stores, in this order.

    slots: int64 [K], places (64 to a page or open block) of the tokens that are stored one by one: in the pages of a
    format that can, else in the open blocks. rows: int64 [K], their packed rows, None for all rows. blocks: packed rows
    that become pages at once. filled: open blocks that are full by now and become pages; rows are places there.
    """

    slots: Tensor
    rows: Tensor | None = None
    blocks: Blocks | None = None
    filled: Blocks | None = None

    @classmethod
    def of(cls, stretches: Sequence[Stretch], num_rows: int, device: torch.device, *, has_open: bool) -> Writes | None:
        """For some of a prefill's `num_rows` packed rows; None where none is kept. has_open: whether only whole pages
        can be stored. Then each stretch must begin at a page boundary (raises ValueError), and what follows its last
        whole page goes to its open block."""
        slots, rows, first_rows, pages = [], [], [], []
        for stretch in stretches:
            whole = stretch.stop
            if has_open:
                if stretch.start % PAGE_TOKENS:
                    raise ValueError("with this K/V format a chunk must begin at a page boundary")
                whole = stretch.stop // PAGE_TOKENS * PAGE_TOKENS
                pages.append(stretch.pages[stretch.start // PAGE_TOKENS : whole // PAGE_TOKENS].astype(np.int64))
                first_rows.append(stretch.row + np.arange(0, whole - stretch.start, PAGE_TOKENS))
                if stretch.open_block is not None:
                    first = stretch.open_block * PAGE_TOKENS
                    slots.append(first + np.arange(stretch.stop - whole))
                    rows.append(stretch.row + np.arange(whole - stretch.start, stretch.stop - stretch.start))
            else:
                slots.append(slots_of(stretch.pages, stretch.start, stretch.stop))
                rows.append(stretch.row + np.arange(stretch.stop - stretch.start))
        if not stretches:
            return None
        taken = _on(rows, device)
        every = not has_open and len(taken) == num_rows
        blocks = Blocks(_on(first_rows, device), _on(pages, device)) if has_open else None
        return cls(_on(slots, device), None if every else taken, blocks)


def slots_of(pages: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Slots of tokens start..stop-1 of a block table: int64 [stop - start]."""
    positions = np.arange(start, stop, dtype=np.int64)
    return pages.astype(np.int64)[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS


def _on(parts: list[np.ndarray], device: torch.device) -> Tensor:
    """int64 numbers on the device."""
    whole = np.concatenate(parts) if parts else np.zeros(0)
    return torch.from_numpy(whole.astype(np.int64)).to(device)
