"""K/V in float8 e4m3, with one float32 scale for each block of 64 tokens and head; K and V apart.

    scale = 2^s, the least power of two with max|x| <= 448 * 2^s over the block's tokens and the head's dimensions
    stored = e4m3(x / scale), to nearest, ties to even; x is read back as stored * scale

A power of two costs no precision, because e4m3 rounds relative to each number; and what it gives is the same number in
bfloat16 as in float32, so that kernels and references agree bit for bit. A block with a number that is not finite reads
back as NaN. Only whole blocks are stored: a sequence's last one stays in the model's dtype until it is full.
Source: Micikevicius et al., FP8 formats for deep learning, 2022 (arXiv 2209.05433), for the format.

Shapes: x [T, Hkv, D]; a pool is (data uint8 [pages * 64, Hkv, D], scales float32 [pages, Hkv]). The bytes are kept as
uint8 because chips below sm_89 cannot load the type; there, they are converted by their bits.
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
PAGE_ROWS = (PAGE_TOKENS, 1)
# Pages that the references convert at a time, because they are float32 meanwhile.
_SOME = 256


def tensors(
    num_pages: int, num_kv: int, head_dim: int, dtype: torch.dtype
) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shape and type of each tensor of a pool. dtype: not looked at."""
    return ((num_pages * PAGE_TOKENS, num_kv, head_dim), torch.uint8), ((num_pages, num_kv), torch.float32)


def quantize_ref(x: Tensor, rows: Tensor, pool: tuple[Tensor, ...], pages: Tensor) -> None:
    """Store blocks of 64 tokens of x, the i-th from row rows[i] on, as pages[i]; both int64 [P]. A page below 0 stands
    for no block."""
    data, scales = pool
    blocks = data.view(-1, PAGE_TOKENS, *data.shape[1:])
    rows, pages = rows[pages >= 0], pages[pages >= 0]
    offsets = torch.arange(PAGE_TOKENS, device=x.device)
    for some_rows, some in zip(rows.split(_SOME), pages.split(_SOME), strict=True):
        taken = x[some_rows[:, None] + offsets].float()  # [P, 64, Hkv, D]
        bits = taken.abs().amax((1, 3)).view(torch.int32)  # [P, Hkv]
        # 448 = 1.75 * 2^8: a larger mantissa needs the next power of two.
        exponent = ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000)).clamp(min=1)
        inverse = ((254 - exponent) << 23).view(torch.float32)
        stored = (taken * inverse[:, None, :, None]).to(torch.float8_e4m3fn)
        blocks[some] = stored.view(torch.uint8)
        scales[some] = torch.where(bits < 0x7F800000, (exponent << 23).view(torch.float32), torch.nan)


def dequantize_ref(pool: tuple[Tensor, ...], pages: Tensor, dtype: torch.dtype) -> Tensor:
    """The tokens of some pages, int64 [P]: [P * 64, Hkv, D]."""
    data, scales = pool
    blocks = data.view(-1, PAGE_TOKENS, *data.shape[1:])
    out = torch.empty((len(pages), *blocks.shape[1:]), dtype=dtype, device=data.device)
    for part, some in zip(out.split(_SOME), pages.split(_SOME), strict=True):
        numbers = blocks[some].view(torch.float8_e4m3fn).float()
        torch.mul(numbers, scales[some][:, None, :, None], out=part)
    return out.flatten(0, 1)


def quantize(x: Tensor, rows: Tensor, pool: tuple[Tensor, ...], pages: Tensor) -> None:
    """`quantize_ref`, on a GPU by a kernel."""
    if x.device.type == "cuda":
        quantize_by_kernel(x, rows, pool, pages)
    else:
        quantize_ref(x, rows, pool, pages)


def quantize_by_kernel(x: Tensor, rows: Tensor, pool: tuple[Tensor, ...], pages: Tensor) -> None:
    """The kernel: the same bits."""
    data, scales = pool
    num_kv, head_dim = x.shape[1:]
    if x.stride()[1:] != (head_dim, 1):
        x = x.contiguous()
    if len(pages):
        quantize_kernel[(len(pages), num_kv)](
            x,
            rows,
            data,
            scales,
            pages,
            x.stride(0),
            num_kv,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            num_warps=4,
        )


if triton is not None:

    @triton.jit
    def quantize_kernel(x, rows, data, scales, pages, stride_x, num_kv, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
        """One program per block and head."""
        i_p = tl.program_id(0)
        i_kv = tl.program_id(1)
        o_n = tl.arange(0, 64)
        o_d = tl.arange(0, BLOCK_D)
        m_d = (o_d < HEAD_DIM)[None, :]
        row = tl.load(rows + i_p)
        page = tl.load(pages + i_p)
        if page < 0:
            return
        # [64, BLOCK_D]
        p_x = x + (row + o_n)[:, None].to(tl.int64) * stride_x + i_kv * HEAD_DIM + o_d[None, :]
        b_x = tl.load(p_x, mask=m_d, other=0.0).to(tl.float32)
        # As integers absolute numbers have the same order, and those that are not finite come last.
        bits = tl.max(tl.max(b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0)
        exponent = tl.maximum((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32), 1)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        scale = tl.where(bits < 0x7F800000, exponent << 23, 0x7FC00000).to(tl.float32, bitcast=True)
        offsets = ((page.to(tl.int64) * 64 + o_n)[:, None] * num_kv + i_kv) * HEAD_DIM + o_d[None, :]
        tl.store(data + offsets, _e4m3(b_x * inverse), mask=m_d)
        tl.store(scales + page.to(tl.int64) * num_kv + i_kv, scale)

    @triton.jit
    def _e4m3(x):
        """The bits, uint8, of float32 numbers of at most 448: by integers, because chips below sm_89 have no other way
        and all are to give the same."""
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Three bits of mantissa are kept, to nearest even; the exponents differ by 120.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 they are multiples of 2^-9, which is the last bit of a number between 2^14 and 2^15.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        number = tl.where(size < 0x3C800000, small, normal)
        return (number | ((bits >> 24) & 0x80)).to(tl.uint8)

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
        """[BLOCK, D] in DTYPE of one kv head: tokens at `places` of `pages`, int32 [BLOCK]; 0 where masked. NATIVE:
        whether the chip converts the type itself."""
        slots = pages.to(tl.int64) * 64 + places
        offsets = (slots[:, None] * num_kv + i_kv) * HEAD_DIM + o_d[None, :]
        b_x = tl.load(pool[0] + offsets, mask=m_n[:, None] & m_d[None, :], other=0)
        b_scale = tl.load(pool[1] + pages.to(tl.int64) * num_kv + i_kv, mask=m_n, other=0.0)
        if NATIVE:
            b_x = b_x.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            # As float16 the same bits are numbers 2^8 times smaller. None of the stored ones is NaN.
            b_x = b_x.to(tl.int16)
            b_x = (((b_x & 0x80) << 8) | ((b_x & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return (b_x * b_scale[:, None]).to(DTYPE)
