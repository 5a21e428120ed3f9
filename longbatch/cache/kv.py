"""The tensors behind the pages: one K and one V pool for each layer.

A pool is [num_pages * PAGE_TOKENS, kv_heads, head_dim]; slot = page * PAGE_TOKENS + offset. Token-major, so
that a run of consecutive pages is one strided view and a token's heads are written together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longbatch.cache.pages import PAGE_TOKENS, PagePool


class KVCache:
    """K/V of every layer in pages that all layers share (one block table serves the whole model).

    heads_and_dims: (kv heads, head dim) per layer. Entries are stored as given, in `dtype`.
    """

    def __init__(
        self, heads_and_dims: Sequence[tuple[int, int]], num_pages: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.pool = PagePool(num_pages)
        num_slots = num_pages * PAGE_TOKENS
        self.keys = [torch.empty((num_slots, h, d), dtype=dtype, device=device) for h, d in heads_and_dims]
        self.values = [torch.empty((num_slots, h, d), dtype=dtype, device=device) for h, d in heads_and_dims]
        self.device = device

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] at `slots` int64 [T]."""
        self.keys[layer].index_copy_(0, slots, k)
        self.values[layer].index_copy_(0, slots, v)

    def read(self, layer: int, pages: np.ndarray, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V of tokens start..stop-1 of a block table: views where the pages are consecutive, else copies.

        Returns two tensors [stop - start, kv_heads, head_dim].
        """
        first, last = start // PAGE_TOKENS, (stop - 1) // PAGE_TOKENS
        used = pages[first : last + 1]
        offset = start - first * PAGE_TOKENS
        if int(used[-1]) - int(used[0]) == len(used) - 1 and bool(np.all(np.diff(used) == 1)):
            low = int(used[0]) * PAGE_TOKENS + offset
            return self.keys[layer][low : low + stop - start], self.values[layer][low : low + stop - start]
        slots = torch.from_numpy(slots_of(pages, start, stop)).to(self.device)
        return self.keys[layer].index_select(0, slots), self.values[layer].index_select(0, slots)


def slots_of(pages: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Slots of tokens start..stop-1 of a block table: int64 [stop - start]."""
    positions = np.arange(start, stop, dtype=np.int64)
    return pages.astype(np.int64)[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
