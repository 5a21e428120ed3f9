"""Sparse mixture of experts: routing, and the experts' products over tokens sorted by expert.

Every token's experts are summed in the order of their rank, so a row's numbers do not depend on what else is in
the tile. With E experts, k of them per token: routed rows are [T * k, ...], grouped by expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longbatch.models.blocks import gated_for, rms_norm
from longbatch.models.fp8 import (
    Fp8Weight,
    QuantizedRows,
    Rows,
    Weight,
    grouped_product,
    multiplies_grouped,
    quantize_rows,
)
from longbatch.models.linear import linear, linear_into
from longbatch.models.spec import LayerSpec, MoeSpec


class MoeMlp:
    """Router and experts of one layer, and the norm before them."""

    def __init__(
        self, spec: LayerSpec, norm_eps: float, weights: Mapping[str, Tensor], products: Mapping[str, Weight]
    ) -> None:
        assert spec.moe is not None
        self._eps = norm_eps
        self._norm = weights["mlp_norm"]
        self._spec = spec.moe
        self._activation = "clamped" if spec.moe.style == "gpt_oss" else spec.activation
        self._router, self._router_bias = weights["router"], weights.get("router_bias")
        self._gate_up, self._gate_up_bias = products["expert_gate_up"], weights.get("expert_gate_up_bias")
        self._down, self._down_bias = products["expert_down"], weights.get("expert_down_bias")

    @property
    def can_be_captured(self) -> bool:
        """Whether it may be part of a CUDA graph: the sizes of the groups never come to the host."""
        dtype = self._router.dtype
        return all(multiplies_grouped(dtype, weight) for weight in (self._gate_up, self._down))

    def add_to(self, x: Tensor) -> Tensor:
        """x += moe(norm(x)), in place; returns x."""
        return x.add_(self(x))

    def __call__(self, x: Tensor) -> Tensor:
        """moe(norm(x [T, hidden])) -> [T, hidden]."""
        n = rms_norm(x, self._norm, self._eps)
        weights, experts = route(linear(n, self._router, self._router_bias), self._spec)
        num_tokens, rank = experts.shape
        chosen, order = torch.sort(experts.reshape(-1), stable=True)
        numbers = torch.arange(self._spec.num_experts, device=n.device)
        groups = Groups(chosen, torch.searchsorted(chosen, numbers, right=True, out_int32=True))
        routed = order // rank
        # Quantized before they are repeated: a token's numbers are the same for each of its experts.
        rows = quantize_rows(n).take(routed) if isinstance(self._gate_up, Fp8Weight) else n[routed]
        gate_up = expert_linear(rows, self._gate_up, self._gate_up_bias, groups)
        inner = gated_for(self._down, gate_up, self._activation, self._spec.alpha, self._spec.limit)
        outputs = expert_linear(inner, self._down, self._down_bias, groups)
        # Back to the order of tokens: row t * k + j is the j-th expert of token t.
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=n.device))
        ranked = outputs.index_select(0, places).view(num_tokens, rank, -1)
        return torch.bmm(weights.unsqueeze(1), ranked).squeeze(1)


class Groups(NamedTuple):
    """Routed rows grouped by expert. chosen: expert of each row [R]. ends: int32 [E], where each group ends."""

    chosen: Tensor
    ends: Tensor


def route(logits: Tensor, spec: MoeSpec) -> tuple[Tensor, Tensor]:
    """Weights, in the logits' dtype, and expert numbers of each token, both [T, k], the best first."""
    if spec.score == "topk_then_softmax":
        top, experts = torch.topk(logits, spec.experts_per_token, dim=-1)
        return torch.softmax(top, dim=-1), experts
    scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
    weights, experts = torch.topk(scores, spec.experts_per_token, dim=-1)
    if spec.renormalize:
        weights /= weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), experts


def expert_linear(rows: Rows, weight: Weight, bias: Tensor | None, groups: Groups) -> Tensor:
    """rows [R, in], grouped by expert, times each group's weight [E, out, in], plus its bias -> [R, out]. Quantized
    rows go with e4m3 weights, and others with others."""
    together = _all_experts(rows, weight, groups)
    if together is not None:
        return together if bias is None else together.add_(bias[groups.chosen])
    result = torch.empty((rows.shape[0], weight.shape[1]), dtype=rows.dtype, device=weight.device)
    start = 0
    for expert, end in enumerate(groups.ends.tolist()):
        if start < end:
            part = slice(start, end)
            if isinstance(weight, Fp8Weight):
                assert isinstance(rows, QuantizedRows)
                result[part] = linear(rows.part(part), weight[expert])
            else:
                assert isinstance(rows, Tensor)
                linear_into(result[part], rows[part], weight[expert])
            if bias is not None:
                result[part].add_(bias[expert])
            start = end
    return result


def _all_experts(rows: Rows, weight: Weight, groups: Groups) -> Tensor | None:
    """The products of all groups in one launch, where the device has it."""
    if isinstance(rows, QuantizedRows):
        assert isinstance(weight, Fp8Weight)
        return grouped_product(rows, weight, groups.ends) if multiplies_grouped(rows.dtype, weight) else None
    assert isinstance(weight, Tensor)
    if not (rows.is_cuda and rows.dtype == torch.bfloat16):
        return None
    result: Tensor = F.grouped_mm(rows, weight.transpose(-2, -1), offs=groups.ends)
    return result
