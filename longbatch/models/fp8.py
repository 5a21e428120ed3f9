"""Matrices and activations as e4m3 numbers of 8 bits, with a float32 scale per row: half of bfloat16's bytes.

A row is divided by amax / 448 and rounded; 448 is the largest number of e4m3. Rows of a weight are its outputs, so that
both scales leave the sum of a product: y = (x_q . w_q) * x_scale * w_scale. Weights are quantized once, at load, and
the inputs of their products token by token as they come, so that a row's numbers do not depend on its neighbours.
Source: Micikevicius et al., FP8 formats for deep learning, 2022.

What is quantized are the matrices of the layers: the experts' too, as they are most of a mixture's bytes. The rest
stays in the run's dtype: embeddings are looked up and not multiplied; the vocabulary projection runs for few positions
and its errors go into the logits undamped; a router's choices flip at close calls; norms, biases and sinks are small.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
MOST = 448.0
# Rows without a larger number are zero; it only keeps their scale from being.
LEAST = 1e-30
# Numbers that are float32 at the same time while a tensor is quantized.
_PART_NUMBERS = 1 << 24


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix [out, in], or the matrices of all experts [experts, out, in]. data: e4m3, contiguous. scale: float32,
    shape without the last dimension."""

    data: Tensor
    scale: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Fp8Weight:
        """A weight quantized."""
        data, scale = quantized(weight.flatten(0, -2))
        return cls(data.view(weight.shape), scale.view(weight.shape[:-1]))

    def __getitem__(self, index: int | slice) -> Fp8Weight:
        """Some rows, or one expert."""
        return Fp8Weight(self.data[index], self.scale[index])

    @property
    def shape(self) -> torch.Size:
        """Of the numbers."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of numbers and scales."""
        return int(self.data.nbytes + self.scale.nbytes)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Inputs of products with such weights. data: e4m3 [T, in], contiguous. scale: float32 [T]. dtype: of what they
    were quantized from, and of the products."""

    data: Tensor
    scale: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Of the numbers."""
        return self.data.shape

    def take(self, rows: Tensor) -> QuantizedRows:
        """The rows of these numbers."""
        return QuantizedRows(self.data.view(torch.uint8)[rows].view(FP8), self.scale[rows], self.dtype)

    def part(self, rows: slice) -> QuantizedRows:
        """Some adjoining rows."""
        return QuantizedRows(self.data[rows], self.scale[rows], self.dtype)


Weight = Tensor | Fp8Weight
Rows = Tensor | QuantizedRows


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, N] as e4m3 [T, N], and its scales, float32 [T]; some rows at a time."""
    num_rows = max(1, _PART_NUMBERS // max(1, x.shape[1]))
    data, scale = x.new_empty(x.shape, dtype=FP8), x.new_empty(len(x), dtype=torch.float32)
    for start in range(0, len(x), num_rows):
        rows = slice(start, start + num_rows)
        wide = x[rows].float()
        most = wide.abs().amax(-1, keepdim=True).clamp_(min=LEAST)
        data[rows] = (wide * (MOST / most)).to(FP8)
        scale[rows] = (most / MOST).squeeze(-1)
    return data, scale


def quantize_rows(x: Tensor) -> QuantizedRows:
    """Each row of x [T, N] with its scale."""
    if has_kernels(x.device):
        from longbatch_kernels.row_quant import row_quant

        return QuantizedRows(*row_quant(x), x.dtype)
    return QuantizedRows(*quantized(x), x.dtype)


def has_kernels(device: torch.device) -> bool:
    """Whether a device converts to e4m3 by an instruction, and multiplies it: from compute capability 8.9 on."""
    return device.type == "cuda" and _capability(device) >= (8, 9)


def multiplies(dtype: torch.dtype, weight: Fp8Weight) -> bool:
    """Whether the device's own product takes a weight and rows that were quantized from dtype: its result is bfloat16,
    both sizes are multiples of 16."""
    return (
        dtype == torch.bfloat16
        and has_kernels(weight.device)
        and weight.shape[-1] % 16 == 0
        and weight.shape[-2] % 16 == 0
    )


def multiplies_grouped(dtype: torch.dtype, weight: Weight) -> bool:
    """Whether the products of all experts, with rows of dtype or quantized from it, are one launch."""
    if weight.device.type != "cuda" or _capability(weight.device) not in ((9, 0), (10, 0)):
        return False
    return multiplies(dtype, weight) if isinstance(weight, Fp8Weight) else dtype == torch.bfloat16


def product(x: QuantizedRows, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """x [T, in] @ weight.T + bias -> [T, out], by the device's own product: `multiplies` says where.

    On Hopper sums are kept in the tensor cores' own precision, which costs less than the rounding of the inputs and
    leaves the full rate.
    """
    result: Tensor = torch._scaled_mm(
        x.data,
        weight.data.t(),
        x.scale.unsqueeze(1),
        weight.scale.unsqueeze(0),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return result if bias is None else result.add_(bias)


def grouped_product(x: QuantizedRows, weight: Fp8Weight, ends: Tensor) -> Tensor:
    """x [R, in], grouped by expert, times each group's weight [E, out, in] -> [R, out]; `multiplies_grouped` says
    where. ends: int32 [E], where each group ends."""
    result: Tensor = torch._scaled_grouped_mm(
        x.data,
        weight.data.transpose(-2, -1),
        x.scale,
        weight.scale,
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return result


def wide_type(device: torch.device) -> torch.dtype:
    """What e4m3 numbers are widened to where the device cannot multiply them.

    bfloat16 holds them exactly, so that a GPU's product of it, summed in float32, is the same as float32's.
    """
    return torch.bfloat16 if device.type == "cuda" and _capability(device) >= (8, 0) else torch.float32


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
