"""K/V stored as they are, in bfloat16, float16 or float32: one tensor per pool, no scales, no open block.

Shapes: x [T, Hkv, D]; a pool is one tensor [pages * 64, Hkv, D]. A number is rounded only where the pool has fewer bits
than the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    # Where there is no Triton, the references are all that runs.
    triton = None

PAGE_TOKENS = 64
# Of a pool, per tensor: rows for each page.
PAGE_ROWS = (PAGE_TOKENS,)


def tensors(
    num_pages: int, num_kv: int, head_dim: int, dtype: torch.dtype
) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shape and type of each tensor of a pool."""
    return (((num_pages * PAGE_TOKENS, num_kv, head_dim), dtype),)


def quantize_ref(x: Tensor, rows: Tensor, pool: tuple[Tensor, ...], pages: Tensor) -> None:
    """Store blocks of 64 tokens of x, the i-th from row rows[i] on, as pages[i] >= 0; both int64 [P]."""
    offsets = torch.arange(PAGE_TOKENS, device=x.device)
    taken = x[(rows[:, None] + offsets).flatten()]
    pool[0][(pages[:, None] * PAGE_TOKENS + offsets).flatten()] = taken.to(pool[0].dtype)


def quantize(x: Tensor, rows: Tensor, pool: tuple[Tensor, ...], pages: Tensor) -> None:
    """`quantize_ref`, which is one copy on any device."""
    quantize_ref(x, rows, pool, pages)


def dequantize_ref(pool: tuple[Tensor, ...], pages: Tensor, dtype: torch.dtype) -> Tensor:
    """The tokens of some pages, int64 [P]: [P * 64, Hkv, D]."""
    (data,) = pool
    taken = data.view(-1, PAGE_TOKENS, *data.shape[1:])[pages].flatten(0, 1)
    return taken if taken.dtype == dtype else taken.to(dtype)


if triton is not None:

    @triton.jit
    def load_tile(
        pool,
        pages,
        places,
        i_kv,
        num_kv,
        o_d,
        m_n,
        m_d,
        HEAD_DIM: tl.constexpr,
        DTYPE: tl.constexpr,
        NATIVE: tl.constexpr,
    ):
        """[BLOCK, D] in DTYPE of one kv head: tokens at `places` of `pages`, int32 [BLOCK]; 0 where masked."""
        slots = pages.to(tl.int64) * 64 + places
        offsets = (slots[:, None] * num_kv + i_kv) * HEAD_DIM + o_d[None, :]
        return tl.load(pool[0] + offsets, mask=m_n[:, None] & m_d[None, :], other=0.0).to(DTYPE)
