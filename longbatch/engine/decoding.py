"""Decoding step by step: which rows take part, what a step costs them, and what is done where one fails.

On a GPU the host is one step behind: while it reads the tokens of a step, the device runs the next one on them. A row
that turns out to have ended has then been run once too often; that token is dropped, and nothing counts it. What the
row gave back meanwhile, such as pages, is used by later work only, which the device begins after that step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longbatch.cache import KVCache
from longbatch.core import Result
from longbatch.engine.answers import Answers
from longbatch.engine.decode import DecodeBatch
from longbatch.engine.faults import log_fault, require_device, row_error
from longbatch.engine.limits import Counters, EngineLimits
from longbatch.engine.sampler import Choice, is_plain
from longbatch.engine.sequence import Sequence
from longbatch.errors import RowError
from longbatch.models.decoder import Decoder


@dataclass(slots=True)
class Flight:
    """A step that the device has been given. begun: monotonic time. choice: what was sampled, where that is known; else
    found: int64 [B] on the host, -1 for rows whose logits could not be used, valid after `arrived`."""

    sequences: list[Sequence]
    begun: float
    choice: Choice | None = None
    found: Tensor | None = None
    arrived: Any = None

    def landed(self) -> Choice:
        """What was sampled; waits for it."""
        if self.choice is not None:
            return self.choice
        if self.arrived is not None:
            self.arrived.synchronize()
        assert self.found is not None
        return Choice(self.found, (self.found >= 0).tolist(), [None] * len(self.sequences))


class Decoding:
    """The rows whose answers are under way.

    batch: those that take part in steps. is_ahead: whether steps begin before the one before them is read; rows that
    ask for more than tokens, or for a repetition penalty, wait all the same.
    """

    def __init__(self, model: Decoder, cache: KVCache, answers: Answers, limits: EngineLimits) -> None:
        self.is_ahead = cache.device.type == "cuda"
        self._answers = answers
        self._spec = model.spec
        self._device = cache.device
        self.batch = DecodeBatch(model, cache, limits.decode_rows)
        self._parked: list[tuple[Sequence, int]] = []
        self._flight: Flight | None = None
        self._landed = 0.0

    def __len__(self) -> int:
        return len(self.batch) + len(self._parked)

    @property
    def has_parked(self) -> bool:
        """Whether rows wait because a step of all of them failed."""
        return bool(self._parked)

    def join(self, sequences: list[Sequence], tokens: list[int]) -> None:
        """Add rows, each with the token sampled from its prefill; no step may be under way."""
        assert self._flight is None
        self.batch.join(sequences, tokens)

    def drop(self) -> list[Sequence]:
        """Forget all rows: those that were under way."""
        dropped = [*self.batch.sequences, *(sequence for sequence, _ in self._parked)]
        self.batch.clear()
        self._parked, self._flight = [], None
        return dropped

    def step(self, counters: Counters) -> list[Result]:
        """One more token for every live row: the results of those that it completes."""
        flight, self._flight = self._flight or self._launch(), None
        if isinstance(flight, RowError):
            return self._retreat(flight)
        following = self._follow(flight) if self.is_ahead else None
        results = self._land(flight, counters)
        # Where the next step has failed it is tried again, with the rows that are left.
        if isinstance(following, Flight) and len(self.batch):
            self._flight = following
        return results

    def settle(self, counters: Counters) -> list[Result]:
        """Read the step that is under way, if one is: the results of the rows that it completes."""
        flight, self._flight = self._flight, None
        return [] if flight is None else self._land(flight, counters)

    def _launch(self) -> Flight | RowError:
        """Give the device a step of all live rows, or of those that were set aside; or what it failed of."""
        batch, begun = self.batch, time.monotonic()
        if not batch.sequences:
            batch.join([sequence for sequence, _ in self._parked], [token for _, token in self._parked])
            self._parked = []
        sequences = batch.sequences
        try:
            logits = batch.forward()
            if not all(is_plain(sequence.request.sampling) for sequence in sequences):
                choice = self._answers.choose(sequences, logits)
                batch.feed(choice.tokens)
                return Flight(sequences, begun, choice)
            drawn = batch.draw(logits)
        except (RuntimeError, MemoryError) as fault:
            require_device(fault)
            error = row_error(fault)
            log_fault(f"decode step of {len(batch)} rows", fault, error)
            return error
        # To page-locked memory, where there is a GPU. The rows have their tokens by now, so what fails here is not
        # tried again: a token would be missing.
        found = drawn.to("cpu", non_blocking=True)
        return Flight(sequences, begun, found=found, arrived=self._event())

    def _follow(self, flight: Flight) -> Flight | RowError | None:
        """The step after one that is not read yet, without the rows that are known to end with that."""
        if flight.choice is not None:
            return None
        rules = [sequence.stop for sequence in self.batch.sequences]
        self.batch.keep([rule is not None and rule.num_tokens + 1 < rule.max_tokens for rule in rules])
        return self._launch() if len(self.batch) else None

    def _land(self, flight: Flight, counters: Counters) -> list[Result]:
        """Read a step: each of its rows takes its token, those that are complete leave."""
        try:
            choice = flight.landed()
        except RuntimeError as fault:
            require_device(fault)
            raise
        rows = [b for b, sequence in enumerate(flight.sequences) if sequence.pages is not None]
        if not rows:
            return []
        sequences = [flight.sequences[b] for b in rows]
        # A step reads the weights once for all rows and each row's own K/V.
        weights = self._spec.num_parameters / len(sequences)
        work = [weights + self._spec.kv_entries_per_token * sequence.num_cached for sequence in sequences]
        live = self._answers.record(sequences, choice.of(rows))
        self.batch.keep([sequence.pages is not None for sequence in self.batch.sequences])
        end = time.monotonic()
        seconds = end - max(flight.begun, self._landed)
        self._landed = end
        counters.decode_tokens += len(sequences)
        counters.decode_seconds += seconds
        results: list[Result] = []
        per_work = seconds / sum(work)
        for sequence, share, alive in zip(sequences, work, live, strict=True):
            sequence.result.usage.gpu_seconds += share * per_work
            if not alive:
                sequence.stamp(end)
                results.append(sequence.result)
        return results

    def _retreat(self, error: RowError) -> list[Result]:
        """A step failed: go on with half of the rows, the others later; a row that fails alone ends."""
        batch = self.batch
        if error.type == "out_of_memory":
            batch.release_graphs()
        if len(batch) > 1:
            if error.type == "out_of_memory":
                for sequence in batch.sequences:
                    sequence.result.notes.append(f"out of memory: decode batch of {len(batch):,} rows halved")
            self._parked += batch.park(len(batch) // 2)
            return []
        sequence = batch.sequences[0]
        batch.clear()
        return [self._answers.fail(sequence, error)]

    def _event(self) -> Any:
        """Happens once the device has done what it has been given until now; None where it already has."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
