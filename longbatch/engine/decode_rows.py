"""What the device knows of each row of a decode batch: buffers that steps advance on the device, without the host."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longbatch.cache import PAGE_TOKENS, Blocks, KVCache, Writes
from longbatch.engine.sampler import draw_tokens, numbers
from longbatch.engine.sequence import Sequence

# Rows of `integers`. Those of a draw adjoin, and so do those that a step advances.
TOKEN, ROPE_LENGTH, OPEN_BLOCK, TOP_K, SEED, STEP, POSITION = range(7)


class DecodeRows:
    """Buffers for `most` rows, and one row more: a pattern for the rows that fill a batch up to a round number. Those
    write to the cache's spare page, at position 0 over and over, and nobody reads what comes of them.

    integers: int64 [7, most + 1]: newest token, length that scaled rotary embeddings go by, open block, top-k, seed,
    tokens sampled, position of the newest token. floats: float32 [3, most + 1]: slope, top-p and min-p of the draw.
    table: block tables, int32 [most + 1, pages].
    """

    def __init__(self, cache: KVCache, most: int) -> None:
        device, pool = cache.device, cache.pool
        self.most = most
        self._cache = cache
        self.integers = torch.zeros((7, most + 1), dtype=torch.int64, device=device)
        self.integers[ROPE_LENGTH, most] = 1
        self.integers[OPEN_BLOCK, most] = pool.num_open
        self.floats = torch.zeros((3, most + 1), dtype=torch.float32, device=device)
        self.table = torch.zeros((most + 1, pool.num_pages), dtype=torch.int32, device=device)
        self.table[most, 0] = pool.num_pages
        # The columns of the table that are in use.
        self._width = 1

    @torch.inference_mode()
    def put(self, first: int, size: int, sequences: Items[Sequence], tokens: Items[int]) -> None:
        """Write the rows of sequences from row `first` on, each with its newest token, and fill up to `size` rows."""
        integers = np.zeros((7, len(sequences)), dtype=np.int64)
        floats = np.zeros((3, len(sequences)), dtype=np.float32)
        tables = [held for s in sequences if (held := s.pages) is not None]
        assert len(tables) == len(sequences)
        table = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
        self._width = max(self._width, table.shape[1])
        for i, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            assert sequence.stop is not None
            (top_k, seed), floats[:, i] = numbers(sequence.request.sampling, sequence.seed)
            rope_length, open_block = len(sequence.prompt.ids) + sequence.max_tokens, sequence.open_block or 0
            sampled, position = sequence.stop.num_tokens, sequence.num_cached
            integers[:, i] = token, rope_length, open_block, top_k, seed, sampled, position
            table[i, : len(tables[i])] = tables[i]
        part = slice(first, first + len(sequences))
        self.integers[:, part] = self._sent(integers)
        self.floats[:, part] = self._sent(floats)
        self.table[part, : table.shape[1]] = self._sent(table)
        rest = slice(part.stop, size)
        if part.stop < size:
            for buffer in self._buffers:
                buffer[rest] = buffer[self.most]

    @torch.inference_mode()
    def take(self, rows: Items[int], size: int) -> None:
        """Keep some rows in this order, and fill up to `size` rows."""
        index = self._sent(np.array([*rows, *[self.most] * (size - len(rows))], dtype=np.int64))
        for buffer in self._buffers:
            buffer[:size] = buffer[index]

    def advance(self, tokens: Tensor) -> None:
        """Give the first rows their next tokens, int64 [B]."""
        count = len(tokens)
        self.integers[TOKEN, :count] = tokens
        self.integers[STEP:, :count] += 1

    def draw(self, logits: Tensor, *, warm: bool) -> Tensor:
        """Sample the next tokens of the first rows and advance by them: int64 [B], -1 where the logits of [B, vocab]
        cannot be used. warm: whether any row has a temperature."""
        count = len(logits)
        tokens, found = draw_tokens(logits, self.integers[TOP_K : STEP + 1, :count], self.floats[:, :count], warm=warm)
        self.advance(tokens)
        return found

    def writes(self, size: int) -> Writes:
        """Where the newest tokens of the first `size` rows go, and which open blocks they fill."""
        positions = self.integers[POSITION, :size]
        pages = self.table[:size].gather(1, (positions // PAGE_TOKENS)[:, None])[:, 0].long()
        places = positions % PAGE_TOKENS
        if not self._cache.kv.has_open:
            return Writes(pages * PAGE_TOKENS + places)
        first = self.integers[OPEN_BLOCK, :size] * PAGE_TOKENS
        filled = torch.where(places == PAGE_TOKENS - 1, pages, -1)
        return Writes(first + places, filled=Blocks(first, filled))

    @property
    def _buffers(self) -> tuple[Tensor, ...]:
        """All of them, rows first."""
        return self.integers.t(), self.floats.t(), self.table[:, : self._width]

    def _sent(self, array: NDArray[np.generic]) -> Tensor:
        """An array on the device, which the host does not wait for."""
        host = torch.from_numpy(array)
        device = self._cache.device
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
