"""RMSNorm whose weight may be wider than its input: out = x / sqrt(mean(x^2) + eps) * weight, rounded once.

PyTorch's fused norm wants both in one dtype; Gemma's weight, 1 + w, loses its meaning in bfloat16.
Source: Zhang and Sennrich, Root mean square layer normalization, 2019.

Shapes: x [T, N] with contiguous rows, weight [N], out [T, N] in x's dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same in plain torch."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


@triton.jit
def rms_norm_kernel(x, weight, out, stride_x, size, eps, BLOCK: tl.constexpr):
    i_t = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BLOCK)
    m_n = o_n < size
    # [BLOCK]
    b_x = tl.load(x + i_t * stride_x + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_w = tl.load(weight + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_out = b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) / size + eps) * b_w
    tl.store(out + i_t * size + o_n, b_out.to(out.dtype.element_ty), mask=m_n)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Launch: the normed rows [T, N] of x, new and contiguous."""
    num_tokens, size = x.shape
    assert x.stride(1) == 1
    out = x.new_empty((num_tokens, size))
    if num_tokens:
        block = triton.next_power_of_2(size)
        rms_norm_kernel[(num_tokens,)](
            x, weight, out, x.stride(0), size, eps, BLOCK=block, num_warps=min(16, max(1, block // 512))
        )
    return out
