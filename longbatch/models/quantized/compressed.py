"""Checkpoints of compressed-tensors (llm-compressor): fp8, int8, and integers of 4 or 8 bits packed in words.

Formats `float-quantized`, `int-quantized` and `naive-quantized` keep 8-bit numbers: see `scaled`. `pack-quantized`
keeps, for a weight [out, in] of b bits: `weight_packed` [out, in * b / 32], int32, its fields successive inputs, lowest
first, each with 2^(b-1) added; `weight_scale` [out, G]; without symmetry `weight_zero_point` [out * b / 32, G], its
fields successive outputs; `weight_g_idx` [in], the group of each input, where they are not in order, or all -1;
`weight_shape` [2]. weight = scale * (stored - zero).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longbatch.errors import UsageError
from longbatch.models.families.config import Config
from longbatch.models.quantized.scaled import FP8, INT8, MATRIX, ROW, Block, Scaled, block_of
from longbatch.models.quantized.scheme import (
    SCALE_DTYPES,
    Part,
    Scheme,
    bits_of,
    blocks,
    group_size_of,
    grouped,
    refusal,
    word,
)
from longbatch.models.quantized.unpack import in_groups, unpack

if TYPE_CHECKING:
    from torch import Tensor

_METHOD = "compressed-tensors"
_EIGHT_BITS = ("float-quantized", "int-quantized", "naive-quantized")
_PACKED = "pack-quantized"
# Settings of a group's weights that say how they are kept.
_MATTERS = ("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric")


@dataclass(frozen=True, slots=True)
class Packed:
    """group_size: inputs that share a scale, None for all."""

    bits: int
    group_size: int | None
    symmetric: bool

    @property
    def title(self) -> str:
        return f"{_METHOD}, {self.bits} bits, {grouped(self.group_size)}"

    def parts(self, shape: tuple[int, int]) -> tuple[Part, ...]:
        outputs, inputs = shape
        values, groups = 32 // self.bits, blocks(inputs, self.group_size)
        found = (
            Part(("weight_packed",), ("I32",), ((outputs, blocks(inputs, values)),)),
            Part(("weight_scale",), SCALE_DTYPES, ((outputs, groups),)),
            Part(("weight_shape",), ("I64", "I32"), ((2,),)),
            Part(("weight_g_idx",), ("I32",), ((inputs,),), optional=True),
        )
        zeros = Part(("weight_zero_point",), ("I32",), ((blocks(outputs, values), groups),))
        return found if self.symmetric else (*found, zeros)

    def weight(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        outputs, inputs = shape
        if parts["weight_shape"].tolist() != [outputs, inputs]:
            raise ValueError(f"weight_shape is {parts['weight_shape'].tolist()} and not {list(shape)}")
        scales = parts["weight_scale"]
        values = unpack(parts["weight_packed"], self.bits, inputs)
        if self.symmetric:
            zeros = scales.new_full((1, 1), 1 << (self.bits - 1))
        else:
            # Both are kept with the same number added, which their difference takes away.
            zeros = unpack(parts["weight_zero_point"].t(), self.bits, outputs).t()
        groups = parts.get("weight_g_idx")
        if groups is None or int(groups.max()) < 0:
            return in_groups(values, scales, zeros, None, self.group_size)
        return in_groups(values, scales, zeros.expand_as(scales), groups, self.group_size)


def read_compressed(config: Config) -> Scheme:
    """`quant_method` compressed-tensors. All groups of modules must be quantized alike."""
    for key in ("sparsity_config", "transform_config"):
        if config.values.get(key) and word(config.section(key), "format", default=key) != "dense":
            raise refusal(f"{_METHOD} with a {key}")
    groups = config.section("config_groups")
    settings = [groups.section(name) for name in groups.values]
    if not settings:
        raise UsageError(f"{groups.where} is empty")
    kinds = {str([group.section("weights").values.get(key) for key in _MATTERS]) for group in settings}
    layouts = {word(group, "format", default=word(config, "format", default="unknown")) for group in settings}
    if len(kinds) > 1 or len(layouts) > 1:
        raise refusal(f"{_METHOD} with groups of modules that differ")
    layout = layouts.pop()
    if layout not in (*_EIGHT_BITS, _PACKED):
        raise refusal(f"{_METHOD} in the format {layout}")
    return _read_weights(settings[0].section("weights"), layout)


def _read_weights(weights: Config, layout: str) -> Scheme:
    kind, strategy = word(weights, "type", default="int"), word(weights, "strategy")
    symmetric = weights.flag("symmetric", True)
    bits = bits_of(weights, "num_bits", f"{_METHOD} {layout}", (4, 8) if layout == _PACKED else (8,))
    if kind not in ("int", "float") or (kind == "float" and layout in (_PACKED, "int-quantized")):
        raise refusal(f"{_METHOD} {layout} of type {kind}")
    if not strategy:
        strategy = "group" if weights.has("group_size") else "tensor"
    if layout == _PACKED:
        if strategy not in ("group", "channel"):
            raise refusal(f"{_METHOD} {layout} by {strategy}")
        return Packed(bits, None if strategy == "channel" else group_size_of(weights, 128), symmetric)
    block: Block | None = {"tensor": MATRIX, "channel": ROW}.get(strategy)
    if strategy == "block":
        block = block_of(weights, "block_structure")
    elif strategy == "group":
        block = (1, group_size_of(weights, 128))
    if block is None:
        raise refusal(f"{_METHOD} {layout} by {strategy}")
    return Scaled(_METHOD, FP8 if kind == "float" else INT8, block, zeros=kind == "int" and not symmetric)
