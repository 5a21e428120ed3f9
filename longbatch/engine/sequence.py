"""One row inside the engine, from its first prefill token to its result."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from longbatch.core import Prompt, Request, Result, TokenLogprob
from longbatch.engine.stopping import StopRule
from longbatch.errors import RowError


@dataclass(slots=True)
class Sequence:
    """A request that runs.

    seed: of its draws. stop: present when the task decodes. pages: block table, while held. scored: log-probability
    of each scored token in order; branch_scores: the same per label. hidden: what the embedding is made of.
    """

    request: Request
    prompt: Prompt
    result: Result
    seed: int
    max_tokens: int = 0
    stop: StopRule | None = None
    pages: np.ndarray | None = None
    started: float = field(default_factory=time.monotonic)
    decode_started: float | None = None
    scored: list[TokenLogprob] = field(default_factory=list)
    branch_scores: list[float] = field(default_factory=list)
    error: RowError | None = None

    @property
    def num_cached(self) -> int:
        """Tokens whose K/V is in the pages: the prompt and every sampled token but the newest."""
        sampled = self.stop.num_tokens if self.stop is not None else 0
        return len(self.prompt.ids) + max(0, sampled - 1)

    def fail(self, error: RowError) -> None:
        """Turn the result into an error row; what was computed before is dropped."""
        if self.error is None:
            self.error = error
            result = Result.failed(self.request, error)
            result.timing, result.usage = self.result.timing, self.result.usage
            self.result = result
