"""Attention projections and the dense MLP of one layer, on packed tokens: no batch dimension, no padding.

Shapes: T tokens of a tile, H heads, G key-value heads, D head dimension. Residual sums are written into the
residual stream itself (beta = 1 of the matrix product), so a tile allocates only what its projections produce.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from longbatch.models.fp8 import Fp8Weight, QuantizedRows, Rows, Weight, has_kernels, quantize_rows
from longbatch.models.linear import add_linear, linear
from longbatch.models.rope import RopeValues, rotate
from longbatch.models.spec import LayerSpec


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32, in x's dtype.

    x is [T, N] or, where weight has its dtype, of any shape. A float32 weight on a narrower x is Gemma's 1 + w,
    which bfloat16 would round away.
    """
    if weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    if x.is_cuda:
        from longbatch_kernels.rms_norm import rms_norm as fused

        return fused(x, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def rms_norm_for(weight: Weight, x: Tensor, norm: Tensor, eps: float) -> Rows:
    """The normed rows of x [T, N] as products with a weight take them: quantized, where it is."""
    if not isinstance(weight, Fp8Weight):
        return rms_norm(x, norm, eps)
    if has_kernels(x.device):
        from longbatch_kernels.row_quant import rms_norm_quant

        return QuantizedRows(*rms_norm_quant(x, norm, eps), x.dtype)
    return quantize_rows(rms_norm(x, norm, eps))


def gated(gate_up: Tensor, activation: str, alpha: float = 0.0, limit: float = 0.0) -> Tensor:
    """activation(gate) * up of gate_up [T, 2 I], written over the gate: a view [T, I] of it.

    activation: silu, gelu_tanh, or gpt-oss's `clamped`, which alone reads alpha and limit.
    """
    if gate_up.is_cuda:
        from longbatch_kernels.gated import gated as fused

        return fused(gate_up, activation, alpha, limit)
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped":
        gate.clamp_(max=limit)
        up.clamp_(-limit, limit).add_(1)
        return gate.mul_(torch.sigmoid(gate * alpha)).mul_(up)
    if activation == "gelu_tanh":
        torch.ops.aten.gelu_(gate, approximate="tanh")
    else:
        F.silu(gate, inplace=True)
    return gate.mul_(up)


def gated_for(weight: Weight, gate_up: Tensor, activation: str, alpha: float = 0.0, limit: float = 0.0) -> Rows:
    """`gated` as products with a weight take it: quantized, where it is. gate_up may be overwritten."""
    if not isinstance(weight, Fp8Weight):
        return gated(gate_up, activation, alpha, limit)
    if has_kernels(gate_up.device):
        from longbatch_kernels.row_quant import gated_quant

        return QuantizedRows(*gated_quant(gate_up, activation, alpha, limit), gate_up.dtype)
    return quantize_rows(gated(gate_up, activation, alpha, limit))


class Attention:
    """q, k, v and output projections of a layer: everything of attention but the attention itself.

    products: its matrices that may be quantized; weights: its other tensors.
    """

    def __init__(
        self, spec: LayerSpec, norm_eps: float, weights: Mapping[str, Tensor], products: Mapping[str, Weight]
    ) -> None:
        heads, groups = spec.num_heads, spec.num_kv_heads
        self._heads, self._groups, self._head_dim = heads, groups, spec.head_dim
        self._eps = norm_eps
        self._qkv, self._qkv_bias = products["qkv"], weights.get("qkv_bias")
        self._q_norm, self._k_norm = weights.get("q_norm"), weights.get("k_norm")
        self._out, self._out_bias = products["out"], weights.get("out_bias")
        self._out_norm = weights.get("attention_out_norm")
        self._rotates = spec.rope is not None
        rows = heads * spec.head_dim
        self._q_rows, self._kv_rows, self._all_rows = slice(None, rows), slice(rows, None), slice(None)
        self.sinks = weights.get("sinks")

    def norm(self, x: Tensor, weight: Tensor) -> Rows:
        """The normed tokens that q, kv and qkv take."""
        return rms_norm_for(self._qkv, x, weight, self._eps)

    def q(self, n: Rows, rope: RopeValues | None) -> Tensor:
        """Queries [T, H, D] of normed tokens n [T, hidden]."""
        return self._turn(self._project(n, self._q_rows), self._heads, 0, rope)[0]

    def kv(self, n: Rows, rope: RopeValues | None) -> tuple[Tensor, Tensor]:
        """Keys and values [T, G, D]; values are a view with gaps between tokens."""
        fused = self._project(n, self._kv_rows)
        return self._turn(fused, 0, self._groups, rope)[1], fused[:, self._groups :]

    def qkv(self, n: Rows, rope: RopeValues | None) -> tuple[Tensor, Tensor, Tensor]:
        """q() and kv() in one product."""
        fused = self._project(n, self._all_rows)
        q, k = self._turn(fused, self._heads, self._groups, rope)
        return q, k, fused[:, self._heads + self._groups :]

    def out(self, x: Tensor, attention: Tensor) -> Tensor:
        """x += o_proj(attention [T, H, D]), in place; returns x."""
        attention = attention.reshape(x.shape[0], -1)
        if self._out_norm is None:
            return add_linear(x, attention, self._out, self._out_bias)
        return x.add_(rms_norm(linear(attention, self._out, self._out_bias), self._out_norm, self._eps))

    def _project(self, n: Rows, rows: slice) -> Tensor:
        """The heads [T, heads, D] that some rows of the fused projection make."""
        weight, bias = self._qkv[rows], None if self._qkv_bias is None else self._qkv_bias[rows]
        return linear(n, weight, bias).view(n.shape[0], weight.shape[0] // self._head_dim, self._head_dim)

    def _turn(self, fused: Tensor, num_q: int, num_k: int, rope: RopeValues | None) -> tuple[Tensor, Tensor]:
        """The first num_q heads as queries and the next num_k as keys, normed and rotated."""
        assert (rope is not None) == self._rotates
        if rope is not None and fused.is_cuda:
            from longbatch_kernels.qk_rope import qk_rope

            return qk_rope(fused, num_q, num_k, rope.cos, rope.sin, self._q_norm, self._k_norm, self._eps)
        q, k = fused[:, :num_q], fused[:, num_q : num_q + num_k]
        if self._q_norm is not None and self._k_norm is not None:
            q, k = rms_norm(q, self._q_norm, self._eps), rms_norm(k, self._k_norm, self._eps)
        return (q, k) if rope is None else (rotate(q, rope), rotate(k, rope))


class DenseMlp:
    """down(activation(gate(n)) * up(n)) of n = norm(x), gate and up in one product."""

    can_be_captured = True

    def __init__(
        self, spec: LayerSpec, norm_eps: float, weights: Mapping[str, Tensor], products: Mapping[str, Weight]
    ) -> None:
        self._eps = norm_eps
        self._norm = weights["mlp_norm"]
        self._gate_up, self._gate_up_bias = products["gate_up"], weights.get("gate_up_bias")
        self._down, self._down_bias = products["down"], weights.get("down_bias")
        self._activation = spec.activation

    def add_to(self, x: Tensor) -> Tensor:
        """x += mlp(norm(x)), in place; returns x."""
        return add_linear(x, self._inner(x), self._down, self._down_bias)

    def __call__(self, x: Tensor) -> Tensor:
        """mlp(norm(x [T, hidden])) -> [T, hidden]."""
        return linear(self._inner(x), self._down, self._down_bias)

    def _inner(self, x: Tensor) -> Rows:
        n = rms_norm_for(self._gate_up, x, self._norm, self._eps)
        return gated_for(self._down, linear(n, self._gate_up, self._gate_up_bias), self._activation)
