"""Matrix products whose rows do not depend on how many rows there are.

A CPU's library gives each thread a share of the rows, and multiplies the last one to three of a share by another path,
with another order of summation. A small number of rows is therefore filled up to a multiple of `ROW_UNIT`: then every
number from 1 to 700 gave the same bits for the same row, with 1 to 64 threads (torch 2.13, measured). On a GPU the
number picks the kernel, and no filling helps.

A weight is a tensor, or e4m3 numbers with a scale per row (`longbatch.models.fp8`): then the inputs are quantized too,
where they are not yet, and every device computes the same: sums of products of e4m3 numbers, times both scales.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from longbatch.models.fp8 import Fp8Weight, QuantizedRows, Rows, Weight, multiplies, product, quantize_rows, wide_type

ROW_UNIT = 4
# From here on every share is long enough.
MANY_ROWS = 256
# Numbers of an e4m3 weight that are widened at the same time where the device cannot multiply them as they are.
_WIDE_NUMBERS = 1 << 24


def linear(x: Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [T, in] @ weight.T [in, out] + bias: [T, out]. Quantized rows go with an e4m3 weight only."""
    if isinstance(weight, Fp8Weight):
        return _scaled(x if isinstance(x, QuantizedRows) else quantize_rows(x), weight, bias)
    assert isinstance(x, Tensor)
    if not _is_odd(x):
        return F.linear(x, weight, bias)
    return F.linear(_filled(x), weight, bias)[: x.shape[0]]


def add_linear(x: Tensor, y: Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x += y @ weight.T + bias, in place; returns x."""
    if isinstance(weight, Fp8Weight):
        return x.add_(linear(y, weight, bias))
    assert isinstance(y, Tensor)
    if _is_odd(x):
        x.copy_(_filled(x).addmm_(_filled(y), weight.t())[: x.shape[0]])
    else:
        x.addmm_(y, weight.t())
    return x if bias is None else x.add_(bias)


def linear_into(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """out [T, out] = x [T, in] @ weight.T."""
    if _is_odd(x):
        out.copy_(linear(x, weight))
    else:
        torch.mm(x, weight.t(), out=out)


def _scaled(x: QuantizedRows, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """x [T, in] @ weight.T + bias -> [T, out] in x's dtype."""
    if multiplies(x.dtype, weight):
        return product(x, weight, bias)
    num_outputs, width = weight.shape
    result = torch.empty((x.shape[0], num_outputs), dtype=x.dtype, device=weight.device)
    wide = x.data.to(wide_type(weight.device))
    num_rows = max(1, _WIDE_NUMBERS // width)
    for start in range(0, num_outputs, num_rows):
        rows = slice(start, start + num_rows)
        part = weight.data[rows].to(wide.dtype)
        sums = linear(wide, part) if part.dtype == torch.float32 else torch.mm(wide, part.t(), out_dtype=torch.float32)
        sums.mul_(x.scale.unsqueeze(1)).mul_(weight.scale[rows])
        result[:, rows] = sums if bias is None else sums.add_(bias[rows])
    return result


def _is_odd(x: Tensor) -> bool:
    return x.shape[0] < MANY_ROWS and x.shape[0] % ROW_UNIT != 0 and x.device.type == "cpu"


def _filled(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, -x.shape[0] % ROW_UNIT))
