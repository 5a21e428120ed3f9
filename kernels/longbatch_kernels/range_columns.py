"""The columns of selections, made ready for `range_attention`: gathered once, with a bit for each block of rows.

A column is a key that every row after it sees. Where a slash range of the selection holds it for a block of rows
already, that block does not take it again. (See `range_index` for ranges and blocks.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128


class RangeLists(Protocol):
    """starts, stops int32 [S, R]; counts int32 [S]; columns int32 [S, C] ascending, padded with 2**31 - 1;
    column_counts int32 [S]; windows int32 [S], 0 for none."""

    @property
    def starts(self) -> Tensor: ...
    @property
    def stops(self) -> Tensor: ...
    @property
    def counts(self) -> Tensor: ...
    @property
    def columns(self) -> Tensor: ...
    @property
    def column_counts(self) -> Tensor: ...
    @property
    def windows(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Columns:
    """places int32 [S, C] ascending, C a multiple of TILE, padded with 2**31 - 1. keys, values [S, C, D].

    bits int32 [B, C / 32], clean int8 [B, C / TILE], for blocks of rows: bit set where the block takes the column;
    clean 2 where every row takes every column of the tile, 1 where all rows take the same ones, else 0.
    """

    places: Tensor
    keys: Tensor
    values: Tensor
    bits: Tensor
    clean: Tensor


def gathered(lists: RangeLists, k: Tensor, v: Tensor, places: Tensor, num_blocks: int, most_blocks: int) -> Columns:
    """Columns of S selections over k, v [Tk, Hkv, D]. places: as in `RangeIndex`; num_blocks: blocks of rows of all
    selections, most_blocks: of the one with most."""
    num_selections, num_ranges, dim = *lists.starts.shape, k.shape[2]
    width = max(TILE, triton.cdiv(lists.columns.shape[1], TILE) * TILE)
    columns = torch.nn.functional.pad(lists.columns, (0, width - lists.columns.shape[1]), value=2**31 - 1).contiguous()
    found = Columns(
        columns,
        torch.empty(num_selections, width, dim, dtype=k.dtype, device=k.device),
        torch.empty(num_selections, width, dim, dtype=v.dtype, device=k.device),
        torch.empty(num_blocks, width // 32, dtype=torch.int32, device=k.device),
        torch.empty(num_blocks, width // TILE, dtype=torch.int8, device=k.device),
    )
    gather_columns_kernel[(width // 16, num_selections)](
        k,
        v,
        columns,
        places,
        found.keys,
        found.values,
        *k.stride()[:2],
        *v.stride()[:2],
        width,
        D=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        BLOCK=16,
        num_warps=4,
    )
    column_bits_kernel[(triton.cdiv(most_blocks, 32), num_selections, width // TILE)](
        columns,
        lists.starts.contiguous(),
        lists.stops.contiguous(),
        lists.counts,
        lists.windows,
        places,
        found.bits,
        found.clean,
        width,
        num_ranges,
        BLOCK=TILE,
        num_warps=4,
    )
    return found


@triton.jit
def gather_columns_kernel(
    k,
    v,
    columns,
    places,
    column_keys,
    column_values,
    stride_k_t,
    stride_k_h,
    stride_v_t,
    stride_v_h,
    width,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of one selection; padding holds key 0."""
    i_s = tl.program_id(1).to(tl.int64)
    o_c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < D)[None, :]
    column = tl.load(columns + i_s * width + o_c)
    key = tl.load(places + i_s * 6).to(tl.int64) + tl.where(column == 2147483647, 0, column)
    head = tl.load(places + i_s * 6 + 2).to(tl.int64)
    p_out = (i_s * width + o_c)[:, None] * D + o_d[None, :]
    b_k = tl.load(k + key[:, None] * stride_k_t + head * stride_k_h + o_d[None, :], mask=m_d, other=0.0)
    tl.store(column_keys + p_out, b_k, mask=m_d)
    b_v = tl.load(v + key[:, None] * stride_v_t + head * stride_v_h + o_d[None, :], mask=m_d, other=0.0)
    tl.store(column_values + p_out, b_v, mask=m_d)


@triton.jit
def column_bits_kernel(
    columns,
    starts,
    stops,
    counts,
    windows,
    places,
    bits,
    clean,
    width,
    num_ranges,
    BLOCK: tl.constexpr,
):
    """32 blocks of rows and BLOCK columns of one selection."""
    i_g = tl.program_id(0)
    i_s = tl.program_id(1).to(tl.int64)
    i_t = tl.program_id(2)
    n_b = tl.load(places + i_s * 6 + 5)
    if i_g * 32 >= n_b:
        return
    first = tl.load(places + i_s * 6 + 4) + i_g * 32
    window = tl.load(windows + i_s)
    n_r = tl.load(counts + i_s)
    starts += i_s * num_ranges
    stops += i_s * num_ranges
    o_c = tl.arange(0, BLOCK)
    b_col = tl.load(columns + i_s * width + i_t * BLOCK + o_c)
    # A column is this far before the end of the first of the blocks, and 64 more before each next one's.
    offset = (first + 1) * 64 - b_col
    # The first range that reaches beyond the least offset that counts, by halving.
    least = tl.maximum(offset, 1)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + n_r
    span = n_r
    while span > 0:
        middle = (low + high) >> 1
        ends = tl.load(stops + middle, mask=low < high, other=0) + 64
        below = (low < high) & (ends < least)
        low = tl.where(below, middle + 1, low)
        high = tl.where((middle < high) & (below == 0), middle, high)
        span = span >> 1
    covered = tl.zeros([BLOCK], tl.uint32)
    last = offset + 31 * 64
    begin = tl.load(starts + low, mask=low < n_r, other=2147483647)
    left = tl.max(((low < n_r) & (begin < last)).to(tl.int32), 0)
    while left > 0:
        stop = tl.load(stops + low, mask=low < n_r, other=0) + 64
        # Blocks j with begin < offset + 64 j <= stop.
        j_low = tl.minimum(tl.maximum((begin + 64 - offset) >> 6, 0), 32)
        j_high = tl.minimum(tl.maximum((stop - offset) >> 6, -1) + 1, 32)
        inside = (low < n_r) & (begin < last) & (j_low < j_high)
        # Shifting by 32 would be undefined, so in two steps.
        size = tl.where(inside, j_high - j_low, 1).to(tl.uint32)
        ones = ((tl.full([BLOCK], 1, tl.uint32) << (size - 1)) << 1) - 1
        covered |= tl.where(inside, ones << tl.where(inside, j_low, 0).to(tl.uint32), 0)
        low += 1
        begin = tl.load(starts + low, mask=low < n_r, other=2147483647)
        left = tl.max(((low < n_r) & (begin < last)).to(tl.int32), 0)
    lane = (o_c % 32).to(tl.uint32)
    base = tl.load(places + i_s * 6 + 3).to(tl.int64) + i_g * 32
    o_w = tl.arange(0, BLOCK // 32)
    for j in tl.range(0, tl.minimum(32, n_b - i_g * 32)):
        end = (first + j + 1) * 64
        taken = (b_col < end) & (((covered >> j) & 1) == 0)
        words = tl.sum(tl.reshape(taken.to(tl.uint32) << lane, [BLOCK // 32, 32]), axis=1)
        p_out = bits + (base + j) * (width // 32) + i_t * (BLOCK // 32) + o_w
        tl.store(p_out, words.to(tl.int32, bitcast=True))
        # 1: every row of the block takes a column or none does. 2: every row takes every column.
        even = tl.min(((taken == 0) | (end - 64 - b_col >= window)).to(tl.int32), axis=0)
        whole = tl.min(taken.to(tl.int32), axis=0)
        tl.store(clean + (base + j) * (width // BLOCK) + i_t, (even + even * whole).to(tl.int8))
