"""The out-of-memory ladder: what is tried with a row whose prefill runs out of memory alone, and what that teaches.

A prefill needs memory for each token of a step (hidden state, K and V of a layer) and for each row of a tile
(queries, attention output, MLP). So the tile is halved first, which costs next to nothing; then the step, again and
again, down to one tile. What made room once is where later rows begin, so that a long job does not fail each time.
"""

from __future__ import annotations

from dataclasses import dataclass

from longbatch.engine.limits import EngineLimits

# Tiles of more rows than this have a multiple of it, as matrix products like it.
_TILE_UNIT = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """How a row's prefill runs. tile_rows: rows per tile of a layer. step_tokens: most tokens in one step."""

    tile_rows: int
    step_tokens: int


class Ladder:
    """The shapes of one engine's prefills. wave_tokens: most tokens of several rows that are prefilled together."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.wave_tokens = limits.step_tokens
        step_tokens = (
            limits.step_tokens if limits.chunk_tokens is None else min(limits.step_tokens, limits.chunk_tokens)
        )
        self._top = Shape(limits.tile_rows, step_tokens)
        self._lessons: list[tuple[int, Shape]] = []

    @property
    def num_lessons(self) -> int:
        return len(self._lessons)

    def shape(self, num_tokens: int) -> Shape:
        """Where a row of so many tokens begins."""
        lessons = [shape for length, shape in self._lessons if num_tokens >= length]
        return Shape(
            min([self._top.tile_rows, *(shape.tile_rows for shape in lessons)]),
            min([self._top.step_tokens, *(shape.step_tokens for shape in lessons)]),
        )

    def below(self, shape: Shape, num_tokens: int) -> Shape | None:
        """The next step down for a row of so many tokens that had too little memory; None at the bottom."""
        if shape.tile_rows == self._top.tile_rows:
            tile = min(shape.tile_rows, num_tokens) // 2
            tile = tile // _TILE_UNIT * _TILE_UNIT if tile > _TILE_UNIT else max(1, tile)
            if tile < shape.tile_rows:
                return Shape(tile, shape.step_tokens)
        tile, step = shape.tile_rows, min(shape.step_tokens, num_tokens)
        smaller = max(tile, step // 2 // tile * tile)
        return Shape(tile, smaller) if smaller < step else None

    def learn(self, num_tokens: int, shape: Shape) -> None:
        """A row of so many tokens fits in this shape. The lesson holds from half that length on: rows come longest
        first, and the next one is only a little shorter."""
        if shape != self.shape(num_tokens):
            self._lessons.append((num_tokens // 2, shape))

    def remark(self, num_tokens: int, shape: Shape) -> str | None:
        """What the row's result says when it began lower than the top, for the sake of an earlier one."""
        if shape == self._top or shape != self.shape(num_tokens):
            return None
        return f"out of memory before: {_difference(self._top, shape)}"


def step_down(old: Shape, new: Shape) -> str:
    """What the row's result says of one step on the ladder."""
    return f"out of memory: {_difference(old, new)}"


def _difference(old: Shape, new: Shape) -> str:
    """In what one shape is smaller than another."""
    tiles = [f"tiles of {new.tile_rows:,} rows"] if new.tile_rows < old.tile_rows else []
    chunks = [f"chunks of {new.step_tokens:,} tokens"] if new.step_tokens < old.step_tokens else []
    return ", ".join(tiles + chunks)
