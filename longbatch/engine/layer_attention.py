"""One layer's attention over one prefill step: dense piece by piece, or by what the layer's patterns select."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longbatch.attention import Extent, Piece, Segment, SparseLayer, Step, Tile, attend
from longbatch.attention.sparse import LayerSelection
from longbatch.attention.state import with_sinks
from longbatch.cache import PAGE_TOKENS, KVCache
from longbatch.models.decoder import Layer

# Gives the queries [n, H, D] of some packed rows.
Queries = Callable[[slice], Tensor]


@dataclass(frozen=True, slots=True)
class _Selected:
    """What a segment selected, and its keys and values of positions 0..stop-1."""

    selection: LayerSelection
    k: Tensor
    v: Tensor


class LayerAttention:
    """Made when K and V of all tokens of the step exist, [T, kv_heads, head_dim], and those that are kept are stored.

    Tiles come in order. A segment that runs sparse selects when its first tile comes, from its last queries, whose
    hidden states no tile may have changed yet; what it selected is dropped after its last tile. queries: gives them,
    always the same rows at once, so that no bit depends on what else is in the step. only_reads: only the positions
    that somebody reads are attended, as in the last layer.
    """

    def __init__(
        self,
        layer: Layer,
        index: int,
        keys: tuple[Tensor, Tensor],
        cache: KVCache,
        step: Step,
        queries: Queries,
        *,
        only_reads: bool = False,
    ) -> None:
        self._layer, self._index, self._cache, self._step = layer, index, cache, step
        self._keys, self._values = keys
        self._queries, self._only_reads = queries, only_reads
        self._patterns = None if step.attention is None else step.attention[index]
        self._selected: _Selected | None = None
        self._converted: tuple[Extent, Tensor, Tensor] | None = None

    def tile(self, q: Tensor, tile: Tile) -> Tensor:
        """Attention of a tile's queries [n, H, D], piece by piece: [n, H, D]."""
        outs, low = [], 0
        for piece in tile.pieces:
            high = low + piece.stop - piece.start
            outs.append(self._piece(q[low:high], piece))
            low = high
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _piece(self, q: Tensor, piece: Piece) -> Tensor:
        segment, executed = piece.segment, piece.segment.executed
        if executed is None:
            return self._dense(q, piece)
        # Positions of the segment whose queries are attended.
        start, stop = segment.offset, segment.stop
        if self._only_reads:
            start, stop = segment.reads[0][0], segment.reads[-1][1]
        if executed.sparse and self._patterns is not None:
            if piece.start == start:
                self._selected = self._select(segment, self._patterns, (start, stop))
            assert self._selected is not None
            out = self._sparse(q, piece, self._patterns, self._selected)
        else:
            out = self._dense(q, piece)
        spec = self._layer.spec
        # Layers with a window are not counted: they are the same, sparse or dense.
        if piece.stop == stop and spec.window is None:
            causal = spec.num_heads * (stop * (stop + 1) - start * (start + 1)) / 2.0
            executed.add(causal if self._selected is None else self._selected.selection.pairs, causal)
        if piece.stop == stop:
            self._selected = None
        return out

    def _select(self, segment: Segment, patterns: SparseLayer, rows: tuple[int, int]) -> _Selected:
        k, v = self._whole(segment)
        last = min(segment.length, patterns.last_queries)
        stop = segment.base + segment.length
        q = self._queries(slice(stop - last, stop)) if last else None
        offset = segment.stop - last
        return _Selected(patterns.select(q, k, v, q_offset=offset, rows=(rows[0], segment.stop), counted=rows), k, v)

    def _whole(self, segment: Segment) -> tuple[Tensor, Tensor]:
        """K and V of positions 0..stop-1. The segment's own are in its pages too where an earlier chunk's are; but what
        is read there may be rounded."""
        if len(segment.context) == 1 and self._cache.is_exact:
            pages = segment.context[0].pages
            if pages is not None and len(pages) * PAGE_TOKENS >= segment.stop:
                return self._cache.read(self._index, pages, 0, segment.stop)
        parts = [self._read(extent, extent.start, extent.stop) for extent in segment.extents]
        # Nobody asks for what was converted again: it is in what is returned.
        self._converted = None
        if len(parts) == 1:
            return parts[0]
        return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])

    def _read(self, extent: Extent, start: int, stop: int) -> tuple[Tensor, Tensor]:
        if extent.base is None:
            return self._from_pages(extent, start, stop)
        low = extent.base + start - extent.start
        return self._keys[low : low + stop - start], self._values[low : low + stop - start]

    def _from_pages(self, extent: Extent, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """From the cache. What has to be converted is converted once for all tiles, the whole extent, and kept until
        another extent is asked for; of a layer with a window, only what is asked for."""
        assert extent.pages is not None
        if self._cache.is_exact or self._layer.spec.window is not None:
            return self._cache.read(self._index, extent.pages, start, stop)
        if self._converted is None or self._converted[0] is not extent:
            self._converted = None
            self._converted = (extent, *self._cache.read(self._index, extent.pages, extent.start, extent.stop))
        _, k, v = self._converted
        return k[start - extent.start : stop - extent.start], v[start - extent.start : stop - extent.start]

    def _dense(self, q: Tensor, piece: Piece) -> Tensor:
        """In float32 keys are summed up tile by tile, so that chunks and shared beginnings, which end at tiles, change
        no bit."""
        spec = self._layer.spec
        return attend(
            q,
            piece,
            self._read,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=self._layer.sinks,
            block=self._step.tile_rows if q.dtype == torch.float32 else None,
        )

    def _sparse(self, q: Tensor, piece: Piece, patterns: SparseLayer, selected: _Selected) -> Tensor:
        state = patterns.attend(q, selected.k, selected.v, selected.selection, q_offset=piece.start)
        return with_sinks(state, self._layer.sinks)
