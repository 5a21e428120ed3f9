"""Matrix products whose rows do not depend on how many rows there are.

A CPU's library multiplies very few rows by another path than many, with another order of summation. Rows are then
filled up to `LEAST_ROWS`, from where on every count gave the same bits for the same row (measured for 1 to 1,000
rows at shapes of small models, one and two threads). On a GPU the count picks the kernel, and no padding helps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_ROWS = 8


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] @ weight.T [in, out] + bias: [T, out]."""
    if not _is_few(x):
        return F.linear(x, weight, bias)
    return F.linear(_filled(x), weight, bias)[: x.shape[0]]


def add_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x += y @ weight.T + bias, in place; returns x."""
    if _is_few(x):
        x.copy_(_filled(x).addmm_(_filled(y), weight.t())[: x.shape[0]])
    else:
        x.addmm_(y, weight.t())
    return x if bias is None else x.add_(bias)


def linear_into(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """out [T, out] = x [T, in] @ weight.T."""
    if _is_few(x):
        out.copy_(linear(x, weight))
    else:
        torch.mm(x, weight.t(), out=out)


def _is_few(x: Tensor) -> bool:
    return 0 < x.shape[0] < LEAST_ROWS and x.device.type == "cpu"


def _filled(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, LEAST_ROWS - x.shape[0]))
