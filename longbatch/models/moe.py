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

from longbatch.models.blocks import gated
from longbatch.models.linear import linear, linear_into
from longbatch.models.spec import LayerSpec, MoeSpec


class MoeMlp:
    """Router and experts of one layer."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor]) -> None:
        assert spec.moe is not None
        self._spec = spec.moe
        self._activation = "clamped" if spec.moe.style == "gpt_oss" else spec.activation
        self._router, self._router_bias = weights["router"], weights.get("router_bias")
        self._gate_up, self._gate_up_bias = weights["expert_gate_up"], weights.get("expert_gate_up_bias")
        self._down, self._down_bias = weights["expert_down"], weights.get("expert_down_bias")

    def add_to(self, x: Tensor, n: Tensor) -> Tensor:
        """x += moe(n), in place; returns x."""
        return x.add_(self(n))

    def __call__(self, n: Tensor) -> Tensor:
        """moe(n [T, hidden]) -> [T, hidden]."""
        weights, experts = route(linear(n, self._router, self._router_bias), self._spec)
        num_tokens, rank = experts.shape
        chosen, order = torch.sort(experts.reshape(-1), stable=True)
        numbers = torch.arange(self._spec.num_experts, device=n.device)
        groups = Groups(chosen, torch.searchsorted(chosen, numbers, right=True, out_int32=True))
        gate_up = expert_linear(n[order // rank], self._gate_up, self._gate_up_bias, groups)
        inner = gated(gate_up, self._activation, self._spec.alpha, self._spec.limit)
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


def expert_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
    """rows [R, in], grouped by expert, times each group's weight [E, out, in], plus its bias -> [R, out]."""
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        result: Tensor = F.grouped_mm(rows, weight.transpose(-2, -1), offs=groups.ends)
        return result if bias is None else result.add_(bias[groups.chosen])
    result = rows.new_empty(rows.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(groups.ends.tolist()):
        if start < end:
            linear_into(result[start:end], rows[start:end], weight[expert])
            if bias is not None:
                result[start:end].add_(bias[expert])
            start = end
    return result
