"""Rows as e4m3 numbers of 8 bits with a scale each: of a tensor, of its RMSNorm, and of the gate of a gated MLP.

    scale = amax / 448        data = x * (448 / amax), rounded to nearest even

where x is float32 and never rounded in between; 448 is the largest number of e4m3. The fused kernels write the input of
a matrix product with e4m3 weights in the pass that makes it. They need a chip that converts to e4m3 by an instruction:
compute capability 8.9 or later.

Shapes: x [T, N] and gate_up [T, 2 N] with contiguous rows, data [T, N], scale float32 [T].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longbatch_kernels.gated import ACTIVATIONS, activated

MOST = tl.constexpr(448.0)
# Rows without a larger number are zero; it only keeps their scale from being.
LEAST = tl.constexpr(1e-30)


def row_quant_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    most = x.float().abs().amax(-1, keepdim=True).clamp(min=LEAST.value)
    return (x.float() * (MOST.value / most)).to(torch.float8_e4m3fn), (most / MOST.value).squeeze(-1)


@triton.jit
def row_quant_kernel(x, data, scale, stride_x, size, BLOCK: tl.constexpr):
    i_t = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BLOCK)
    m_n = o_n < size
    # [BLOCK]
    b_x = tl.load(x + i_t * stride_x + o_n, mask=m_n, other=0.0).to(tl.float32)
    _store_row(b_x, m_n, data + i_t * size + o_n, scale + i_t)


@triton.jit
def rms_norm_quant_kernel(x, weight, data, scale, stride_x, size, eps, BLOCK: tl.constexpr):
    i_t = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BLOCK)
    m_n = o_n < size
    # [BLOCK]
    b_x = tl.load(x + i_t * stride_x + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_w = tl.load(weight + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) / size + eps) * b_w
    _store_row(b_y, m_n, data + i_t * size + o_n, scale + i_t)


@triton.jit
def _store_row(b_y, m_n, p_data, p_scale):
    most = tl.maximum(tl.max(tl.abs(b_y), 0), LEAST)
    tl.store(p_data, (b_y * (MOST / most)).to(tl.float8e4nv), mask=m_n)
    tl.store(p_scale, most / MOST)


@triton.jit
def gated_quant_kernel(gate_up, data, scale, stride, size, alpha, limit, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    # A row is too long to be held, so it is computed twice: from memory, and then from the cache.
    i_t = tl.program_id(0).to(tl.int64)
    o_b = tl.arange(0, BLOCK)
    p_row = gate_up + i_t * stride
    # [BLOCK]
    b_most = tl.full([BLOCK], LEAST, tl.float32)
    for start in range(0, size, BLOCK):
        o_i = start + o_b
        m_i = o_i < size
        b_g = tl.load(p_row + o_i, mask=m_i, other=0.0).to(tl.float32)
        b_u = tl.load(p_row + size + o_i, mask=m_i, other=0.0).to(tl.float32)
        b_most = tl.maximum(b_most, tl.abs(activated(b_g, b_u, alpha, limit, ACTIVATION)))
    most = tl.max(b_most, 0)
    for start in range(0, size, BLOCK):
        o_i = start + o_b
        m_i = o_i < size
        b_g = tl.load(p_row + o_i, mask=m_i, other=0.0).to(tl.float32)
        b_u = tl.load(p_row + size + o_i, mask=m_i, other=0.0).to(tl.float32)
        b_y = activated(b_g, b_u, alpha, limit, ACTIVATION)
        tl.store(data + i_t * size + o_i, (b_y * (MOST / most)).to(tl.float8e4nv), mask=m_i)
    tl.store(scale + i_t, most / MOST)


def row_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Launch: data [T, N] and scale [T] of x."""
    data, scale = _outputs(x, x.shape[1])
    if len(x):
        row_quant_kernel[(len(x),)](x, data, scale, x.stride(0), x.shape[1], **_row_shape(x.shape[1]))
    return data, scale


def rms_norm_quant(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Launch: data [T, N] and scale [T] of x / sqrt(mean(x^2) + eps) * weight."""
    data, scale = _outputs(x, x.shape[1])
    if len(x):
        rms_norm_quant_kernel[(len(x),)](x, weight, data, scale, x.stride(0), x.shape[1], eps, **_row_shape(x.shape[1]))
    return data, scale


def gated_quant(gate_up: Tensor, activation: str, alpha: float = 1.702, limit: float = 7.0) -> tuple[Tensor, Tensor]:
    """Launch: data [T, I] and scale [T] of the gate of gate_up [T, 2 I], which stays as it is; see `gated`."""
    size = gate_up.shape[1] // 2
    data, scale = _outputs(gate_up, size)
    if len(gate_up):
        gated_quant_kernel[(len(gate_up),)](
            gate_up,
            data,
            scale,
            gate_up.stride(0),
            size,
            alpha,
            limit,
            ACTIVATION=ACTIVATIONS.index(activation),
            BLOCK=min(4096, triton.next_power_of_2(size)),
            num_warps=8,
        )
    return data, scale


def _outputs(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    assert x.stride(1) == 1
    data = torch.empty((len(x), size), dtype=torch.float8_e4m3fn, device=x.device)
    return data, torch.empty(len(x), dtype=torch.float32, device=x.device)


def _row_shape(size: int) -> dict[str, int]:
    """The launch of a kernel that holds a whole row."""
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}
