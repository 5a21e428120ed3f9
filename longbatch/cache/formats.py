"""What the cache asks of a storage format: the interface of the kernels' `kv_NAME` modules."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

import torch
from torch import Tensor

# The tensors of one pool: K, or V, of one layer.
Pool = tuple[Tensor, ...]


class PageFormat(Protocol):
    """How blocks of 64 tokens become pages of a pool, and pages tokens. PAGE_ROWS: rows of each of the pool's tensors
    that belong to a page."""

    PAGE_ROWS: tuple[int, ...]
    load_tile: Any

    def tensors(
        self, num_pages: int, num_kv: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shape and type of each tensor of a pool."""

    def quantize(self, x: Tensor, rows: Tensor, pool: Pool, pages: Tensor) -> None:
        """Store 64 rows of x [T, Hkv, D] from rows[i] on as pages[i]; both int64 [P]. Formats that store only whole
        pages skip the pages below 0."""

    def dequantize_ref(self, pool: Pool, pages: Tensor, dtype: torch.dtype) -> Tensor:
        """The tokens of some pages, int64 [P]: [P * 64, Hkv, D]."""


def load_format(module: str) -> PageFormat:
    """The kernels' `kv_NAME` for a NAME."""
    return cast(PageFormat, importlib.import_module(f"longbatch_kernels.kv_{module}"))
