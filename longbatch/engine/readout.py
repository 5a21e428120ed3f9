"""What is made of the hidden states that a prefill step returns: scores, embeddings, and the logits of the next token.

A reader belongs to one branch of a row and takes its hidden states as steps deliver them; the vocabulary
projection runs over all scored positions of a step together, in tiles, so that logits of a whole prompt never exist.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from longbatch.models.decoder import Decoder

# The logits of one tile hold at most this many numbers (256 MiB in float32).
LOGIT_TILE = 1 << 26
# Positions that a mean takes at once.
MEAN_TILE = 4096


@dataclass(frozen=True, slots=True)
class Scores:
    """logprobs float32 [n] of the targets; top_ids int64 and top_logprobs float32 [n, k], k as asked; on the CPU."""

    targets: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


@dataclass(slots=True)
class ScoreReader:
    """Collects the log-probability of each token of `ids` that follows a position read.

    ids: tokens of positions offset.. of the sequence. num_top: alternatives wanted beside each.
    """

    ids: np.ndarray
    offset: int = 0
    num_top: int = 0
    found: list[Scores] = field(default_factory=list)

    def targets(self, start: int, stop: int) -> np.ndarray:
        """Token ids int64 [n] whose log-probability is wanted after positions start..stop-1."""
        return self.ids[start + 1 - self.offset : stop + 1 - self.offset].astype(np.int64)

    def state(self) -> dict[str, Tensor]:
        """Everything found so far, for `restore`."""
        columns = [[getattr(part, name) for part in self.found] for name in Scores.__dataclass_fields__]
        if not self.found:
            return {}
        joined = [torch.from_numpy(np.concatenate(column)) for column in columns]
        return dict(zip(Scores.__dataclass_fields__, joined, strict=True))

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from a state; the later one replaces the earlier."""
        self.found = [Scores(**{name: tensor.numpy() for name, tensor in state.items()})] if state else []


@dataclass(slots=True)
class LastReader:
    """Keeps the hidden state of the last position delivered: [1, hidden], before the final norm."""

    hidden: Tensor | None = None

    def take(self, hidden: Tensor) -> None:
        """Receive hidden states [n, hidden] of the next positions."""
        self.hidden = hidden[-1:].clone()

    def state(self) -> dict[str, Tensor]:
        """Nothing: only the last position counts, and it is always computed."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from a state."""


@dataclass(slots=True)
class MeanReader:
    """Sums the normalized hidden states of every position, in float32: [hidden]."""

    model: Decoder
    total: Tensor | None = None
    count: int = 0

    def take(self, hidden: Tensor) -> None:
        """Receive hidden states [n, hidden] of the next positions."""
        for part in torch.split(hidden, MEAN_TILE):
            summed = self.model.final_norm(part).float().sum(0)
            self.total = summed if self.total is None else self.total + summed
        self.count += len(hidden)

    def state(self) -> dict[str, Tensor]:
        """The sum so far, for `restore`."""
        return {} if self.total is None else {"total": self.total, "count": torch.tensor([self.count])}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from a state; the later one replaces the earlier."""
        if state:
            self.total, self.count = state["total"].to(self.model.device), int(state["count"])


Reader = ScoreReader | LastReader | MeanReader


@torch.inference_mode()
def deliver(model: Decoder, hidden: Tensor, reads: Items[tuple[Reader, int, int]]) -> None:
    """Hand the hidden states [R, hidden] of a step (before the final norm) to their readers.

    reads: (reader, first position, last position + 1) in the order of the rows.
    """
    low = 0
    scored: list[tuple[ScoreReader, np.ndarray]] = []
    rows: list[np.ndarray] = []
    for reader, start, stop in reads:
        high = low + stop - start
        if isinstance(reader, ScoreReader):
            scored.append((reader, reader.targets(start, stop)))
            rows.append(np.arange(low, high))
        else:
            reader.take(hidden[low:high])
        low = high
    if not scored:
        return
    num_top = max(reader.num_top for reader, _ in scored)
    scores = _score(model, hidden, np.concatenate(rows), np.concatenate([targets for _, targets in scored]), num_top)
    low = 0
    for reader, targets in scored:
        part = slice(low, low + len(targets))
        top = (scores.top_ids[part, : reader.num_top], scores.top_logprobs[part, : reader.num_top])
        reader.found.append(Scores(targets, scores.logprobs[part], *top))
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
        top = logits.topk(min(num_top, logits.shape[1]), -1)
        top_ids.append(top.indices)
        top_values.append(top.values - total)
    return Scores(
        targets, torch.cat(chosen).cpu().numpy(), torch.cat(top_ids).cpu().numpy(), torch.cat(top_values).cpu().numpy()
    )
