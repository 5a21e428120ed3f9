"""Norm and rotary embedding of queries and keys, straight from the output of a fused projection.

For token t and head h of x, with y = x[t, h] or, where there is a norm,
y = x[t, h] * weight / sqrt(mean(x[t, h]^2) + eps), and R rotated dimensions:

    out[:R/2]  = y[:R/2] cos[t] - y[R/2:R] sin[t]
    out[R/2:R] = y[R/2:R] cos[t] + y[:R/2] sin[t]
    out[R:]    = y[R:]

All in float32, rounded once. Read once and written once: the projection's buffer stays, q and k come out contiguous.
Source of the rotation: Su et al., RoFormer, 2021, in the rotate-half order of GPT-NeoX.

Shapes: x [T, num_q + num_k or more, D] with contiguous heads, cos and sin [T, R/2] float32, q [T, num_q, D],
k [T, num_k, D], weights [D].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def qk_rope_ref(
    x: Tensor,
    num_q: int,
    num_k: int,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The same in plain torch: q [T, num_q, D] and k [T, num_k, D]."""

    def turn(part: Tensor, weight: Tensor | None) -> Tensor:
        y = part.float()
        if weight is not None:
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()
        half = cos.shape[-1]
        first, second, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
        c, s = cos[:, None], sin[:, None]
        return torch.cat([first * c - second * s, second * c + first * s, rest], -1).to(x.dtype)

    return turn(x[:, :num_q], q_weight), turn(x[:, num_q : num_q + num_k], k_weight)


@triton.jit
def qk_rope_kernel(
    x,
    cos,
    sin,
    q_weight,
    k_weight,
    q,
    k,
    stride_x,
    num_q,
    num_k,
    eps,
    HAS_NORM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    HEAD_DIM: tl.constexpr = 2 * HALF + REST
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_d = tl.arange(0, BLOCK_HALF)
    o_r = 2 * HALF + tl.arange(0, BLOCK_REST)
    m_d = o_d < HALF
    m_r = o_r < HEAD_DIM
    is_q = o_h < num_q
    is_k = (o_h >= num_q) & (o_h < num_q + num_k)
    m_h = is_q | is_k
    p_x = x + i_t * stride_x + o_h[:, None] * HEAD_DIM
    # [BLOCK_H, BLOCK_HALF]
    b_1 = tl.load(p_x + o_d[None, :], mask=m_h[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    b_2 = tl.load(p_x + HALF + o_d[None, :], mask=m_h[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    b_c = tl.load(cos + i_t * HALF + o_d, mask=m_d, other=0.0)[None, :]
    b_s = tl.load(sin + i_t * HALF + o_d, mask=m_d, other=0.0)[None, :]
    if REST > 0:
        # [BLOCK_H, BLOCK_REST]
        b_3 = tl.load(p_x + o_r[None, :], mask=m_h[:, None] & m_r[None, :], other=0.0).to(tl.float32)
    if HAS_NORM:
        b_sum = tl.sum(b_1 * b_1, 1) + tl.sum(b_2 * b_2, 1)
        if REST > 0:
            b_sum += tl.sum(b_3 * b_3, 1)
        b_scale = tl.rsqrt(b_sum / HEAD_DIM + eps)[:, None]
        b_1 *= b_scale * _weights(q_weight, k_weight, o_d, m_d, is_q)
        b_2 *= b_scale * _weights(q_weight, k_weight, HALF + o_d, m_d, is_q)
        if REST > 0:
            b_3 *= b_scale * _weights(q_weight, k_weight, o_r, m_r, is_q)
    b_first = (b_1 * b_c - b_2 * b_s).to(q.dtype.element_ty)
    b_second = (b_2 * b_c + b_1 * b_s).to(q.dtype.element_ty)
    p_q = q + (i_t * num_q + o_h[:, None]) * HEAD_DIM
    p_k = k + (i_t * num_k + o_h[:, None] - num_q) * HEAD_DIM
    m_q = is_q[:, None] & m_d[None, :]
    m_k = is_k[:, None] & m_d[None, :]
    tl.store(p_q + o_d[None, :], b_first, mask=m_q)
    tl.store(p_q + HALF + o_d[None, :], b_second, mask=m_q)
    tl.store(p_k + o_d[None, :], b_first, mask=m_k)
    tl.store(p_k + HALF + o_d[None, :], b_second, mask=m_k)
    if REST > 0:
        b_rest = b_3.to(q.dtype.element_ty)
        tl.store(p_q + o_r[None, :], b_rest, mask=is_q[:, None] & m_r[None, :])
        tl.store(p_k + o_r[None, :], b_rest, mask=is_k[:, None] & m_r[None, :])


@triton.jit
def _weights(q_weight, k_weight, offsets, mask, is_q):
    b_q = tl.load(q_weight + offsets, mask=mask, other=0.0).to(tl.float32)
    b_k = tl.load(k_weight + offsets, mask=mask, other=0.0).to(tl.float32)
    return tl.where(is_q[:, None], b_q[None, :], b_k[None, :])


def qk_rope(
    x: Tensor,
    num_q: int,
    num_k: int,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Launch: q [T, num_q, D] and k [T, num_k, D] of x [T, heads, D], both new and contiguous.

    Heads 0..num_q-1 of x are queries, the next num_k keys; either may be 0. A norm needs the weight of each kind
    that is present.
    """
    num_tokens, _, head_dim = x.shape
    half = cos.shape[-1]
    rest = head_dim - 2 * half
    assert x.stride(2) == 1
    assert x.stride(1) == head_dim
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    q, k = x.new_empty((num_tokens, num_q, head_dim)), x.new_empty((num_tokens, num_k, head_dim))
    if num_tokens == 0:
        return q, k
    given = q_weight if q_weight is not None else k_weight
    block_h = 16
    qk_rope_kernel[(num_tokens, triton.cdiv(num_q + num_k, block_h))](
        x,
        cos,
        sin,
        x if given is None else q_weight if q_weight is not None else given,
        x if given is None else k_weight if k_weight is not None else given,
        q,
        k,
        x.stride(0),
        num_q,
        num_k,
        eps,
        HAS_NORM=given is not None,
        HALF=half,
        REST=rest,
        BLOCK_H=block_h,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(max(rest, 1)),
        num_warps=4,
    )
    return q, k
