"""A pool of equal pages with reference counts; it knows page numbers only, not what is in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PAGE_TOKENS = 64


def pages_for(num_tokens: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // PAGE_TOKENS)


class PagePool:
    """Hands out pages 0..num_pages-1.

    A request gets consecutive pages where a long enough gap exists, because a run of consecutive pages can be
    read without gathering. Pages are shared by `retain`; a page returns to the pool when its last holder
    releases it. Open blocks, where the pages' format needs them, are handed out one by one: to each sequence that
    decodes, from its first page to its last.
    """

    def __init__(self, num_pages: int, num_open: int = 0) -> None:
        self.num_pages = num_pages
        self.num_open = num_open
        self._free_open = list(reversed(range(num_open)))
        self._holders = np.zeros(num_pages, dtype=np.int32)
        self._num_free = num_pages
        self._cursor = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return self._num_free

    def allocate(self, count: int) -> np.ndarray:
        """Take `count` pages: int32 [count], consecutive if possible. Raises MemoryError if too few are free."""
        if count > self._num_free:
            raise MemoryError(f"{count} pages asked for, {self._num_free} of {self.num_pages} free")
        if count == 0:
            return np.zeros(0, dtype=np.int32)
        start = self._find_run(count)
        if start is None:
            pages = np.flatnonzero(self._holders == 0)[:count].astype(np.int32)
        else:
            pages = np.arange(start, start + count, dtype=np.int32)
            self._cursor = start + count
        self._holders[pages] = 1
        self._num_free -= count
        return pages

    @property
    def num_free_open(self) -> int:
        """Open blocks that nobody holds."""
        return len(self._free_open)

    def take_open(self) -> int | None:
        """Take an open block; None where the format has none. Raises MemoryError if all are taken."""
        if not self.num_open:
            return None
        if not self._free_open:
            raise MemoryError(f"all {self.num_open} open blocks are taken")
        return self._free_open.pop()

    def give_open(self, block: int) -> None:
        """Give an open block back. Raises ValueError if nobody holds it."""
        if not 0 <= block < self.num_open or block in self._free_open:
            raise ValueError("an open block was given back that nobody holds")
        self._free_open.append(block)

    def retain(self, pages: Sequence[int] | np.ndarray) -> None:
        """Add a holder to each of some distinct pages. Raises ValueError if nobody holds one of them."""
        index = np.asarray(pages, dtype=np.int64)
        if np.any(self._holders[index] <= 0):
            raise ValueError("a page that nobody holds cannot be shared")
        self._holders[index] += 1

    def release(self, pages: Sequence[int] | np.ndarray) -> None:
        """Remove a holder from each of some distinct pages; pages without holders become free.

        Raises ValueError, and releases nothing, if nobody holds one of them.
        """
        index = np.asarray(pages, dtype=np.int64)
        if np.any(self._holders[index] <= 0):
            raise ValueError("a page was released more often than it was held")
        self._holders[index] -= 1
        self._num_free += int(np.count_nonzero(self._holders[index] == 0))

    def _find_run(self, count: int) -> int | None:
        """First page of a free run of `count` pages: next-fit from the cursor, then first-fit; None if absent."""
        if self._cursor + count <= self.num_pages and not self._holders[self._cursor : self._cursor + count].any():
            return self._cursor
        busy = np.flatnonzero(self._holders)
        edges = np.concatenate(([-1], busy, [self.num_pages]))
        gaps = np.diff(edges) - 1
        wide = np.flatnonzero(gaps >= count)
        return int(edges[wide[0]] + 1) if len(wide) else None
