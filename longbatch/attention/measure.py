"""Times of the kernels that can run dense attention on a GPU, each checked first. In the process that has the GPU.

A tile of random numbers is attended as the engine does it, at a few shapes of its pieces. A kernel that fails, or whose
output is not softmax attention on sampled rows, is left out. Takes a second or two, and what compiling takes; a machine
does it once for each shape of layers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longbatch.attention.choice import (
    POINTS,
    TORCH,
    DenseChoice,
    DenseKernels,
    DenseLayer,
    DenseShape,
    choices_key,
    read_choices,
    remember_choices,
    shapes_of,
)
from longbatch.attention.dense import attend
from longbatch.attention.kernels import attend_tile, packed_kernels
from longbatch.attention.packed import Read, TileWork
from longbatch.attention.step import Extent, Piece, Segment, Tile
from longbatch.device import DeviceInfo
from longbatch.timing import median_seconds

# Rows of a tile, and most tokens of all its prompts.
TILE_ROWS, MOST_TOKENS = 8192, 65536
REPEATS = 3
# Greatest relative RMS error of sampled rows, and greatest error of their log-sum-exp: half precision rounds queries,
# keys, weights and sums.
MOST_ERROR = 1e-2
_log = logging.getLogger(__name__)

# q of the tile, its work, its keys and values, scale -> out [n, H, D], and lse [H, n] where the kernel gives it.
Attention = Callable[[Tensor, TileWork, "Tokens", float], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, slots=True)
class Tokens:
    """k, v [T, Hkv, D] of all tokens of a step."""

    k: Tensor
    v: Tensor

    def read(self, reads: tuple[Read, ...]) -> tuple[Tensor, Tensor]:
        """As in `ReadKeys`."""
        if not reads:
            return self.k, self.v
        rows = torch.cat([self.rows(*read) for read in reads])
        return self.k[rows], self.v[rows]

    def rows(self, extent: Extent, start: int, stop: int) -> Tensor:
        """Where positions of an extent lie."""
        assert extent.base is not None
        low = extent.base - extent.start
        return torch.arange(low + start, low + stop, device=self.k.device)


class _Sample(NamedTuple):
    """What the query in one row and head of a tile must give: float64 [D], and one number."""

    row: int
    head: int
    out: Tensor
    lse: Tensor


def dense_kernels(layers: Iterable[DenseLayer], info: DeviceInfo, dtype: str, folder: Path) -> DenseKernels | None:
    """The choices for a model's layers: remembered in `folder`, else measured now. None on a CPU and in float32, where
    attention is summed up piece by piece, so that no bit depends on what else is in a tile."""
    if not info.on_gpu or dtype == "float32":
        return None
    key = choices_key(info, dtype)
    remembered = read_choices(folder, key)
    device, found = torch.device(info.torch_name), {}
    for shape in shapes_of(layers):
        choice = remembered.get(str(shape)) or measure_shape(shape, device, getattr(torch, dtype))
        if choice is None:
            continue
        found[shape] = choice
        if str(shape) not in remembered:
            _log.info("dense attention, %s: %s", shape, choice.describe())
            # At once: after a kernel that broke the device nothing else works in this process, and the next one must
            # not try it again.
            remember_choices(folder, key, {str(shape): choice})
            torch.cuda.empty_cache()
    return DenseKernels(found)


@torch.inference_mode()
def measure_shape(
    shape: DenseShape,
    device: torch.device,
    dtype: torch.dtype,
    points: Sequence[tuple[int, int]] = POINTS,
    kernels: dict[str, Attention] | None = None,
) -> DenseChoice | None:
    """Measure all kernels, or those given, at points whose tokens have room; None where torch's own way fails."""
    room = tuple(point for point in points if _num_bytes(shape, point, dtype) <= _free_bytes(device) / 4)
    seconds: dict[str, tuple[float, ...]] = {}
    for name, kernel in (all_kernels() if kernels is None else kernels).items():
        try:
            seconds[name] = tuple(_seconds_at(kernel, shape, point, device, dtype) for point in room)
        except Exception as error:
            # A kernel may fail in any way: it does not compile here, asks for too much memory, refuses a shape.
            text = str(error).strip().partition("\n")[0]
            _log.warning("dense attention, %s: %s is left out: %s: %s", shape, name, type(error).__name__, text)
    return DenseChoice(room, seconds) if room and TORCH in seconds else None


def all_kernels() -> dict[str, Attention]:
    """Every kernel that can be tried, by name."""

    def packed(name: str) -> Attention:
        return lambda q, work, tokens, scale: attend_tile(name, q, work, tokens.read, scale=scale)

    return {TORCH: by_pieces, **{name: packed(name) for name in packed_kernels()}}


def by_pieces(q: Tensor, work: TileWork, tokens: Tokens, scale: float) -> tuple[Tensor, Tensor | None]:
    """torch's kernels, one piece after the other, as the engine does it without a choice."""

    def read(extent: Extent, start: int, stop: int) -> tuple[Tensor, Tensor]:
        assert extent.base is not None
        rows = slice(extent.base + start - extent.start, extent.base + stop - extent.start)
        return tokens.k[rows], tokens.v[rows]

    outs, low = [], 0
    for piece in work.tile.pieces:
        high = low + piece.stop - piece.start
        outs.append(attend(q[low:high], piece, read, scale=scale, window=work.window))
        low = high
    return torch.cat(outs), None


def tile_of(point: tuple[int, int]) -> Tile:
    """A tile whose pieces have so many queries and keys each: ends of prompts that lie whole in the step. Several
    pieces of some queries have all their other keys in one beginning that they share."""
    queries, keys = point
    count = max(1, min(TILE_ROWS // queries, MOST_TOKENS // keys))
    if queries == 1 or queries == keys or count == 1:
        segments = [Segment(number * keys, 0, keys) for number in range(count)]
    else:
        trunk, count = keys - queries, TILE_ROWS // queries
        context = (Extent(0, trunk, base=0),)
        segments = [Segment(trunk + number * queries, trunk, queries, context) for number in range(count)]
    return Tile(tuple(Piece(segment, segment.stop - queries, segment.stop) for segment in segments))


def _seconds_at(
    kernel: Attention, shape: DenseShape, point: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> float:
    """Median of some runs after one that is checked. Raises ValueError where its output is wrong."""
    tile, scale = tile_of(point), shape.head_dim**-0.5
    last = tile.pieces[-1].segment
    generator = torch.Generator(device).manual_seed(0)

    def noise(rows: int, heads: int) -> Tensor:
        return torch.randn((rows, heads, shape.head_dim), generator=generator, dtype=dtype, device=device)

    num_tokens = last.base + last.length
    q = noise(tile.num_rows, shape.num_heads)
    tokens = Tokens(noise(num_tokens, shape.num_kv_heads), noise(num_tokens, shape.num_kv_heads))
    work = TileWork.of(tile, shape.window, exact_pages=False, dense=lambda piece: True)
    _check(kernel(q, work, tokens, scale), _samples(q, tile, shape, tokens, scale))
    return median_seconds(lambda: kernel(q, work, tokens, scale), device, repeats=REPEATS, warmups=0)


def _samples(q: Tensor, tile: Tile, shape: DenseShape, tokens: Tokens, scale: float) -> list[_Sample]:
    """First and last query of the first and the last piece and of one between them, in the first and the last head."""
    starts, low = [], 0
    for piece in tile.pieces:
        starts.append(low)
        low += piece.stop - piece.start
    found = []
    for number in sorted({0, len(starts) // 2, len(starts) - 1}):
        piece = tile.pieces[number]
        for position in sorted({piece.start, piece.stop - 1}):
            row = starts[number] + position - piece.start
            first = 0 if shape.window is None else max(0, position + 1 - shape.window)
            rows = torch.cat(
                [
                    tokens.rows(extent, max(first, extent.start), min(position + 1, extent.stop))
                    for extent in piece.segment.extents
                    if max(first, extent.start) < min(position + 1, extent.stop)
                ]
            )
            for head in sorted({0, shape.num_heads - 1}):
                of_head = head * shape.num_kv_heads // shape.num_heads
                scores = tokens.k[rows, of_head].double() @ q[row, head].double() * scale
                out = scores.softmax(0) @ tokens.v[rows, of_head].double()
                found.append(_Sample(row, head, out, scores.logsumexp(0)))
    return found


def _check(found: tuple[Tensor, Tensor | None], samples: list[_Sample]) -> None:
    """Raises ValueError where sampled rows are not what they must be."""
    out, lse = found
    rows, heads = [sample.row for sample in samples], [sample.head for sample in samples]
    expected = torch.stack([sample.out for sample in samples])
    error = float((out[rows, heads].double() - expected).norm() / expected.norm())
    if not error <= MOST_ERROR:
        raise ValueError(f"its output is wrong by {error:.2g}")
    if lse is not None:
        error = float((lse[heads, rows].double() - torch.stack([sample.lse for sample in samples])).abs().max())
        if not error <= MOST_ERROR:
            raise ValueError(f"its log-sum-exp is wrong by {error:.2g}")


def _num_bytes(shape: DenseShape, point: tuple[int, int], dtype: torch.dtype) -> int:
    """Of queries, keys, values, the output and a carry in float32."""
    tile = tile_of(point)
    last = tile.pieces[-1].segment
    numbers = 4 * tile.num_rows * shape.num_heads + 2 * (last.base + last.length) * shape.num_kv_heads
    return numbers * shape.head_dim * dtype.itemsize


def _free_bytes(device: torch.device) -> float:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
