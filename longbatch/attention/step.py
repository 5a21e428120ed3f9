"""What one prefill forward sees: segments of tokens, where each one's earlier keys lie, and the tiles they run in.

Packed tokens have no padding: segment s owns rows base..base+length-1 of every [T, ...] tensor of the step.
A segment's tokens stand at positions offset..offset+length-1 of their sequence; the keys before `offset` are
its context, which lies in pages (an earlier chunk) or in another segment of the same step (a shared prefix).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from longbatch.attention.choice import DenseKernels
from longbatch.attention.sparse import SparseLayer
from longbatch.cache import PAGE_TOKENS, Writes

if TYPE_CHECKING:
    from longbatch.attention.packed import TileWork


@dataclass(frozen=True, slots=True)
class Extent:
    """Keys of positions start..stop-1 of a sequence. base: packed row of the first one when they belong to this
    step, else None and `pages` is the block table (indexed from position 0) that holds them."""

    start: int
    stop: int
    base: int | None = None
    pages: np.ndarray | None = None


@dataclass(slots=True)
class Executed:
    """How attention runs over one sequence of tokens, and how much of it was computed.

    sparse: whether layers that have patterns use them; else every layer is dense. selected and causal: pairs of query
    and key that were computed, and those that dense attention computes, over the heads of layers without a window.
    """

    sparse: bool
    selected: float | Tensor = 0.0
    causal: float = 0.0

    def add(self, selected: float | Tensor, causal: float) -> None:
        """Count one layer of one segment; a tensor (float64, one number) is not waited for."""
        self.selected = self.selected + selected
        self.causal += causal


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive new tokens of one sequence.

    base: first packed row. offset: position of the first token. length: tokens. context: extents that cover
    positions 0..offset-1 in order. reads: half-open ranges of positions whose final hidden state is wanted.
    rope_length: length that scaled rotary embeddings go by (prompt and the tokens it may generate). executed: set for
    sequences that run sparse or continue one that does; the step counts there what it computes.
    """

    base: int
    offset: int
    length: int
    context: tuple[Extent, ...] = ()
    reads: tuple[tuple[int, int], ...] = ()
    rope_length: int = 0
    executed: Executed | None = None

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.offset + self.length

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Context and own keys: positions 0..stop-1."""
        return (*self.context, Extent(self.offset, self.stop, base=self.base))

    @property
    def all_pages(self) -> np.ndarray | None:
        """The block table that holds every token from position 0 on, once the step's are stored; None where there is
        no such table."""
        if len(self.context) != 1:
            return None
        pages = self.context[0].pages
        return pages if pages is not None and len(pages) * PAGE_TOKENS >= self.stop else None


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries at positions start..stop-1 of a segment."""

    segment: Segment
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        """The packed rows of these queries."""
        low = self.segment.base + self.start - self.segment.offset
        return slice(low, low + self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Tile:
    """Pieces that go through the projections and the MLP together."""

    pieces: tuple[Piece, ...]

    @property
    def num_rows(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def rows(self) -> slice | None:
        """The packed rows when they are consecutive, else None."""
        low = self.pieces[0].rows.start
        high = low
        for piece in self.pieces:
            if piece.rows.start != high:
                return None
            high = piece.rows.stop
        return slice(low, high)


@dataclass(frozen=True, slots=True)
class Step:
    """One prefill forward. ids, positions, rope_lengths: int64 [T] on the model's device. writes: the K/V that must
    outlive the step, or None. attention: the patterns of each layer, None for those that are dense in every step.
    dense: which kernels run dense attention of whole tiles, None: torch's, piece by piece. works: what they are given,
    kept from layer to layer by whoever runs them."""

    ids: Tensor
    positions: Tensor
    rope_lengths: Tensor
    segments: tuple[Segment, ...]
    writes: Writes | None
    tile_rows: int
    tiles: tuple[Tile, ...] = field(default=())
    attention: tuple[SparseLayer | None, ...] | None = None
    dense: DenseKernels | None = None
    works: dict[Hashable, TileWork] = field(default_factory=dict, compare=False)

    @classmethod
    def build(
        cls,
        ids: np.ndarray,
        segments: Sequence[Segment],
        writes: Writes | None,
        *,
        tile_rows: int,
        device: torch.device,
        attention: tuple[SparseLayer | None, ...] | None = None,
        dense: DenseKernels | None = None,
    ) -> Step:
        """ids: int [T] of all segments in packed order."""
        positions = np.concatenate([np.arange(s.offset, s.stop, dtype=np.int64) for s in segments])
        lengths = np.concatenate([np.full(s.length, s.rope_length or s.stop, dtype=np.int64) for s in segments])
        return cls(
            ids=torch.from_numpy(ids.astype(np.int64)).to(device),
            positions=torch.from_numpy(positions).to(device),
            rope_lengths=torch.from_numpy(lengths).to(device),
            segments=tuple(segments),
            writes=writes,
            tile_rows=tile_rows,
            tiles=tuple(tiles_of([(s, s.offset, s.stop) for s in segments], tile_rows)),
            attention=attention,
            dense=dense,
        )

    def read_tiles(self) -> tuple[Tile, ...]:
        """Tiles over the positions that are read, in segment order."""
        return tuple(tiles_of([(s, a, b) for s in self.segments for a, b in s.reads], self.tile_rows))


def tiles_of(ranges: Sequence[tuple[Segment, int, int]], tile_rows: int) -> Iterator[Tile]:
    """Cut ranges of positions at multiples of `tile_rows` and pack the pieces into tiles of at most that many rows.

    The cuts depend on positions alone, so a row's attention is computed in the same pieces whatever shares its
    wave and wherever its chunks begin.
    """
    pieces: list[Piece] = []
    filled = 0
    for segment, start, stop in ranges:
        while start < stop:
            end = min(stop, (start // tile_rows + 1) * tile_rows)
            if filled + end - start > tile_rows and pieces:
                yield Tile(tuple(pieces))
                pieces, filled = [], 0
            pieces.append(Piece(segment, start, end))
            filled += end - start
            start = end
    if pieces:
        yield Tile(tuple(pieces))
