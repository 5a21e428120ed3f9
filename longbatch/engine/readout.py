"""What is made of the hidden states that a prefill step returns: scores, embeddings, and the logits of the next token.

A `Reader` belongs to one branch of a row and takes its hidden states as steps deliver them; the vocabulary
projection runs over all scored positions of a step together, in tiles, so that logits of a whole prompt never exist.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from longbatch.models.decoder import Decoder

# The logits of one tile hold at most this many numbers (256 MiB in float32).
LOGIT_TILE = 1 << 26


class Reader(Protocol):
    """Takes hidden states [n, hidden] (before the final norm) of positions start..start+n-1."""

    def targets(self, start: int, stop: int) -> np.ndarray | None:
        """Token ids int64 [n] whose log-probability is wanted after each position, or None for no scoring."""

    def take_hidden(self, hidden: Tensor, start: int) -> None:
        """Receive hidden states when `targets` was None."""

    def take_scores(self, scores: Scores) -> None:
        """Receive log-probabilities when `targets` was not None."""


@dataclass(frozen=True, slots=True)
class Scores:
    """logprobs float32 [n] of the targets; top_ids int64 and top_logprobs float32 [n, k], k as asked; on the CPU."""

    targets: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


@dataclass(slots=True)
class ScoreReader:
    """Collects the log-probability of each token of `ids` that follows a position read."""

    ids: np.ndarray
    offset: int
    found: list[Scores] = field(default_factory=list)

    def targets(self, start: int, stop: int) -> np.ndarray:
        return self.ids[start + 1 - self.offset : stop + 1 - self.offset].astype(np.int64)

    def take_hidden(self, hidden: Tensor, start: int) -> None:
        raise AssertionError("a score reader takes scores")

    def take_scores(self, scores: Scores) -> None:
        self.found.append(scores)


@dataclass(slots=True)
class LastReader:
    """Keeps the hidden state of the last position delivered: float [1, hidden]."""

    hidden: Tensor | None = None

    def targets(self, start: int, stop: int) -> None:
        return None

    def take_hidden(self, hidden: Tensor, start: int) -> None:
        self.hidden = hidden[-1:].clone()

    def take_scores(self, scores: Scores) -> None:
        raise AssertionError("a last reader takes hidden states")


@dataclass(slots=True)
class MeanReader:
    """Sums the normalized hidden states of every position, in float32: [hidden]."""

    model: Decoder
    total: Tensor | None = None
    count: int = 0

    def targets(self, start: int, stop: int) -> None:
        return None

    def take_hidden(self, hidden: Tensor, start: int) -> None:
        part = self.model.final_norm(hidden).float().sum(0)
        self.total = part if self.total is None else self.total + part
        self.count += len(hidden)

    def take_scores(self, scores: Scores) -> None:
        raise AssertionError("a mean reader takes hidden states")


@torch.inference_mode()
def deliver(model: Decoder, hidden: Tensor, reads: Items[tuple[Reader, int, int]], num_top: int) -> None:
    """Hand the hidden states [R, hidden] of a step to their readers. reads: (reader, first position, last + 1) in the
    order of the rows. num_top: alternatives wanted per scored position."""
    low = 0
    scored: list[tuple[Reader, np.ndarray, int]] = []
    for reader, start, stop in reads:
        targets = reader.targets(start, stop)
        if targets is None:
            reader.take_hidden(hidden[low : low + stop - start], start)
        else:
            scored.append((reader, targets, low))
        low += stop - start
    if not scored:
        return
    rows = np.concatenate([np.arange(at, at + len(targets)) for _, targets, at in scored])
    scores = _score(model, hidden, rows, np.concatenate([targets for _, targets, _ in scored]), num_top)
    low = 0
    for reader, targets, _ in scored:
        part = slice(low, low + len(targets))
        reader.take_scores(
            Scores(scores.targets[part], scores.logprobs[part], scores.top_ids[part], scores.top_logprobs[part])
        )
        low += len(targets)


def _score(model: Decoder, hidden: Tensor, rows: np.ndarray, targets: np.ndarray, num_top: int) -> Scores:
    """Log-probabilities of targets after the hidden states of `rows`, tile by tile."""
    device = hidden.device
    index = torch.from_numpy(rows).to(device)
    wanted = torch.from_numpy(targets).to(device)
    tile = max(1, LOGIT_TILE // model.spec.vocab_size)
    chosen, top_ids, top_values = [], [], []
    for low in range(0, len(rows), tile):
        part = slice(low, low + tile)
        logits = model.logits(model.final_norm(hidden[index[part]]))
        total = logits.logsumexp(-1, keepdim=True)
        chosen.append((logits.gather(1, wanted[part, None]) - total)[:, 0])
        top = logits.topk(num_top, -1)
        top_ids.append(top.indices)
        top_values.append(top.values - total)
    return Scores(
        targets, torch.cat(chosen).cpu().numpy(), torch.cat(top_ids).cpu().numpy(), torch.cat(top_values).cpu().numpy()
    )
