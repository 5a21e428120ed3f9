"""From logits to the next token, row by row independent: a row's choice depends on its own logits, parameters,
seed and step alone.

Filters follow transformers' order: repetition penalty, temperature, top-k, top-p, min-p. The draw goes by one uniform
number taken from a hash of (seed, step): no generator state to keep, and the same token on any device, in any batch.
`longbatch_kernels.sample` says how.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from longbatch_kernels.sample import sample as chosen
from longbatch_kernels.sample import uniform
from torch import Tensor

from longbatch.core import RowKey, Sampling

# At a lower temperature the most likely token is certain long before; at a higher one all are equally likely.
COLDEST, HOTTEST = 1e-6, 1e37


def row_seed(run_seed: int, key: RowKey, sampling: Sampling) -> int:
    """The row's 64-bit seed: hash of the row's own seed, or of the run's seed and the row's key; and the sample."""
    own = ("row", sampling.seed) if sampling.seed is not None else ("run", run_seed, key.id, key.row)
    digest = hashlib.blake2b(repr((own, key.sample)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def numbers(sampling: Sampling, seed: int) -> tuple[tuple[int, int], tuple[float, float, float]]:
    """What the choice of a row's tokens goes by: (top_k, seed) as int64, and (slope, top_p, min_p)."""
    temperature = min(max(sampling.temperature, COLDEST), HOTTEST)
    slope = math.log2(math.e) / temperature if sampling.temperature > 0 else 0.0
    return (sampling.top_k, seed - (seed >> 63 << 64)), (slope, sampling.top_p, sampling.min_p)


def is_plain(sampling: Sampling) -> bool:
    """Whether the next token goes by the logits and `numbers` alone, and nothing but the token is asked for."""
    return sampling.repetition_penalty == 1.0 and sampling.logprobs is None


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
    """tokens: int64 [B], of no meaning where a row is not finite. finite: per row, whether its logits could be used.
    logprobs: per row that asked, (logprob of the chosen token, alternatives as (id, logprob)), of the unmodified
    distribution."""

    tokens: Tensor
    finite: list[bool]
    logprobs: list[tuple[float, list[tuple[int, float]]] | None]

    def of(self, rows: list[int]) -> Choice:
        """That of some rows."""
        if len(rows) == len(self.finite):
            return self
        return Choice(self.tokens[rows], [self.finite[b] for b in rows], [self.logprobs[b] for b in rows])


@torch.inference_mode()
def sample(logits: Tensor, draws: Sequence[Draw]) -> Choice:
    """Choose a token for each row of logits float32 [B, vocab]."""
    own = [numbers(draw.sampling, draw.seed) for draw in draws]
    integers = [(top_k, seed, draw.step) for ((top_k, seed), _), draw in zip(own, draws, strict=True)]
    tokens, found = draw_tokens(
        _penalized(logits, draws),
        torch.tensor(list(zip(*integers, strict=True))).to(logits.device),
        torch.tensor(list(zip(*(floats for _, floats in own), strict=True)), dtype=torch.float32).to(logits.device),
        warm=any(draw.sampling.temperature > 0 for draw in draws),
    )
    return Choice(tokens, (found >= 0).tolist(), _logprobs(logits, tokens, draws))


def draw_tokens(logits: Tensor, integers: Tensor, floats: Tensor, *, warm: bool) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B], 0 where the logits cannot be used, and the same with -1 there; nothing waits for the device.

    integers: top_k, seed and step, int64 [3, B]. floats: slope, top_p and min_p, float32 [3, B]. warm: whether any row
    has a temperature.
    """
    top_k, seeds, steps = integers
    slopes, top_p, min_p = floats
    points = uniform(seeds, steps) if warm else slopes
    return chosen(logits, slopes, top_k, top_p, min_p, points, warm=warm)


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
