"""Sampled rows of an attention output beside softmax in float64 over the keys that they were to see."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Greatest relative RMS error of our kernels in bfloat16; a rival that rounds its scaled queries may have more.
MOST_ERROR = 4e-3
MOST_RIVAL_ERROR = 2e-2


@dataclass(slots=True)
class Check:
    """Collects squared errors, where the outputs are: only asking for the error waits for them. most: the relative RMS
    error that still holds."""

    most: float = MOST_ERROR
    errors: Tensor | float = 0.0
    squares: Tensor | float = 0.0

    def rows(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        first_row: int,
        keys: Tensor,
        scale: float,
        causal: bool = True,
    ) -> None:
        """Add one head's rows. q, out [r, D] stand at positions first_row..; k, v [N, D]; keys int64 [n] positions that
        the rows see, those after a row left out where `causal`."""
        expected = reference(q, k, v, first_row, keys, scale, causal)
        self.errors = self.errors + (out.double() - expected).square().sum()
        self.squares = self.squares + expected.square().sum()

    @property
    def error(self) -> float:
        """Relative RMS error of all rows so far."""
        errors, squares = float(self.errors), float(self.squares)
        if not math.isfinite(errors) or not squares:
            return math.inf
        return math.sqrt(errors / squares)

    @property
    def holds(self) -> bool:
        """Whether rows were compared and agree."""
        return self.error <= self.most


def reference(
    q: Tensor, k: Tensor, v: Tensor, first_row: int, keys: Tensor, scale: float, causal: bool = True
) -> Tensor:
    """float64 [r, D]; a row that sees no key gives 0."""
    scores = (q.double() @ k[keys].double().T) * scale
    if causal:
        rows = first_row + torch.arange(q.shape[0], device=q.device)
        scores.masked_fill_(keys[None] > rows[:, None], float("-inf"))
    weights = scores.softmax(-1).nan_to_num_(0.0)
    return weights @ v[keys].double()


def sampled_blocks(num_rows: int, count: int, seed: int, block: int = 64) -> list[int]:
    """First rows of the last block and of `count` others, the same for the same seed."""
    num_blocks = -(-num_rows // block)
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(num_blocks, (count,), generator=generator).tolist()
    return sorted({(num_blocks - 1) * block, *(number * block for number in picked)})


def check_rows(
    check: Check,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    keys_of: Callable[[int], Tensor],
    rows: list[int],
    scale: float,
) -> None:
    """Compare single rows of one head whose keys are listed row by row. q, k, v, out [N, D]."""
    for row in rows:
        here = slice(row, row + 1)
        check.rows(q[here], k, v, out[here], row, keys_of(row), scale, causal=False)
