"""Decode: one token for every live sequence per step. The batch outlives waves: sequences join after their prefill,
leave when their answer is complete, and their pages return to the pool at once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from longbatch.attention import SPLIT_TOKENS, DecodeStep, DeviceRows, decode_attention
from longbatch.cache import KVCache
from longbatch.engine.decode_rows import OPEN_BLOCK, POSITION, ROPE_LENGTH, TOKEN, DecodeRows
from longbatch.engine.graphs import StepGraphs, StepShape, round_up
from longbatch.engine.prefill import RopeTable
from longbatch.engine.sequence import Sequence
from longbatch.models.decoder import Decoder


def can_be_captured(model: Decoder, cache: KVCache) -> bool:
    """Whether a decode step may be a CUDA graph: its attention runs by kernels alone, and so does the model."""
    return cache.device.type == "cuda" and model.can_be_captured and all(s.softcap is None for s in model.spec.layers)


class DecodeBatch:
    """The live sequences, and their rows on the device, which steps advance there.

    most_rows: most sequences at once. Where steps are CUDA graphs the rows are filled up to a round number; elsewhere
    there are as many as sequences.
    """

    def __init__(self, model: Decoder, cache: KVCache, most_rows: int) -> None:
        self._model = model
        self._cache = cache
        self._rows = DecodeRows(cache, most_rows)
        self._graphs: StepGraphs | None = None
        if can_be_captured(model, cache):
            self._graphs = StepGraphs(self._forward, most_rows, model.spec.vocab_size, cache.device)
        self.clear()

    def __len__(self) -> int:
        return len(self.sequences)

    def clear(self) -> None:
        """Forget all sequences."""
        self.sequences: list[Sequence] = []
        # What the device has too: the position of each sequence's newest token.
        self._positions = np.zeros(0, dtype=np.int64)

    def release_graphs(self) -> None:
        """Give back the memory of the steps that were captured."""
        if self._graphs is not None:
            self._graphs.release()

    def join(self, sequences: list[Sequence], tokens: list[int]) -> None:
        """Add sequences, each with its newest token: the one sampled from its prefill, or where it was parked."""
        count = len(self)
        self._rows.put(count, self._size(count + len(sequences)), sequences, tokens)
        self.sequences = [*self.sequences, *sequences]
        self._positions = np.append(self._positions, [sequence.num_cached for sequence in sequences])

    def park(self, count: int) -> list[tuple[Sequence, int]]:
        """Take the last `count` sequences out of the batch, each with its newest token, to join again later."""
        tokens = self._rows.integers[TOKEN, : len(self)].tolist()
        parked = list(zip(self.sequences[-count:], tokens[-count:], strict=True))
        self.keep([True] * (len(self) - count) + [False] * count)
        return parked

    def keep(self, live: list[bool]) -> None:
        """Drop the sequences whose entry is False."""
        rows = [b for b, alive in enumerate(live) if alive]
        if len(rows) < len(live):
            self._rows.take(rows, self._size(len(rows)))
            self.sequences = [self.sequences[b] for b in rows]
            self._positions = self._positions[rows]

    def feed(self, tokens: Tensor) -> None:
        """Set the newest token of each sequence, int64 [B]; the one before it is cached."""
        with torch.inference_mode():
            self._rows.advance(tokens.to(self._cache.device))
        self._positions += 1

    def draw(self, logits: Tensor) -> Tensor:
        """Sample from the logits of `forward` and feed the tokens, all on the device: int64 [B], -1 where a row's
        logits cannot be used. Repetition penalties are not applied."""
        with torch.inference_mode():
            warm = any(sequence.request.sampling.temperature > 0 for sequence in self.sequences)
            found = self._rows.draw(logits, warm=warm)
        self._positions += 1
        return found

    @property
    def shape(self) -> StepShape:
        """What the next step runs as."""
        splits = -(-int(self._positions.max() + 1) // SPLIT_TOKENS)
        return StepShape(self._size(len(self)), splits if self._graphs is None else round_up(splits))

    @torch.inference_mode()
    def forward(self, *, as_graph: bool = True) -> Tensor:
        """Run the newest token of each sequence: logits float32 [B, vocab] for the next one, valid until the next
        call. as_graph: False for the step as it is, also where it could be a CUDA graph."""
        if self._graphs is None or not as_graph:
            return self._forward(self.shape)[: len(self)]
        return self._graphs.run(self.shape)[: len(self)]

    def _forward(self, shape: StepShape, out: Tensor | None = None) -> Tensor:
        """The first rows through the model, into `out` if given."""
        model, cache, rows = self._model, self._cache, self._rows
        integers = rows.integers[:, : shape.rows]
        writes, step = rows.writes(shape.rows), self.seen(shape)
        x = model.embed(integers[TOKEN])
        ropes = RopeTable(model, integers[POSITION], integers[ROPE_LENGTH])
        for index, layer in enumerate(model.layers):
            spec = layer.spec
            q, k, v = layer.qkv(layer.norm(x), ropes.of(layer))
            cache.write(index, writes, k, v)
            attention = decode_attention(
                q,
                cache,
                index,
                step,
                scale=spec.scale,
                window=spec.window,
                softcap=spec.softcap,
                sinks=layer.sinks,
            )
            x = layer.mlp(layer.out(x, attention))
        return model.logits(model.final_norm(x), out)

    def seen(self, shape: StepShape) -> DecodeStep:
        """What attention sees of the first rows in a step."""
        rows, device = self._rows, None
        if self._cache.device.type == "cuda":
            device = DeviceRows(
                rows.table[: shape.rows],
                (rows.integers[POSITION, : shape.rows] + 1).to(torch.int32),
                rows.integers[OPEN_BLOCK, : shape.rows].to(torch.int32),
            )
        tables = tuple(held for s in self.sequences if (held := s.pages) is not None)
        blocks = tuple(s.open_block for s in self.sequences if s.open_block is not None)
        lengths = tuple((self._positions + 1).tolist())
        return DecodeStep(shape.splits * SPLIT_TOKENS, tables, lengths, blocks or None, device)

    def _size(self, count: int) -> int:
        """Rows that so many sequences run as."""
        return count if self._graphs is None else min(round_up(count), self._rows.most)
