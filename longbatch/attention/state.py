"""Partial softmax attention: the output over some of the keys, and the log-sum-exp that lets it be merged.

Shapes: q [Tq, H, D], k and v [Tk, Hkv, D] (H a multiple of Hkv; the keys are never repeated where the device's
kernel reads groups itself), out [Tq, H, D], lse [H, Tq] float32, natural logarithm.
Merging two states over disjoint keys is exact: FlashAttention (arXiv 2205.14135), section 3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
# Scores of at most this many numbers are held at once where no fused kernel applies.
EXPLICIT_SCORES = 1 << 24


class State(NamedTuple):
    """Normalized output over some keys and the log of its softmax denominator."""

    out: Tensor
    lse: Tensor


def partial(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False) -> State:
    """Attention over all keys, or over keys j <= i when `causal` (then Tq == Tk)."""
    query, key, value = _batched(q), _batched(k), _batched(v)
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    elif q.dtype == torch.float32:
        return masked(q, k, v, None, scale=scale, causal=causal)
    elif _cudnn_serves(q):
        return cudnn(q, k, v, scale=scale, causal=causal)
    else:
        out, lse = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)[:2]
    return State(out[0].transpose(0, 1), lse[0])


def cudnn(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> State:
    """The same by cuDNN, in half precision on a GPU: the operation behind torch's SDPA, which refuses nothing here for
    reasons of its own."""
    out, lse = aten._scaled_dot_product_cudnn_attention(
        _batched(q), _batched(k), _batched(v), None, True, 0.0, causal, False, scale=scale
    )[:2]
    return State(out[0].transpose(0, 1), lse.reshape(q.shape[1], q.shape[0]))


def masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, scale: float, causal: bool = False) -> State:
    """Attention under an additive bias [Tq, Tk] of 0 and -inf in which every query sees some key."""
    query, key, value = _batched(q), _batched(k), _batched(v)
    if q.device.type == "cpu":
        mask = None if bias is None else bias[None, None]
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        return State(out[0].transpose(0, 1), lse[0])
    groups = q.shape[1] // k.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if bias is not None:
        bias = _aligned(bias).expand(1, q.shape[1], -1, -1)
    out, lse = aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, 0.0, causal, scale=scale)[:2]
    return State(out[0].transpose(0, 1), lse[0, :, : q.shape[0]])


def explicit(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, scale: float, softcap: float) -> State:
    """Attention whose scores pass softcap * tanh(score / softcap), which no fused kernel of torch offers.

    Scores are formed in float32, at most `EXPLICIT_SCORES` at a time.
    """
    groups = q.shape[1] // k.shape[1]
    key = k.float().permute(1, 2, 0).repeat_interleave(groups, 0)  # [H, D, Tk]
    value = v.float().transpose(0, 1).repeat_interleave(groups, 0)  # [H, Tk, D]
    outs, lses = [], []
    rows = max(1, EXPLICIT_SCORES // (q.shape[1] * k.shape[0]))
    for low in range(0, q.shape[0], rows):
        scores = torch.matmul(q[low : low + rows].float().transpose(0, 1), key).mul_(scale)
        scores = scores.div_(softcap).tanh_().mul_(softcap)
        if bias is not None:
            scores += bias[low : low + rows]
        lse = scores.logsumexp(-1)
        outs.append(torch.matmul((scores - lse[..., None]).exp_(), value).transpose(0, 1))
        lses.append(lse)
    return State(torch.cat(outs).to(q.dtype), torch.cat(lses, dim=1))


def merge(states: list[State]) -> State:
    """The state over the union of disjoint key sets; float32 weights, in the order given."""
    if len(states) == 1:
        return states[0]
    lse = torch.logsumexp(torch.stack([state.lse for state in states]), dim=0)
    total: Tensor | None = None
    for state in states:
        weight = (state.lse - lse).exp_().transpose(0, 1)[..., None]  # [Tq, H, 1]
        part = state.out * weight
        total = part if total is None else total.add_(part)
    assert total is not None
    return State(total.to(states[0].out.dtype), lse)


def with_sinks(state: State, sinks: Tensor | None) -> Tensor:
    """The output when logits [H] join each softmax, or as it is without them.

    A sink adds exp(sink) to the denominator: out * exp(lse) / (exp(lse) + exp(sink)).
    """
    if sinks is None:
        return state.out
    weight = torch.sigmoid(state.lse - sinks.float()[:, None]).transpose(0, 1)[..., None]
    return (state.out * weight).to(state.out.dtype)


def _batched(x: Tensor) -> Tensor:
    """[T, H, D] as the [1, H, T, D] that torch's kernels take, without a copy."""
    return x.transpose(0, 1).unsqueeze(0)


def _cudnn_serves(q: Tensor) -> bool:
    """cuDNN's fused attention is about twice FlashAttention-2's rate on Hopper and newer."""
    return torch.cuda.get_device_capability(q.device)[0] >= 9 and q.shape[-1] <= 128 and q.shape[-1] % 8 == 0


def _aligned(bias: Tensor) -> Tensor:
    """The same bias on storage whose rows start at multiples of 16 bytes, as the kernel demands."""
    width = -(-bias.shape[1] // 8) * 8
    storage = bias.new_zeros((bias.shape[0], width))
    storage[:, : bias.shape[1]] = bias
    return storage[:, : bias.shape[1]]
