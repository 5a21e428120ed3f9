"""The most device memory that a wave takes, predicted before anything is allocated. Torch-free.

What lies there all the time: weights and the cache's pages. What a step holds until it ends: hidden states, places,
cosines and sines. What a layer holds: keys and values of the step's tokens, those of earlier chunks where they are to
be converted, and what was selected. What a tile holds: see `layer_memory`. After the last layer: logits. The peak is
that of the moment at which most of these are alive; a test measures it, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from longbatch.config.kv_formats import KVFormat
from longbatch.models.spec import LayerSpec, ModelSpec
from longbatch.plan.layer_memory import FLOAT, Formats, LayerMemory, Piece
from longbatch.plan.selection_memory import SelectionMemory
from longbatch.sparsity import LayerPatterns

PAGE_TOKENS = 64
# Numbers of a tile of logits, and of logits that are drawn from together (`longbatch.engine.readout`,
# `longbatch_kernels.sample`).
LOGIT_TILE, DRAW_TILE = 1 << 26, 1 << 22
# Bytes of such a number: with its log-softmax; sorted, with weights and their sums, as the reference of draws needs it.
_SCORED_BYTES, _DRAWN_BYTES = 8, 56
# Partial outputs of a decode step's attention, and what a driver keeps of the steps that are CUDA graphs.
_GRAPH_BYTES = 1 << 29
# A token's id, position, length and place in the pages, int64.
_PLACE_BYTES = 32
# Pages that are quantized or converted at once where no kernel does it (`longbatch_kernels.kv_fp8`).
_SOME_PAGES = 256
# Keys that a partial output of decode is over, and the most numbers of such outputs (`longbatch_kernels.paged_decode`).
_SPLIT, _WORKSPACE = 1024, 1 << 26
# What torch gives cuBLAS to work with on chips of compute capability 9.
_LIBRARY_BYTES = 32 << 20

Item = TypeVar("Item")
# What happens, and what is there for it, by name.
_Moment = tuple[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Work:
    """Rows that are prefilled together, and how.

    lengths: tokens of each row's prompt. tile_rows, step_tokens: as in `EngineLimits`; one row of more than step_tokens
    runs in chunks. max_tokens: of each answer, 0 where nothing is generated. reads_all: whether every position's hidden
    state is read, and not the last one's alone; scores: whether what is read is scored. patterns: of each layer where
    the rows run sparse, None where all are dense. kv_tokens: tokens that the cache's pages hold; num_open: its open
    blocks.
    """

    lengths: tuple[int, ...]
    tile_rows: int
    step_tokens: int
    kv_tokens: int
    num_open: int = 0
    max_tokens: int = 0
    reads_all: bool = False
    scores: bool = False
    patterns: tuple[LayerPatterns, ...] | None = None


@dataclass(frozen=True, slots=True)
class Peak:
    """parts: (what, bytes) of what is there at the moment at which most is."""

    moment: str
    parts: tuple[tuple[str, int], ...]

    @property
    def num_bytes(self) -> int:
        """Sum of the parts."""
        return sum(num_bytes for _, num_bytes in self.parts)


def predict(spec: ModelSpec, formats: Formats, work: Work, weight_bytes: int) -> Peak:
    """The peak of a wave. weight_bytes: of all of the model that stays on the device, the slots of streamed layers
    included."""
    lasting = {
        "weights": weight_bytes,
        # One page and block more, for rows that only fill up.
        "K/V pages": kv_page_bytes(spec, formats.kv) * (work.kv_tokens // PAGE_TOKENS + 1),
        "open K/V blocks": open_block_bytes(spec, formats) * (work.num_open + 1),
        "decode rows": decode_row_bytes(work.kv_tokens) * (len(work.lengths) + 1),
        "cuBLAS": _LIBRARY_BYTES if formats.on_gpu else 0,
    }
    moments = [moment for step in _steps(work) for moment in _StepMemory(spec, formats, work, step).moments()]
    if work.max_tokens:
        moments += _decode_moments(spec, formats, work)
    name, parts = max(moments, key=lambda moment: sum(moment[1].values()))
    return Peak(name, tuple((part, num_bytes) for part, num_bytes in (lasting | parts).items() if num_bytes))


# ------------------------------------------------------------------------------------- what a budget sums up too


def kv_page_bytes(spec: ModelSpec, kv: KVFormat) -> int:
    """One page of K/V in every layer, with what the format keeps beside the numbers."""
    heads = sum(stream.heads for layer in spec.layers for stream in layer.streams)
    return int(PAGE_TOKENS * spec.kv_entries_per_token * kv.entry_bytes + heads * kv.block_bytes)


def open_block_bytes(spec: ModelSpec, formats: Formats) -> int:
    """One open block, where the format has them."""
    return PAGE_TOKENS * spec.kv_entries_per_token * formats.width if formats.kv.has_open else 0


def step_token_bytes(spec: ModelSpec, formats: Formats) -> int:
    """What a token of a step takes until the step ends: hidden state, place, cosines and sines."""
    ropes = {(rope.kind, rope.theta, rope.dim) for layer in spec.layers if (rope := layer.rope) is not None}
    return spec.hidden_size * formats.width + _PLACE_BYTES + sum(FLOAT * dim for _, _, dim in ropes)


def layer_token_bytes(spec: ModelSpec, formats: Formats) -> int:
    """K and V of a token in the largest layer."""
    return max(2 * LayerMemory(layer, spec.hidden_size, formats).kv for layer in spec.layers) * formats.width


def tile_bytes(spec: ModelSpec, formats: Formats, rows: int, longest: int) -> int:
    """The most that a tile of so many rows holds beside what its step and layer do, also where it is the only one.
    longest: tokens of the longest prompt."""
    piece = Piece(rows, -(-longest // rows) if formats.width == FLOAT else 3, longest)
    found = 0
    for layer in _distinct(spec.layers):
        memory = LayerMemory(layer, spec.hidden_size, formats)
        one_of_many = max(num_bytes for _, num_bytes in memory.moments([piece]))
        alone = max(num_bytes for _, num_bytes in memory.moments([Piece(rows, 1, rows)], holds_queries=True))
        alone += memory.fused(rows) - memory.keys_and_values(rows)
        found = max(found, max(one_of_many, alone) + memory.most_bands)
    return found


def logit_bytes(vocabulary: int, decode_rows: int) -> int:
    """The most that logits take: of scored positions, or of rows that decode and draw."""
    scored = max(1, LOGIT_TILE // vocabulary) * vocabulary * _SCORED_BYTES
    drawn = min(decode_rows, max(1, DRAW_TILE // vocabulary)) * vocabulary * _DRAWN_BYTES
    return max(scored, FLOAT * decode_rows * vocabulary + drawn)


def graph_bytes(spec: ModelSpec, formats: Formats, decode_rows: int) -> int:
    """What captured decode steps of so many rows keep: logits as they come and in float32, what one layer computes,
    block tables of as many pages as the longest row has, and a page for rows that only fill up."""
    row = spec.vocab_size * (formats.width + FLOAT) + decode_row_bytes(spec.max_length)
    layer = tile_bytes(spec, formats, decode_rows, decode_rows)
    return _GRAPH_BYTES + layer + decode_rows * row + kv_page_bytes(spec, formats.kv)


def decode_row_bytes(kv_tokens: int) -> int:
    """What the device knows of a row that decodes (`longbatch.engine.decode_rows`): seven integers, three floats and a
    block table of all pages."""
    return 7 * 8 + 3 * FLOAT + FLOAT * (kv_tokens // PAGE_TOKENS)


# ------------------------------------------------------------------------------------- steps


@dataclass(frozen=True, slots=True)
class _Step:
    """rows: (tokens before, tokens in the step) of each. is_last: whether no step follows."""

    rows: tuple[tuple[int, int], ...]
    is_last: bool


def _steps(work: Work) -> Iterator[_Step]:
    """As `engine.packing.pack` cuts them."""
    if len(work.lengths) > 1 or work.lengths[0] <= work.step_tokens:
        yield _Step(tuple((0, length) for length in work.lengths), True)
        return
    (length,) = work.lengths
    size = max(work.tile_rows, work.step_tokens // work.tile_rows * work.tile_rows)
    for start in range(0, length, size):
        yield _Step(((start, min(size, length - start)),), start + size >= length)


def _tiles(rows: Sequence[tuple[int, int]], tile_rows: int, before: int, formats: Formats) -> list[list[Piece]]:
    """(start, stop) of each row as `attention.step.tiles_of` cuts and packs them. before: tokens of earlier steps."""
    tiles: list[list[Piece]] = []
    filled = 0
    for start, end in rows:
        while start < end:
            stop = min(end, (start // tile_rows + 1) * tile_rows)
            if not tiles or filled + stop - start > tile_rows:
                tiles.append([])
                filled = 0
            # In float32 keys are attended tile by tile, else extent by extent; then the piece's own.
            others = -(-start // tile_rows) if formats.width == FLOAT else (before > 0) + (start > before)
            tiles[-1].append(Piece(stop - start, others + 1, stop))
            filled += stop - start
            start = stop
    return tiles


class _StepMemory:
    """What is there at the moments of one step."""

    def __init__(self, spec: ModelSpec, formats: Formats, work: Work, step: _Step) -> None:
        self._spec, self._formats, self._work, self._step = spec, formats, work, step
        self._tokens = sum(tokens for _, tokens in step.rows)
        # Rows with tokens before are alone in their step.
        self._before = step.rows[0][0]
        self._longest = max(before + tokens for before, tokens in step.rows)
        self._tiles = self._cut([(before, before + tokens) for before, tokens in step.rows])
        self._is_kept = work.max_tokens > 0 or self._before > 0 or not step.is_last

    def _cut(self, rows: Sequence[tuple[int, int]]) -> list[list[Piece]]:
        return _tiles(rows, self._work.tile_rows, self._before, self._formats)

    def moments(self) -> Iterator[_Moment]:
        """All of them."""
        held = {"hidden states and places": self._tokens * step_token_bytes(self._spec, self._formats)}
        *others, last = zip(self._spec.layers, self._work.patterns or [None] * len(self._spec.layers), strict=True)
        for layer, patterns in _distinct(others):
            for name, parts in self._layer(layer, patterns):
                yield name, held | parts
        reads = self._tiles if self._work.reads_all else self._last_rows
        for name, parts in self._layer(*last, reads):
            yield name, held | parts
        num_reads = sum(piece.rows for tile in reads for piece in tile)
        if self._work.scores and num_reads:
            hidden = self._spec.hidden_size * self._formats.width
            rows = min(num_reads, max(1, LOGIT_TILE // self._spec.vocab_size))
            yield (
                "scores",
                {
                    "places": self._tokens * _PLACE_BYTES,
                    "hidden states read": (num_reads + rows) * hidden,
                    "logits": rows * self._spec.vocab_size * _SCORED_BYTES,
                },
            )

    @cached_property
    def _last_rows(self) -> list[list[Piece]]:
        if not self._step.is_last:
            return []
        return self._cut([(before + tokens - 1, before + tokens) for before, tokens in self._step.rows])

    def _layer(
        self, layer: LayerSpec, patterns: LayerPatterns | None, reads: list[list[Piece]] | None = None
    ) -> Iterator[_Moment]:
        """One layer. reads: tiles of the positions that are read, in the last one."""
        memory = LayerMemory(layer, self._spec.hidden_size, self._formats)
        is_one = len(self._tiles) == 1 and reads is None
        held: dict[str, int] = {}
        if is_one:
            yield "queries, keys and values", {"tile": memory.projected(self._tokens, memory.q, memory.kv)}
            held["queries, keys and values"] = memory.fused(self._tokens)
        else:
            held["keys and values"] = memory.keys_and_values(self._tokens)
            largest = max(map(_num_rows, self._tiles))
            yield "keys and values", held | {"tile": memory.projected(largest, 0, memory.kv)}
        if self._is_kept:
            yield "keys and values kept", held | {"tile": self._storing(memory)}
        tiles = self._tiles if reads is None else reads
        if not tiles:
            return
        selection = None
        if patterns is not None and layer.is_plain and not patterns.is_dense:
            selection = SelectionMemory(patterns, layer, self._longest, self._formats.width, self._formats.on_gpu)
        first = 0 if is_one else memory.queries(_num_rows(tiles[0]))
        for name, parts, stays in self._keys_seen(memory, selection):
            yield name, held | parts | {"tile": first + parts.get("tile", 0)}
            held |= stays
        heads_each = None if selection is None else selection.heads_each
        for tile in {tuple(tile) for tile in tiles}:
            for name, num_bytes in memory.moments(tile, holds_queries=is_one, heads_each=heads_each):
                yield name, held | {"tile": num_bytes}
        if reads is not None:
            hidden = sum(map(_num_rows, reads)) * self._spec.hidden_size * self._formats.width
            yield (
                "hidden states read",
                held | {"hidden states read": hidden, "tile": memory.queries(_num_rows(reads[-1]))},
            )

    def _keys_seen(
        self, memory: LayerMemory, selection: SelectionMemory | None
    ) -> Iterator[tuple[str, dict[str, int], dict[str, int]]]:
        """What the first tile makes for the later ones, beside its queries: the moment, and what stays of it."""
        if self._before and not self._formats.is_exact:
            history = memory.keys_and_values(self._before)
            some = min(self._before, _SOME_PAGES * PAGE_TOKENS) * memory.kv * (1 + FLOAT)
            converted = {"converted K/V": history}
            yield "conversion", converted | {"tile": some}, converted
            if selection is not None:
                joined = memory.keys_and_values(self._longest)
                yield "joining", {"converted K/V": history + joined}, {"converted K/V": joined}
        if selection is not None:
            yield "selection", {"selection": selection.estimate}, {"selection": selection.kept}
        else:
            kept, making = memory.bands(piece for tile in self._tiles for piece in tile)
            out = memory.queries(_num_rows(self._tiles[0]))
            yield "window bands", {"window bands": making, "tile": out}, {"window bands": kept}

    def _storing(self, memory: LayerMemory) -> int:
        """What is converted on its way to the pages."""
        formats = self._formats
        if formats.is_exact or (formats.kv.has_open and formats.on_gpu):
            return 0
        if not formats.kv.has_open:
            return int(self._tokens * memory.kv * formats.kv.entry_bytes)
        wide = formats.width + (FLOAT if formats.width != FLOAT else 0) + FLOAT + 1
        return min(self._tokens, _SOME_PAGES * PAGE_TOKENS) * memory.kv * wide


def _distinct(items: Sequence[Item]) -> list[Item]:
    """Each once; layers have no hash."""
    found: list[Item] = []
    for item in items:
        if item not in found:
            found.append(item)
    return found


def _num_rows(tile: Sequence[Piece]) -> int:
    return sum(piece.rows for piece in tile)


def _decode_moments(spec: ModelSpec, formats: Formats, work: Work) -> Iterator[_Moment]:
    """The first tokens, from the hidden states of all rows, and a step of decode."""
    num_rows, vocabulary = len(work.lengths), spec.vocab_size
    wide = FLOAT + (formats.width if formats.width != FLOAT else 0)
    hidden = 2 * num_rows * spec.hidden_size * formats.width
    some = min(num_rows, max(1, LOGIT_TILE // vocabulary))
    yield "first tokens", {"hidden states": hidden, "logits": some * vocabulary * wide}
    yield "decode", {"hidden states": hidden, "logits": num_rows * vocabulary * wide}
    longest = max(work.lengths) + work.max_tokens
    for layer in _distinct(spec.layers):
        keys = min(longest, layer.window or longest)
        if formats.on_gpu:
            splits = -(-longest // _SPLIT)
            rows = min(num_rows, max(1, _WORKSPACE // (layer.num_heads * splits * layer.head_dim)))
            attention = FLOAT * rows * layer.num_heads * splits * (layer.head_dim + 1)
        else:
            attention = 2 * layer.num_heads * keys * formats.width
            if not formats.is_exact:
                # Keys and values of one row converted, and again with its open block behind them.
                copies = 2 if formats.kv.has_open else 1
                attention += 2 * copies * layer.num_kv_heads * layer.head_dim * keys * formats.width
        yield "decode", {"hidden states": hidden, "attention": attention}
