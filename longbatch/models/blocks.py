"""Attention projections and the dense MLP of one layer, on packed tokens: no batch dimension, no padding.

Shapes: T tokens of a tile, H heads, G key-value heads, D head dimension. Residual sums are written into the
residual stream itself (beta = 1 of the matrix product), so a tile allocates only what its projections produce.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

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


class Attention:
    """q, k, v and output projections of a layer: everything of attention but the attention itself."""

    def __init__(self, spec: LayerSpec, norm_eps: float, weights: Mapping[str, Tensor]) -> None:
        heads, groups = spec.num_heads, spec.num_kv_heads
        self._heads, self._groups, self._head_dim = heads, groups, spec.head_dim
        self._eps = norm_eps
        self._qkv, self._qkv_bias = weights["qkv"], weights.get("qkv_bias")
        self._q_norm, self._k_norm = weights.get("q_norm"), weights.get("k_norm")
        self._out, self._out_bias = weights["out"], weights.get("out_bias")
        self._out_norm = weights.get("attention_out_norm")
        self._rotates = spec.rope is not None
        rows = heads * spec.head_dim
        self._q_rows, self._kv_rows, self._all_rows = slice(None, rows), slice(rows, None), slice(None)
        self.sinks = weights.get("sinks")

    def q(self, n: Tensor, rope: RopeValues | None) -> Tensor:
        """Queries [T, H, D] of normed tokens n [T, hidden]."""
        return self._turn(self._project(n, self._q_rows), self._heads, 0, rope)[0]

    def kv(self, n: Tensor, rope: RopeValues | None) -> tuple[Tensor, Tensor]:
        """Keys and values [T, G, D]; values are a view with gaps between tokens."""
        fused = self._project(n, self._kv_rows)
        return self._turn(fused, 0, self._groups, rope)[1], fused[:, self._groups :]

    def qkv(self, n: Tensor, rope: RopeValues | None) -> tuple[Tensor, Tensor, Tensor]:
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

    def _project(self, n: Tensor, rows: slice) -> Tensor:
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
    """down(activation(gate(n)) * up(n)), gate and up in one product."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor]) -> None:
        self._gate_up, self._gate_up_bias = weights["gate_up"], weights.get("gate_up_bias")
        self._down, self._down_bias = weights["down"], weights.get("down_bias")
        self._activation = spec.activation

    def add_to(self, x: Tensor, n: Tensor) -> Tensor:
        """x += mlp(n), in place; returns x."""
        return add_linear(x, self._inner(n), self._down, self._down_bias)

    def __call__(self, n: Tensor) -> Tensor:
        """mlp(n [T, hidden]) -> [T, hidden]."""
        return linear(self._inner(n), self._down, self._down_bias)

    def _inner(self, n: Tensor) -> Tensor:
        return gated(linear(n, self._gate_up, self._gate_up_bias), self._activation)
