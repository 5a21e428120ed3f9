"""Dense attention of all pieces of a tile together: which queries go with which keys, in as few launches as there are
places where keys lie.

Keys of a piece's own segment lie in the step. Those before it lie in pages or in another segment of the step, and every
query sees all of them: they are attended to apart, and the states merged. Behind a window few of them are seen, and
these are joined with the segment's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from longbatch.attention.step import Extent, Piece, Tile


class Read(NamedTuple):
    """Keys of positions start..stop-1 of an extent."""

    extent: Extent
    start: int
    stop: int


# Gives K and V [n, kv_heads, head_dim] of some reads, one after the other; of no reads, those of the step's tokens.
ReadKeys = Callable[[tuple[Read, ...]], tuple[Tensor, Tensor]]


class Part(NamedTuple):
    """One piece among the queries and the keys of a batch. first_query: its first row in the tile, whose query stands
    q_offset keys behind the piece's first one. first_key: row of that key."""

    first_query: int
    num_queries: int
    q_offset: int
    first_key: int
    num_keys: int


@dataclass(slots=True)
class Batch:
    """Pieces whose keys lie in the same tensors. parts: by their queries, ascending. causal: whether keys follow the
    first query, so that each sees its own; else all lie before. prepared: what kernels made of it, by their names."""

    reads: tuple[Read, ...]
    parts: tuple[Part, ...]
    causal: bool
    prepared: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TileWork:
    """The batches of a tile's pieces, the same in every layer of one shape. before: over keys before the pieces'
    segments. own: each piece is in one of these. window: None where no query of the tile has more keys before it.
    num_queries, num_keys: of a piece, on average, the keys up to its end."""

    tile: Tile
    window: int | None
    before: tuple[Batch, ...]
    own: tuple[Batch, ...]
    num_queries: float
    num_keys: float

    @classmethod
    def of(cls, tile: Tile, window: int | None, *, exact_pages: bool, dense: Callable[[Piece], bool]) -> TileWork:
        """The work of the tile's dense pieces, of which there is one at least. exact_pages: whether pages give back
        what was written."""
        pieces, row = [], 0
        for piece in tile.pieces:
            if dense(piece):
                pieces.append((row, piece))
            row += piece.stop - piece.start
        if window is not None and all(piece.stop <= window for _, piece in pieces):
            window = None
        builder = _Builder(window, exact_pages)
        for row, piece in pieces:
            builder.add(row, piece)
        num_queries = sum(piece.stop - piece.start for _, piece in pieces) / len(pieces)
        num_keys = sum(piece.stop for _, piece in pieces) / len(pieces)
        return cls(tile, window, *builder.batches(), num_queries, num_keys)


class _Builder:
    """Sorts pieces by where their keys lie."""

    def __init__(self, window: int | None, exact_pages: bool) -> None:
        self._window, self._exact = window, exact_pages
        self._step: list[Part] = []
        self._joined: list[Part] = []
        self._joined_reads: list[Read] = []
        self._num_joined = 0
        # By what they read; None: from the step.
        self._whole: dict[int, tuple[Read, list[Part]]] = {}
        self._before: dict[int, tuple[Read | None, list[Part]]] = {}

    def add(self, row: int, piece: Piece) -> None:
        segment = piece.segment
        low = 0 if self._window is None else max(0, piece.start - self._window + 1)
        pages = segment.all_pages if self._exact else None
        num_queries = piece.stop - piece.start
        if self._window is not None and low < segment.offset:
            extents = segment.extents if pages is None else (Extent(0, segment.stop, pages=pages),)
            reads = [
                Read(extent, max(low, extent.start), min(piece.stop, extent.stop))
                for extent in extents
                if max(low, extent.start) < min(piece.stop, extent.stop)
            ]
            self._joined_reads += reads
            self._joined.append(Part(row, num_queries, piece.start - low, self._num_joined, piece.stop - low))
            self._num_joined += piece.stop - low
        elif segment.offset and self._window is None and pages is not None:
            read = Read(Extent(0, segment.stop, pages=pages), 0, segment.stop)
            _, parts = self._whole.setdefault(id(segment), (read, []))
            parts.append(Part(row, num_queries, piece.start, 0, segment.stop))
        else:
            self._step.append(Part(row, num_queries, piece.start - segment.offset, segment.base, segment.length))
            if self._window is None:
                self._add_before(row, num_queries, segment.context)

    def _add_before(self, row: int, num_queries: int, context: Sequence[Extent]) -> None:
        """A piece that sees all keys of some extents, one batch after the other. Branches of one trunk have the same
        extent."""
        for number, extent in enumerate(context):
            num_keys = extent.stop - extent.start
            if extent.base is None:
                _, parts = self._before.setdefault(id(extent), (Read(extent, extent.start, extent.stop), []))
                parts.append(Part(row, num_queries, 0, 0, num_keys))
            else:
                _, parts = self._before.setdefault(-number, (None, []))
                parts.append(Part(row, num_queries, 0, extent.base, num_keys))

    def batches(self) -> tuple[tuple[Batch, ...], tuple[Batch, ...]]:
        """Those before, and the own ones."""
        before = [Batch(() if read is None else (read,), (*parts,), False) for read, parts in self._before.values()]
        own = [Batch((read,), (*parts,), True) for read, parts in self._whole.values()]
        if self._joined:
            own.append(Batch((*self._joined_reads,), (*self._joined,), True))
        if self._step:
            own.append(Batch((), (*self._step,), True))
        return (*before,), (*own,)
