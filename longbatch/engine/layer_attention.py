"""One layer's attention over one prefill step: dense, a tile at once or piece by piece, or by what the layer's patterns
select."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longbatch.attention import Extent, Piece, Segment, SparseLayer, Step, Tile, attend
from longbatch.attention.choice import TORCH, DenseShape
from longbatch.attention.kernels import attend_tile
from longbatch.attention.packed import Read, TileWork
from longbatch.attention.sparse import LayerSelection
from longbatch.attention.state import with_sinks
from longbatch.cache import KVCache
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
        """Attention of a tile's queries [n, H, D]: [n, H, D]."""
        whole = self._dense_tile(q, tile)
        outs, low = [], 0
        for piece in tile.pieces:
            rows = slice(low, low + piece.stop - piece.start)
            if whole is None:
                outs.append(self._piece(q[rows], piece))
            elif self._is_dense(piece):
                self._count(piece)
            else:
                whole[rows] = self._piece(q[rows], piece)
            low = rows.stop
        if whole is not None:
            return whole
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _is_dense(self, piece: Piece) -> bool:
        executed = piece.segment.executed
        return executed is None or not executed.sparse or self._patterns is None

    def _piece(self, q: Tensor, piece: Piece) -> Tensor:
        if self._is_dense(piece):
            out = self._dense(q, piece)
        else:
            assert self._patterns is not None
            rows = self._attended(piece.segment)
            if piece.start == rows[0]:
                self._selected = self._select(piece.segment, self._patterns, rows)
            assert self._selected is not None
            out = self._sparse(q, piece, self._patterns, self._selected)
        self._count(piece)
        return out

    def _attended(self, segment: Segment) -> tuple[int, int]:
        """Positions of the segment whose queries are attended."""
        if self._only_reads:
            return segment.reads[0][0], segment.reads[-1][1]
        return segment.offset, segment.stop

    def _count(self, piece: Piece) -> None:
        """After the last piece of a segment whose attention is counted. Layers with a window are not: they are the
        same, sparse or dense."""
        executed = piece.segment.executed
        if executed is None:
            return
        start, stop = self._attended(piece.segment)
        if piece.stop != stop:
            return
        spec = self._layer.spec
        if spec.window is None:
            causal = spec.num_heads * (stop * (stop + 1) - start * (start + 1)) / 2.0
            executed.add(causal if self._selected is None else self._selected.selection.pairs, causal)
        self._selected = None

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
        if self._cache.is_exact and segment.all_pages is not None:
            return self._cache.read(self._index, segment.all_pages, 0, segment.stop)
        found = self._joined(tuple(Read(extent, extent.start, extent.stop) for extent in segment.extents))
        # Nobody asks for what was converted again: it is in what is returned.
        self._converted = None
        return found

    def _joined(self, reads: tuple[Read, ...]) -> tuple[Tensor, Tensor]:
        """K and V of some reads, one after the other; of no reads, those of the step."""
        if not reads:
            return self._keys, self._values
        parts = [self._read(*read) for read in reads]
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

    def _dense_tile(self, q: Tensor, tile: Tile) -> Tensor | None:
        """Attention of the tile's dense pieces by the kernel that is the fastest for it, [n, H, D], the other rows
        undefined; None where there are none, or torch is the fastest, piece by piece."""
        step, shape = self._step, DenseShape.of(self._layer.spec)
        choice = None if step.dense is None else step.dense.of(shape)
        if choice is None or not any(map(self._is_dense, tile.pieces)):
            return None
        key = id(tile), shape, self._patterns is None
        if key not in step.works:
            exact = self._cache.is_exact
            step.works[key] = TileWork.of(tile, self._layer.spec.window, exact_pages=exact, dense=self._is_dense)
        work = step.works[key]
        kernel = choice.pick(work.num_queries, work.num_keys)
        if kernel == TORCH:
            return None
        return with_sinks(attend_tile(kernel, q, work, self._joined, scale=self._layer.spec.scale), self._layer.sinks)

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
