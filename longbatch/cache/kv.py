"""The tensors behind the pages: one pool of K and one of V for each layer, in the storage format of the run.

A page holds PAGE_TOKENS tokens; slot = page * PAGE_TOKENS + offset. Pools are token-major, so that a run of consecutive
pages is one strided view and a token's heads are written together. With a format that stores only whole pages, each
sequence that decodes owns an open block beside the pools, in the model's dtype, which holds what follows its last whole
page; when it is full, it becomes a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from longbatch.cache.formats import Pool, load_format
from longbatch.cache.pages import PAGE_TOKENS, PagePool, pages_for
from longbatch.cache.writes import Writes, slots_of
from longbatch.config.kv_formats import KVFormat, plain_format

Shape = tuple[int, ...]


class KVCache:
    """K/V of every layer in pages that all layers share (one block table serves the whole model).

    heads_and_dims: (kv heads, head dim) per layer. dtype: the model's, in which K and V come and are read. kv: how they
    are stored, in `dtype` if None. num_open: sequences that decode at once, which a format with open blocks needs.
    """

    def __init__(
        self,
        heads_and_dims: Sequence[tuple[int, int]],
        num_pages: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kv: KVFormat | None = None,
        num_open: int = 0,
    ) -> None:
        self.kv = plain_format(str(dtype).removeprefix("torch.")) if kv is None else kv
        self.format = load_format(self.kv.module)
        self.pool = PagePool(num_pages, num_open if self.kv.has_open else 0)
        self.device = device
        self.dtype = dtype
        stored = dtype if self.kv.has_open else getattr(torch, self.kv.name)
        # One page and one open block more than the pool hands out: rows that only fill up a batch write there.

        def new_pool(heads: int, dim: int) -> Pool:
            described = self.format.tensors(num_pages + 1, heads, dim, stored)
            return tuple(torch.empty(shape, dtype=kind, device=device) for shape, kind in described)

        self.keys = [new_pool(h, d) for h, d in heads_and_dims]
        self.values = [new_pool(h, d) for h, d in heads_and_dims]
        self.open_keys, self.open_values = (
            [
                torch.empty(((self.pool.num_open + 1) * PAGE_TOKENS, h, d), dtype=dtype, device=device)
                for h, d in heads_and_dims
                if self.kv.has_open
            ]
            for _ in range(2)
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools and open blocks."""
        pools = [t for pool in (*self.keys, *self.values) for t in pool]
        return sum(t.numel() * t.element_size() for t in (*pools, *self.open_keys, *self.open_values))

    @property
    def is_exact(self) -> bool:
        """Whether what is read is what was written, bit for bit."""
        return self.kv.name == str(self.dtype).removeprefix("torch.")

    def write(self, layer: int, writes: Writes, k: Tensor, v: Tensor) -> None:
        """Store some of the packed k and v [T, kv_heads, head_dim]."""
        for which, (x, pool) in enumerate(((k, self.keys[layer]), (v, self.values[layer]))):
            opened = (self.open_keys, self.open_values)[which][layer] if self.kv.has_open else pool[0]
            if len(writes.slots):
                taken = x if writes.rows is None else x[writes.rows]
                opened.index_copy_(0, writes.slots, taken.to(opened.dtype))
            if writes.blocks is not None:
                self.format.quantize(x, writes.blocks.rows, pool, writes.blocks.pages)
            if writes.filled is not None:
                self.format.quantize(opened, writes.filled.rows, pool, writes.filled.pages)

    def read(
        self, layer: int, pages: np.ndarray, start: int, stop: int, open_block: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """K and V of tokens start..stop-1 of a block table, in the model's dtype: views where numbers are stored as
        they are in consecutive pages, else copies.

        open_block: the sequence's, which holds what follows the last whole page before `stop`; None where `stop` is not
        the sequence's end or ends a page. Returns two tensors [stop - start, kv_heads, head_dim].
        """
        first, last = start // PAGE_TOKENS, pages_for(stop)
        rest = stop % PAGE_TOKENS if self.kv.has_open and open_block is not None else 0
        used = pages[first : last - 1 if rest else last]
        if self.is_exact and int(used[-1]) - int(used[0]) == len(used) - 1 and bool(np.all(np.diff(used) == 1)):
            low = int(used[0]) * PAGE_TOKENS + start - first * PAGE_TOKENS
            return self.keys[layer][0][low : low + stop - start], self.values[layer][0][low : low + stop - start]
        if self.is_exact:
            slots = torch.from_numpy(slots_of(pages, start, stop)).to(self.device)
            return self.keys[layer][0].index_select(0, slots), self.values[layer][0].index_select(0, slots)
        index = torch.from_numpy(used.astype(np.int64)).to(self.device)
        found = [self.format.dequantize_ref(p, index, self.dtype) for p in (self.keys[layer], self.values[layer])]
        if rest:
            assert open_block is not None
            low = open_block * PAGE_TOKENS
            opened = (self.open_keys[layer], self.open_values[layer])
            found = [torch.cat([x, y[low : low + rest]]) for x, y in zip(found, opened, strict=True)]
        low, high = start - first * PAGE_TOKENS, stop - first * PAGE_TOKENS
        return found[0][low:high], found[1][low:high]

    def stored(self, layer: int, pages: np.ndarray, start: int, stop: int) -> dict[str, Tensor]:
        """What is stored for tokens start..stop-1, bit for bit, by name. Raises ValueError where the format stores only
        whole pages and these are not."""
        return {name: tensor[rows] for name, tensor, rows in self._stored(layer, pages, start, stop)}

    def described(self, layer: int, pages: np.ndarray, start: int, stop: int) -> list[tuple[str, torch.dtype, Shape]]:
        """Name, type and shape of each tensor that `stored` gives."""
        return [
            (name, tensor.dtype, (len(rows), *tensor.shape[1:]))
            for name, tensor, rows in self._stored(layer, pages, start, stop)
        ]

    def restore(self, layer: int, pages: np.ndarray, start: int, stop: int, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `stored` gave. Raises KeyError where a tensor is missing, ValueError where it does not fit."""
        for name, tensor, rows in self._stored(layer, pages, start, stop):
            found = tensors[name]
            if found.dtype != tensor.dtype or found.shape != (len(rows), *tensor.shape[1:]):
                raise ValueError(f"{name} has another form than what the cache stores")
            tensor[rows] = found.to(self.device)

    def _stored(self, layer: int, pages: np.ndarray, start: int, stop: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Every tensor of a layer's pools: its name, itself, and the rows in it that belong to some tokens."""
        if self.kv.has_open and (start % PAGE_TOKENS or stop % PAGE_TOKENS):
            raise ValueError("this K/V format stores whole pages")
        whole = pages[start // PAGE_TOKENS : pages_for(stop)].astype(np.int64)
        rows = {PAGE_TOKENS: slots_of(pages, start, stop), 1: whole}
        for kind, pool in (("key", self.keys[layer]), ("value", self.values[layer])):
            for number, (tensor, page_rows) in enumerate(zip(pool, self.format.PAGE_ROWS, strict=True)):
                name = f"{kind}.{layer}" if number == 0 else f"{kind}.{layer}.{number}"
                yield name, tensor, torch.from_numpy(rows[page_rows]).to(self.device)
