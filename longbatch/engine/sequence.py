"""One row inside the engine, from its first prefill token to its result."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from longbatch.cache import PagePool
from longbatch.core import Prompt, Request, Result, TokenLogprob
from longbatch.engine.ladder import Shape
from longbatch.engine.stopping import StopRule
from longbatch.errors import RowError


@dataclass(slots=True)
class Sequence:
    """A request that runs.

    seed: of its draws. shape: how its prefill runs. max_tokens: most that it may sample. stop: present when the task
    decodes. pages: block table, while held; num_pages: pages that it asks for. open_block: where what follows its last
    whole page lies, while held, with a K/V format that needs it. num_tokens: tokens that its prefill runs; chunked:
    whether they need more than one step; alone: whether no other row may be prefilled beside it. seen: bool [vocab],
    tokens of prompt and answer, where the repetition penalty asks. started, decode_started: monotonic times of its
    first work and of its first token. scored: log-probabilities of its answer's tokens.
    """

    request: Request
    prompt: Prompt
    result: Result
    seed: int
    shape: Shape
    max_tokens: int = 0
    stop: StopRule | None = None
    pages: np.ndarray | None = None
    num_pages: int = 0
    open_block: int | None = None
    num_tokens: int = 0
    chunked: bool = False
    alone: bool = False
    seen: Tensor | None = None
    started: float = 0.0
    decode_started: float | None = None
    scored: list[TokenLogprob] = field(default_factory=list)
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
            result.timing, result.usage, result.notes = self.result.timing, self.result.usage, self.result.notes
            result.attention_mode, result.attention_density = self.result.attention_mode, self.result.attention_density
            result.attention_patterns = self.result.attention_patterns
            self.result = result

    def take(self, pool: PagePool, shared: np.ndarray | None = None) -> np.ndarray | None:
        """Take the pages that the row asks for, those of a beginning that it shares among them, and, where its answer
        needs one, an open block: the block table, None where it needs none."""
        if not self.num_pages:
            return None
        if shared is None:
            self.pages = pool.allocate(self.num_pages)
        else:
            own = pool.allocate(self.num_pages - len(shared))
            pool.retain(shared)
            self.pages = np.concatenate([shared, own])
        if self.request.task.decodes:
            self.open_block = pool.take_open()
        return self.pages

    def release(self, pool: PagePool) -> None:
        """Give the pages and the open block back."""
        if self.pages is not None:
            pool.release(self.pages)
            self.pages = None
        if self.open_block is not None:
            pool.give_open(self.open_block)
            self.open_block = None

    def stamp(self, now: float) -> None:
        """Record that the result is complete."""
        timing = self.result.timing
        timing.total = now - self.started
        if self.decode_started is not None:
            timing.decode = now - self.decode_started
