"""Matrix products whose rows do not depend on how many rows there are.

A CPU's library gives each thread a share of the rows, and multiplies the last one to three of a share by another path,
with another order of summation. A small number of rows is therefore filled up to a multiple of `ROW_UNIT`: then every
number from 1 to 700 gave the same bits for the same row, with 1 to 64 threads (torch 2.13, measured). On a GPU the
number picks the kernel, and no filling helps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_UNIT = 4
# From here on every share is long enough.
MANY_ROWS = 256


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] @ weight.T [in, out] + bias: [T, out]."""
    if not _is_odd(x):
        return F.linear(x, weight, bias)
    return F.linear(_filled(x), weight, bias)[: x.shape[0]]


def add_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x += y @ weight.T + bias, in place; returns x."""
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


def _is_odd(x: Tensor) -> bool:
    return x.shape[0] < MANY_ROWS and x.shape[0] % ROW_UNIT != 0 and x.device.type == "cpu"


def _filled(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, -x.shape[0] % ROW_UNIT))
