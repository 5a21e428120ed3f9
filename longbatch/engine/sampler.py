"""From logits to the next token, row by row independent: a row's choice depends on its own logits, parameters,
seed and step alone.

Filters follow transformers' order: repetition penalty, temperature, top-k, top-p, min-p. Each filter keeps a prefix
of the tokens sorted by probability, so one sort and one cumulative sum serve all three. The draw inverts the
cumulative distribution with one uniform number taken from a hash of (seed, step): no generator state to keep, and
the same token on any device, in any batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longbatch.core import RowKey, Sampling

# Rows are sorted together up to this many logits at once.
SORT_TILE = 1 << 24
# Logits divided by a lower temperature could overflow; the most likely token is certain long before.
COLDEST = 1e-6


def row_seed(run_seed: int, key: RowKey, sampling: Sampling) -> int:
    """The row's 64-bit seed: hash of the row's own seed, or of the run's seed and the row's key; and the sample."""
    own = ("row", sampling.seed) if sampling.seed is not None else ("run", run_seed, key.id, key.row)
    digest = hashlib.blake2b(repr((own, key.sample)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) from the hash of (seed, step)."""
    digest = hashlib.blake2b(step.to_bytes(8, "little"), key=seed.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row needs for its next token. seen: bool [vocab], the tokens of prompt and answer so far, where the
    repetition penalty asks for them."""

    sampling: Sampling
    seed: int
    step: int
    seen: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """tokens: int64 [B] on the logits' device. finite: per row, whether its logits could be used. logprobs: per row
    that asked, (logprob of the chosen token, alternatives as (id, logprob)), of the unmodified distribution."""

    tokens: Tensor
    finite: list[bool]
    logprobs: list[tuple[float, list[tuple[int, float]]] | None]


@torch.inference_mode()
def sample(logits: Tensor, draws: Sequence[Draw]) -> Choice:
    """Choose a token for each row of logits float32 [B, vocab]."""
    adjusted = _penalized(logits, draws)
    tokens = adjusted.argmax(-1)
    finite = torch.isfinite(adjusted.gather(1, tokens[:, None])[:, 0]).tolist()
    warm = [b for b, draw in enumerate(draws) if draw.sampling.temperature > 0 and finite[b]]
    rows = max(1, SORT_TILE // logits.shape[1])
    for low in range(0, len(warm), rows):
        part = warm[low : low + rows]
        index = torch.tensor(part, device=logits.device)
        tokens[index] = _drawn(adjusted[index], [draws[b] for b in part])
    return Choice(tokens, finite, _logprobs(logits, tokens, draws))


def _penalized(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Seen tokens' logits divided by the penalty when positive, multiplied when negative (arXiv 1909.05858)."""
    penalized = [(b, draw) for b, draw in enumerate(draws) if draw.seen is not None]
    if not penalized:
        return logits
    adjusted = logits.clone()
    for b, draw in penalized:
        assert draw.seen is not None
        values, penalty = logits[b], draw.sampling.repetition_penalty
        lowered = torch.where(values > 0, values / penalty, values * penalty)
        torch.where(draw.seen, lowered, values, out=adjusted[b])
    return adjusted


def _drawn(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Tokens int64 [b] for rows with a temperature."""
    device, vocab = logits.device, logits.shape[1]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    temperature = column([max(draw.sampling.temperature, COLDEST) for draw in draws])
    probabilities, order = torch.softmax(logits / temperature, -1).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=device)
    top_k = column([float(draw.sampling.top_k or vocab) for draw in draws])
    keep = rank < top_k
    mass = (probabilities * keep).cumsum(-1, dtype=torch.float64)
    before = (mass - probabilities) / mass[:, -1:]
    keep &= before < column([draw.sampling.top_p for draw in draws])
    keep &= probabilities >= probabilities[:, :1] * column([draw.sampling.min_p for draw in draws])
    keep[:, 0] = True
    mass = (probabilities * keep).cumsum(-1, dtype=torch.float64)
    point = torch.tensor([uniform(d.seed, d.step) for d in draws], dtype=torch.float64, device=device)[:, None]
    picked = torch.searchsorted(mass, point * mass[:, -1:], right=True)
    picked = torch.minimum(picked, keep.sum(-1, keepdim=True) - 1)
    return order.gather(1, picked)[:, 0]


def _logprobs(
    logits: Tensor, tokens: Tensor, draws: Sequence[Draw]
) -> list[tuple[float, list[tuple[int, float]]] | None]:
    """Log-probabilities for the rows that asked for them."""
    found: list[tuple[float, list[tuple[int, float]]] | None] = [None] * len(draws)
    asking = [b for b, draw in enumerate(draws) if draw.sampling.logprobs is not None]
    if not asking:
        return found
    index = torch.tensor(asking, device=logits.device)
    values = torch.log_softmax(logits[index], -1)
    chosen = values.gather(1, tokens[index][:, None])[:, 0].tolist()
    width = max(draws[b].sampling.logprobs or 0 for b in asking)
    top = values.topk(min(width, values.shape[1]), -1)
    for i, b in enumerate(asking):
        count = draws[b].sampling.logprobs or 0
        ids, scores = top.indices[i, :count].tolist(), top.values[i, :count].tolist()
        found[b] = (chosen[i], list(zip(ids, scores, strict=True)))
    return found
