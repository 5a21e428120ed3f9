"""One layer over one whole document, dense or by patterns, outside of any run: what a search looks at.

Only K and V of that layer lie on the device as a whole. Hidden states lie where the search keeps them, perhaps in host
memory, and pass through the device tile by tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longbatch.attention import Piece, Segment, SparseLayer, attend
from longbatch.attention.state import with_sinks
from longbatch.models.decoder import Decoder, Layer
from longbatch.models.rope import RopeValues
from longbatch.plan.sparse_cost import causal_pairs
from longbatch.sparsity import LayerPatterns


@dataclass(slots=True)
class Document:
    """hidden: [N, hidden] before the layer at hand."""

    hidden: Tensor

    @property
    def length(self) -> int:
        """Tokens."""
        return self.hidden.shape[0]


class LayerPass:
    """A layer over a document: K and V [N, Hkv, D] on the model's device, queries tile by tile."""

    def __init__(self, model: Decoder, index: int, document: Document, tile_rows: int) -> None:
        self.layer: Layer = model.layers[index]
        self.document = document
        self._rope = None if self.layer.rope_index is None else model.ropes[self.layer.rope_index]
        self._device = model.device
        self._tile_rows = tile_rows
        spec, length = self.layer.spec, document.length
        shape = (length, spec.num_kv_heads, spec.head_dim)
        self.k = torch.empty(shape, dtype=model.dtype, device=model.device)
        self.v = torch.empty_like(self.k)
        for rows in self.tiles():
            self.k[rows], self.v[rows] = self.layer.kv(self.layer.norm(self.hidden(rows)), self._turns(rows))

    def tiles(self) -> Iterator[slice]:
        """Rows of each tile, in order."""
        for start in range(0, self.document.length, self._tile_rows):
            yield slice(start, min(start + self._tile_rows, self.document.length))

    def hidden(self, rows: slice) -> Tensor:
        """Hidden states of some rows on the model's device; there, they are the document's own."""
        return self.document.hidden[rows].to(self._device, non_blocking=True)

    def queries(self, rows: slice) -> Tensor:
        """Q [n, H, D] of some rows."""
        return self.layer.q(self.layer.norm(self.hidden(rows)), self._turns(rows))

    def dense(self, rows: slice, q: Tensor) -> Tensor:
        """Dense attention [n, H, D] as the layer declares it."""
        spec = self.layer.spec
        segment = Segment(0, 0, self.document.length)
        return attend(
            q,
            Piece(segment, rows.start, rows.stop),
            lambda extent, start, stop: (self.k[start:stop], self.v[start:stop]),
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=self.layer.sinks,
        )

    def advance(self, patterns: LayerPatterns | None) -> None:
        """Replace the document's hidden states by those after the layer; None: dense."""
        sparse = None if patterns is None else SparsePass(self, patterns)
        for rows in self.tiles():
            q = self.queries(rows)
            attention = self.dense(rows, q) if sparse is None else sparse.attend(rows, q)
            x = self.layer.mlp(self.layer.out(self.hidden(rows), attention))
            if x.data_ptr() != self.document.hidden[rows].data_ptr():
                self.document.hidden[rows] = x.to(self.document.hidden.device)

    def _turns(self, rows: slice) -> RopeValues | None:
        if self._rope is None:
            return None
        positions = torch.arange(rows.start, rows.stop, device=self._device)
        return self._rope.cos_sin(positions, torch.full_like(positions, self.document.length))


class SparsePass:
    """Some heads of a layer over a document, under patterns. heads: the query heads that run, ascending. kv_heads: the
    kv heads that they read, one for each run of equally many of them; None for both: all."""

    def __init__(
        self, run: LayerPass, patterns: LayerPatterns, heads: list[int] | None = None, kv_heads: list[int] | None = None
    ) -> None:
        spec, length = run.layer.spec, run.document.length
        self._heads = heads
        self._k, self._v = run.k, run.v
        if kv_heads is not None:
            self._k, self._v = run.k[:, kv_heads], run.v[:, kv_heads]
        sinks = run.layer.sinks
        self._sinks = sinks if sinks is None or heads is None else sinks[heads]
        num_heads = spec.num_heads if heads is None else len(heads)
        self._sparse = SparseLayer(patterns, num_heads, self._k.shape[1], spec.scale)
        last = min(length, self._sparse.last_queries)
        q_last = self._picked(run.queries(slice(length - last, length))) if last else None
        self._selection = self._sparse.select(q_last, self._k, self._v, q_offset=length - last, rows=(0, length))
        self._causal = causal_pairs(length)

    def attend(self, rows: slice, q: Tensor) -> Tensor:
        """Attention [n, heads, D] for the layer's queries [n, H, D] of some rows."""
        state = self._sparse.attend(self._picked(q), self._k, self._v, self._selection, q_offset=rows.start)
        return with_sinks(state, self._sinks)

    def shares(self) -> list[float]:
        """Density of each selection, once all rows have been attended."""
        shares: list[float] = (self._selection.pairs_each / self._causal).tolist()
        return shares

    def _picked(self, q: Tensor) -> Tensor:
        return q if self._heads is None else q[:, self._heads]
