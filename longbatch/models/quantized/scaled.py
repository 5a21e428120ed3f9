"""Weights kept as 8-bit numbers beside their scales: fp8 (e4m3) and int8.

weight = stored * scale, the scale one for the matrix, one for each output row, or one for each block of rows and
columns. The layouts are those of transformers' FineGrainedFP8Config (DeepSeek, Qwen: `weight_scale_inv` in blocks of
128 x 128, which multiplies whatever its name says), of FbgemmFp8Config (`weight_scale` for each row), of AutoFP8
(`weight_scale` for the matrix) and of compressed-tensors. `input_scale` belongs to activations quantized with a fixed
scale, which are not quantized here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longbatch.errors import UsageError
from longbatch.models.families.config import Config
from longbatch.models.quantized.scheme import SCALE_DTYPES, Part, blocks, refusal, word
from longbatch.models.quantized.unpack import spread

if TYPE_CHECKING:
    from torch import Tensor

FP8, INT8 = "F8_E4M3", "I8"
Block = tuple[int | None, int | None]
MATRIX: Block = (None, None)
ROW: Block = (1, None)


@dataclass(frozen=True, slots=True)
class Scaled:
    """dtype: of the stored values. block: rows and columns that share a scale, None for all. suffixes: of the scale.
    zeros: whether each scale has a zero point too (int8)."""

    method: str
    dtype: str
    block: Block
    suffixes: tuple[str, ...] = ("weight_scale",)
    zeros: bool = False

    @property
    def title(self) -> str:
        rows, columns = ("all" if extent is None else extent for extent in self.block)
        kind = "fp8" if self.dtype == FP8 else "int8"
        return f"{self.method}, {kind}, a scale for {rows} x {columns}"

    def parts(self, shape: tuple[int, int]) -> tuple[Part, ...]:
        grid = self._grid(shape)
        shapes: tuple[tuple[int, ...], ...] = (grid,)
        if self.block == ROW:
            shapes = (grid, grid[:1])
        elif self.block == MATRIX:
            shapes = ((), (1,), (1, 1))
        found = Part(("weight",), (self.dtype,), (shape,)), Part(self.suffixes, SCALE_DTYPES, shapes)
        return (*found, Part(("weight_zero_point",), (INT8,), shapes)) if self.zeros else found

    def weight(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        weight = parts["weight"].float()
        if self.zeros:
            weight = weight.sub_(self._spread(parts["weight_zero_point"], shape))
        return weight.mul_(self._spread(parts[self.suffixes[0]], shape))

    def _grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        return blocks(shape[0], self.block[0]), blocks(shape[1], self.block[1])

    def _spread(self, stored: Tensor, shape: tuple[int, int]) -> Tensor:
        return spread(stored.reshape(self._grid(shape)), self.block, shape)


def read_fp8(config: Config) -> Scaled:
    """`quant_method` fp8."""
    if word(config, "expert_dtype", default="fp8") != "fp8":
        raise refusal("fp8 with experts in " + word(config, "expert_dtype"))
    if word(config, "scale_fmt", default="float") not in ("float", "ue8m0"):
        raise refusal("fp8 with scales in " + word(config, "scale_fmt"))
    if word(config, "fmt", default="e4m3") != "e4m3":
        raise refusal("fp8 in " + word(config, "fmt"))
    suffixes = ("weight_scale_inv", "weight_scale")
    return Scaled("fp8", FP8, block_of(config, "weight_block_size") or MATRIX, suffixes)


def read_fbgemm(config: Config) -> Scaled:
    """`quant_method` fbgemm_fp8. Its upper bound of activations' scales is not read."""
    return Scaled("fbgemm_fp8", FP8, ROW)


def block_of(config: Config, key: str) -> Block | None:
    """Rows and columns of a block, as [rows, columns] or "RxC"; None if the key is absent."""
    if not config.has(key):
        return None
    value = config.values[key]
    if isinstance(value, str):
        value = [int(part) if part.isdecimal() else 0 for part in value.split("x")]
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(size, int) and size > 0 for size in value):
        raise UsageError(f"{config.where}: {key} must be two whole numbers of at least 1")
    return value[0], value[1]
