"""The gate of a gated MLP, in place: gate <- activation(gate) * up, from the output of a fused projection.

    silu:       g / (1 + exp(-g)) * u
    gelu_tanh:  0.5 g (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3))) * u
    clamped:    g' = min(g, limit), u' = clip(u, -limit, limit):  g' / (1 + exp(-alpha g')) * (u' + 1)

In float32, rounded once. Sources: Shazeer, GLU variants improve transformer, 2020; `clamped` is gpt-oss's.

Shapes: gate_up [T, 2 I], gate in columns 0..I-1, up in the rest.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

ACTIVATIONS = ("silu", "gelu_tanh", "clamped")


def gated_ref(gate_up: Tensor, activation: str, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """The same in plain torch, in a new tensor [T, I]."""
    gate, up = gate_up.float().chunk(2, -1)
    if activation == "silu":
        result = F.silu(gate) * up
    elif activation == "gelu_tanh":
        result = F.gelu(gate, approximate="tanh") * up
    else:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        result = gate * torch.sigmoid(alpha * gate) * (up + 1)
    return result.to(gate_up.dtype)


@triton.jit
def gated_kernel(gate_up, stride, size, alpha, limit, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    i_t = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_i = o_i < size
    p_gate = gate_up + i_t * stride + o_i
    # [BLOCK]
    b_g = tl.load(p_gate, mask=m_i, other=0.0).to(tl.float32)
    b_u = tl.load(p_gate + size, mask=m_i, other=0.0).to(tl.float32)
    b_out = activated(b_g, b_u, alpha, limit, ACTIVATION)
    tl.store(p_gate, b_out.to(gate_up.dtype.element_ty), mask=m_i)


@triton.jit
def activated(b_g, b_u, alpha, limit, ACTIVATION: tl.constexpr):
    """activation(gate) * up of float32 blocks, in float32. ACTIVATION: place in ACTIVATIONS."""
    if ACTIVATION == 0:
        b_out = b_g * _sigmoid(b_g) * b_u
    elif ACTIVATION == 1:
        # tanh(z) = 2 sigmoid(2 z) - 1, so 0.5 (1 + tanh(z)) = sigmoid(2 z).
        b_z = 1.5957691216057308 * (b_g + 0.044715 * b_g * b_g * b_g)
        b_out = b_g * _sigmoid(b_z) * b_u
    else:
        b_g = tl.minimum(b_g, limit)
        b_u = tl.minimum(tl.maximum(b_u, -limit), limit)
        b_out = b_g * _sigmoid(alpha * b_g) * (b_u + 1.0)
    return b_out


@triton.jit
def _sigmoid(b_x):
    # The exponent is never positive, so that nothing overflows.
    b_e = tl.exp(-tl.abs(b_x))
    return tl.where(b_x >= 0.0, 1.0, b_e) / (1.0 + b_e)


def gated(gate_up: Tensor, activation: str, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """Launch: overwrites the gate half of gate_up [T, 2 I] and returns it, a view [T, I]. alpha and limit are read
    by `clamped`."""
    num_tokens, width = gate_up.shape
    size = width // 2
    assert gate_up.stride(1) == 1
    block = min(2048, triton.next_power_of_2(size))
    if num_tokens:
        gated_kernel[(num_tokens, triton.cdiv(size, block))](
            gate_up,
            gate_up.stride(0),
            size,
            alpha,
            limit,
            ACTIVATION=ACTIVATIONS.index(activation),
            BLOCK=block,
            num_warps=4,
        )
    return gate_up[:, :size]
