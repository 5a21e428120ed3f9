"""Decode: one token for every live sequence per step. The batch outlives waves: sequences join after their prefill,
leave when their answer is complete, and their pages return to the pool at once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from longbatch.attention import DecodeStep, decode_attention
from longbatch.cache import PAGE_TOKENS, Blocks, KVCache, Writes
from longbatch.engine.prefill import RopeTable
from longbatch.engine.sequence import Sequence
from longbatch.models.decoder import Decoder


class DecodeBatch:
    """The live sequences and the tensors that describe them to the model.

    Tensors are rebuilt when sequences join or leave; between such steps they advance on the device.
    """

    def __init__(self, model: Decoder, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self.sequences: list[Sequence] = []
        self._tokens: Tensor | None = None
        self._dirty = True

    def __len__(self) -> int:
        return len(self.sequences)

    def join(self, sequences: list[Sequence], tokens: list[int]) -> None:
        """Add sequences, each with the token sampled from its prefill."""
        joined = torch.tensor(tokens, device=self._cache.device)
        self._tokens = joined if self._tokens is None else torch.cat([self._tokens, joined])
        self.sequences = [*self.sequences, *sequences]
        self._dirty = True

    def park(self, count: int) -> list[tuple[Sequence, int]]:
        """Take the last `count` sequences out of the batch, each with its newest token, to join again later."""
        assert self._tokens is not None
        tokens = self._tokens.tolist()
        parked = list(zip(self.sequences[-count:], tokens[-count:], strict=True))
        self.sequences = self.sequences[:-count]
        self._tokens = self._tokens[:-count]
        self._dirty = True
        return parked

    def keep(self, live: list[bool]) -> None:
        """Drop the sequences whose entry is False."""
        assert self._tokens is not None
        if not all(live):
            self._tokens = self._tokens[torch.tensor(live, device=self._tokens.device)]
            self.sequences = [s for s, alive in zip(self.sequences, live, strict=True) if alive]
            self._dirty = True

    def feed(self, tokens: Tensor) -> None:
        """Set the newest token of each sequence: int64 [B]."""
        self._tokens = tokens

    @torch.inference_mode()
    def forward(self) -> Tensor:
        """Run the newest token of each sequence: logits float32 [B, vocab] for the next one."""
        assert self._tokens is not None
        if self._dirty:
            self._rebuild()
        else:
            self._positions += 1
        step = self._step()
        model, positions = self._model, self._positions
        writes = self._writes()
        x = model.embed(self._tokens)
        ropes = RopeTable(model, positions, self._rope_lengths)
        for index, layer in enumerate(model.layers):
            spec = layer.spec
            q, k, v = layer.qkv(layer.norm(x), ropes.of(layer))
            self._cache.write(index, writes, k, v)
            attention = decode_attention(
                q,
                self._cache,
                index,
                step,
                scale=spec.scale,
                window=spec.window,
                softcap=spec.softcap,
                sinks=layer.sinks,
            )
            x = layer.mlp(layer.out(x, attention))
        return model.logits(model.final_norm(x))

    def _rebuild(self) -> None:
        """Positions, block tables and rope lengths from the sequences."""
        device = self._cache.device
        held = [s.pages for s in self.sequences if s.pages is not None]
        assert len(held) == len(self.sequences)
        self._tables = tuple(held)
        self._positions = torch.tensor([s.num_cached for s in self.sequences], device=device)
        lengths = [len(s.prompt.ids) + s.max_tokens for s in self.sequences]
        self._rope_lengths = torch.tensor(lengths, device=device)
        table = np.zeros((len(held), max(map(len, held))), dtype=np.int32)
        for b, pages in enumerate(held):
            table[b, : len(pages)] = pages
        self._table = torch.from_numpy(table).to(device)
        self._open: tuple[int, ...] | None = None
        if self._cache.kv.has_open:
            self._open = tuple(s.open_block for s in self.sequences if s.open_block is not None)
            assert len(self._open) == len(self.sequences)
            self._open_blocks = torch.tensor(self._open, dtype=torch.int32, device=device)
        self._dirty = False

    def _writes(self) -> Writes:
        """Where each sequence's newest token goes, and which open blocks it fills."""
        blocks = self._table.gather(1, (self._positions // PAGE_TOKENS)[:, None])[:, 0]
        if self._open is None:
            return Writes(blocks.long() * PAGE_TOKENS + self._positions % PAGE_TOKENS)
        slots = self._open_blocks.long() * PAGE_TOKENS + self._positions % PAGE_TOKENS
        full = [b for b, s in enumerate(self.sequences) if (s.num_cached + 1) % PAGE_TOKENS == 0]
        if not full:
            return Writes(slots)
        index = torch.tensor(full, device=self._cache.device)
        return Writes(slots, filled=Blocks(self._open_blocks[index].long() * PAGE_TOKENS, blocks[index].long()))

    def _step(self) -> DecodeStep:
        lengths = tuple(s.num_cached + 1 for s in self.sequences)
        if self._cache.device.type != "cuda":
            return DecodeStep(self._tables, lengths, open_blocks=self._open)
        return DecodeStep(
            self._tables,
            lengths,
            self._table,
            (self._positions + 1).to(torch.int32),
            self._open,
            None if self._open is None else self._open_blocks,
        )
