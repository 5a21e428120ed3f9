"""From the logits of live rows to their answers: each row's next token, and its result when that completes it."""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor

from longbatch.cache import KVCache
from longbatch.core import Result, TokenLogprob
from longbatch.engine.faults import late, nonfinite
from longbatch.engine.limits import EngineLimits
from longbatch.engine.sampler import Choice, Draw, sample
from longbatch.engine.sequence import Sequence
from longbatch.errors import RowError
from longbatch.prompt import Tokenizer
from longbatch.prompt.reasoning import split_reasoning

_log = logging.getLogger(__name__)


class Answers:
    """Samples for rows and takes what was sampled; rows that end give their pages back."""

    def __init__(self, tokenizer: Tokenizer, cache: KVCache, limits: EngineLimits) -> None:
        self._tokenizer = tokenizer
        self._cache = cache
        self._limits = limits

    def choose(self, sequences: list[Sequence], logits: Tensor) -> Choice:
        """Sample the next token of each row from logits [B, vocab]; nothing of the rows changes yet."""
        return sample(logits, [self._draw(sequence, logits.shape[1]) for sequence in sequences])

    def record(self, sequences: list[Sequence], choice: Choice) -> list[bool]:
        """Take each row's token; rows whose answer it completes get their result. Returns which rows go on."""
        live: list[bool] = []
        for b, (sequence, token) in enumerate(zip(sequences, choice.tokens.tolist(), strict=True)):
            assert sequence.stop is not None
            reason: str | None = "error"
            if choice.finite[b]:
                reason = sequence.stop.push(token)
                found = choice.logprobs[b]
                if found is not None:
                    text = self._tokenizer.token_text
                    top = tuple((id, text(id), value) for id, value in found[1])
                    sequence.scored.append(TokenLogprob(token, text(token), found[0], top))
                if reason is None and self._is_late(sequence):
                    reason = "error"
                    sequence.fail(late(self._limits))
            else:
                sequence.fail(nonfinite())
            live.append(reason is None)
            if reason is not None:
                self._finish(sequence, reason)
        return live

    def fail(self, sequence: Sequence, error: RowError) -> Result:
        """The error row of a row that failed alone."""
        _log.error("row %d failed alone: %s", sequence.request.row, error.type)
        sequence.fail(error)
        sequence.stamp(time.monotonic())
        sequence.release(self._cache.pool)
        return sequence.result

    def _draw(self, sequence: Sequence, vocabulary: int) -> Draw:
        assert sequence.stop is not None
        sampling, tokens = sequence.request.sampling, sequence.stop.tokens
        if sampling.repetition_penalty != 1.0:
            if sequence.seen is None:
                sequence.seen = torch.zeros(vocabulary, dtype=torch.bool, device=self._cache.device)
                sequence.seen[torch.from_numpy(sequence.prompt.ids).to(self._cache.device, torch.int64)] = True
            if tokens:
                sequence.seen[tokens[-1]] = True
        return Draw(sampling, sequence.seed, sequence.stop.num_tokens, sequence.seen)

    def _is_late(self, sequence: Sequence) -> bool:
        limit = self._limits.row_seconds
        return limit is not None and time.monotonic() - sequence.started > limit

    def _finish(self, sequence: Sequence, reason: str) -> None:
        """Complete the result of a row that decoded, and give its pages back."""
        stop, result = sequence.stop, sequence.result
        assert stop is not None
        if sequence.error is None:
            result.reasoning, result.text = split_reasoning(stop.text(), sequence.prompt.opens_reasoning)
            result.finish_reason = reason
            if sequence.request.sampling.logprobs is not None:
                result.logprobs = sequence.scored
        result.usage.completion_tokens = stop.num_tokens
        sequence.release(self._cache.pool)
