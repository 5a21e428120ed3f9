"""The engine: rows in waves go through prefill, rows that generate go on through decode, results come out.

It takes as many rows of a wave as the pages allow, prefills them together, and decodes whenever the next rows have
to wait for pages. A row that fails is retried alone, so that it never costs another.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from longbatch.cache import KVCache
from longbatch.core import Prompt, Request, Result, TokenLogprob
from longbatch.engine.decode import DecodeBatch
from longbatch.engine.jobs import (
    Owner,
    conclude,
    family_of,
    nonfinite,
    open_sequence,
    pages_needed,
    shared_family,
)
from longbatch.engine.packing import Family, pack
from longbatch.engine.prefill import prefill
from longbatch.engine.readout import LOGIT_TILE, LastReader, Reader, deliver
from longbatch.engine.sampler import Draw, sample
from longbatch.engine.sequence import Sequence
from longbatch.engine.sharing import group
from longbatch.errors import RowError
from longbatch.models.decoder import Decoder
from longbatch.prompt import Tokenizer
from longbatch.prompt.reasoning import split_reasoning

Row = tuple[Request, Prompt]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """step_tokens: most tokens in one prefill step. tile_rows: rows per tile of a layer. decode_rows: most sequences
    decoded together. max_tokens: answers of rows that set no limit. run_seed: seed of rows that set none."""

    step_tokens: int
    tile_rows: int
    decode_rows: int
    max_tokens: int
    run_seed: int = 0


@dataclass(slots=True)
class Counters:
    """Totals so far. busy_seconds: wall time in which the device worked for rows."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def busy_seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds


class Engine:
    """Runs rows on one device; `run` is the whole of it.

    opens_reasoning: whether the chat template itself begins the model's thinking.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        cache: KVCache,
        limits: EngineLimits,
        *,
        eos_ids: frozenset[int],
        opens_reasoning: bool = False,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.cache = cache
        self.limits = limits
        self.counters = Counters()
        self._eos = eos_ids
        self._opens_reasoning = opens_reasoning
        self._batch = DecodeBatch(model, cache)
        self._parked: list[tuple[Sequence, int]] = []

    def run(self, waves: Iterable[list[Row]], should_stop: Callable[[], bool] = lambda: False) -> Iterator[Result]:
        """Results in order of completion; waves are drawn as they are needed. should_stop is asked between steps:
        once it says so, nothing more is begun or finished."""
        for wave in waves:
            waiting = [self._open(*row) for row in wave]
            while waiting:
                if should_stop():
                    return
                taken = self._admissible(waiting)
                if taken:
                    yield from self._start(waiting[:taken])
                    waiting = waiting[taken:]
                elif self._decoding:
                    yield from self._decode_step()
                else:
                    yield self._refuse(waiting.pop(0))
        while self._decoding and not should_stop():
            yield from self._decode_step()

    @property
    def _decoding(self) -> int:
        """Rows whose answers are under way."""
        return len(self._batch) + len(self._parked)

    def _open(self, request: Request, prompt: Prompt) -> Sequence:
        limits = self.limits
        return open_sequence(
            request,
            prompt,
            self.tokenizer,
            eos_ids=self._eos,
            run_seed=limits.run_seed,
            max_tokens=limits.max_tokens,
        )

    # ------------------------------------------------------------------------------------- admission

    def _chunked(self, sequence: Sequence) -> bool:
        tokens = len(sequence.prompt.ids) + sum(map(len, sequence.prompt.branches))
        return tokens > self.limits.step_tokens

    def _admissible(self, waiting: list[Sequence]) -> int:
        """How many of the waiting rows can be prefilled now. While others decode, a wave that does not fit waits
        until half of what it needs is free, so that prefill steps stay large."""
        free, places = self.cache.pool.num_free, self.limits.decode_rows - self._decoding
        tokens = taken = 0
        for sequence in waiting:
            chunked = self._chunked(sequence)
            pages = pages_needed(sequence, chunked=chunked)
            if pages > free or (sequence.request.task.decodes and places == 0) or (taken and chunked):
                break
            tokens += len(sequence.prompt.ids) + sum(map(len, sequence.prompt.branches))
            if taken and tokens > self.limits.step_tokens:
                return taken
            taken += 1
            free -= pages
            places -= sequence.request.task.decodes
            if chunked:
                return taken
        return taken if taken == len(waiting) or 2 * taken >= self._decoding else 0

    def _refuse(self, sequence: Sequence) -> Result:
        """A row that not even an empty cache can hold."""
        have = self.cache.pool.num_pages * 64
        need = len(sequence.prompt.ids) + sequence.max_tokens
        sequence.fail(
            RowError(
                "does_not_fit",
                f"prompt and answer need {need} tokens of K/V cache and the device holds {have}; "
                "lower max_tokens, shorten the prompt, or use a device with more memory",
            )
        )
        return sequence.result

    # ------------------------------------------------------------------------------------- prefill

    def _start(self, sequences: list[Sequence]) -> Iterator[Result]:
        """Prefill rows together; if that fails, each alone."""
        try:
            yield from self._prefill(sequences)
        except (RuntimeError, MemoryError) as fault:
            for sequence in sequences:
                self._release(sequence)
            if len(sequences) == 1:
                yield self._failed(sequences[0], fault)
                return
            for sequence in sequences:
                yield from self._start([self._open(sequence.request, sequence.prompt)])

    def _prefill(self, sequences: list[Sequence]) -> list[Result]:
        begin = time.monotonic()
        families = list(self._families(sequences))
        num_top = max((s.request.sampling.logprobs or 0 for s in sequences), default=0)
        limits = self.limits
        for packed in pack(
            families, step_tokens=limits.step_tokens, tile_rows=limits.tile_rows, device=self.cache.device
        ):
            hidden = prefill(self.model, self.cache, packed.step)
            deliver(self.model, hidden, [(b.owner.reader, start, stop) for b, start, stop in packed.reads], num_top)
        readers: dict[int, list[Reader]] = {}
        for family in families:
            for branch in family.branches:
                readers.setdefault(id(branch.owner.sequence), []).append(branch.owner.reader)
        tokens = sum(family.num_tokens for family in families)
        results = []
        for sequence in sequences:
            if not sequence.request.task.decodes:
                conclude(sequence, readers[id(sequence)], self.model, self.tokenizer)
                self._release(sequence)
                results.append(sequence.result)
        results += self._first_tokens([(s, readers[id(s)][0]) for s in sequences if s.request.task.decodes])
        seconds = time.monotonic() - begin
        self.counters.prefill_tokens += tokens
        self.counters.prefill_seconds += seconds
        total = sum(self._prefill_work(family) for family in families)
        for family in families:
            owners = {id(branch.owner.sequence): branch.owner.sequence for branch in family.branches}
            share = self._prefill_work(family) / total / len(owners)
            for sequence in owners.values():
                sequence.result.timing.prefill = seconds
                sequence.result.usage.gpu_seconds += seconds * share
        return results

    def _families(self, sequences: list[Sequence]) -> Iterator[Family[Owner]]:
        """The token sequences to run: beginnings that rows share are taken once."""
        pool = self.cache.pool
        # Where frequencies depend on a row's length, equal tokens do not have equal keys.
        shareable = not any(rope.needs_lengths for rope in self.model.ropes)
        for trunk, rows in group(sequences) if shareable else [(0, sequences)]:
            if trunk:
                yield shared_family(rows, trunk, pool)
            else:
                for sequence in rows:
                    yield family_of(sequence, self.model, pool, chunked=self._chunked(sequence))

    def _prefill_work(self, family: Family[Owner]) -> float:
        """Floating-point operations of a family: matrix products, and attention over what each token sees."""
        spec = self.model.spec
        per_key = sum(4 * layer.num_heads * layer.head_dim for layer in spec.layers)
        trunk = len(family.trunk)
        keys = trunk * trunk / 2 + sum(len(b.ids) * (trunk + len(b.ids) / 2) for b in family.branches)
        return spec.matmul_flops_per_token * family.num_tokens + per_key * keys

    def _first_tokens(self, starting: list[tuple[Sequence, Reader]]) -> list[Result]:
        """Sample the first token of each prefilled row; rows that go on join the decode batch."""
        results: list[Result] = []
        joining: list[Sequence] = []
        tokens: list[int] = []
        rows = max(1, LOGIT_TILE // self.model.spec.vocab_size)
        for low in range(0, len(starting), rows):
            part = starting[low : low + rows]
            hidden = []
            for _, reader in part:
                assert isinstance(reader, LastReader) and reader.hidden is not None
                hidden.append(reader.hidden)
            logits = self.model.logits(self.model.final_norm(torch.cat(hidden)))
            sequences = [sequence for sequence, _ in part]
            chosen, live, done = self._advance(sequences, logits)
            results += done
            joining += [s for s, alive in zip(sequences, live, strict=True) if alive]
            tokens += [t for t, alive in zip(chosen.tolist(), live, strict=True) if alive]
        if joining:
            self._batch.join(joining, tokens)
        return results

    # ------------------------------------------------------------------------------------- decode

    def _decode_step(self) -> list[Result]:
        """One token for every live row."""
        begin = time.monotonic()
        batch = self._batch
        if not batch.sequences:
            batch.join([sequence for sequence, _ in self._parked], [token for _, token in self._parked])
            self._parked = []
        sequences = list(batch.sequences)
        lengths = [sequence.num_cached for sequence in sequences]
        try:
            logits = batch.forward()
        except (RuntimeError, MemoryError) as fault:
            return self._retreat(fault)
        tokens, live, results = self._advance(sequences, logits)
        batch.feed(tokens)
        batch.keep(live)
        seconds = time.monotonic() - begin
        self.counters.decode_tokens += len(sequences)
        self.counters.decode_seconds += seconds
        # A step reads the weights once for all rows and each row's own K/V.
        weights = self.model.spec.num_parameters / len(sequences)
        work = [weights + self.model.spec.kv_entries_per_token * length for length in lengths]
        for sequence, share in zip(sequences, work, strict=True):
            sequence.result.usage.gpu_seconds += seconds * share / sum(work)
        return results

    def _retreat(self, fault: BaseException) -> list[Result]:
        """A decode forward failed: go on with half of the rows, the others later; a row that fails alone ends."""
        batch = self._batch
        if len(batch) > 1:
            self._parked += batch.park(len(batch) // 2)
            return []
        sequence = batch.sequences[0]
        batch.keep([False])
        return [self._failed(sequence, fault)]

    def _failed(self, sequence: Sequence, fault: BaseException) -> Result:
        """The error row of a row that failed alone."""
        _log.error("row %d failed alone", sequence.request.row, exc_info=fault)
        sequence.fail(_row_error(fault))
        sequence.result.timing.total = time.monotonic() - sequence.started
        self._release(sequence)
        return sequence.result

    def _advance(
        self, sequences: list[Sequence], logits: torch.Tensor
    ) -> tuple[torch.Tensor, list[bool], list[Result]]:
        """Sample, record and stop: the tokens int64 [B], which rows go on, and the results of those that don't."""
        choice = sample(logits, [self._draw(sequence) for sequence in sequences])
        now = time.monotonic()
        live: list[bool] = []
        results: list[Result] = []
        for b, (sequence, token) in enumerate(zip(sequences, choice.tokens.tolist(), strict=True)):
            assert sequence.stop is not None
            if sequence.decode_started is None:
                sequence.decode_started = now
                sequence.result.timing.ttft = now - sequence.started
            if not choice.finite[b]:
                sequence.fail(nonfinite())
                reason: str | None = "error"
            else:
                reason = sequence.stop.push(token)
                self._record_logprobs(sequence, token, choice.logprobs[b])
            live.append(reason is None)
            if reason is not None:
                self._finish(sequence, reason, now)
                results.append(sequence.result)
        return choice.tokens, live, results

    def _draw(self, sequence: Sequence) -> Draw:
        assert sequence.stop is not None
        sampling = sequence.request.sampling
        seen = None
        if sampling.repetition_penalty != 1.0:
            ids = sorted({*sequence.prompt.ids.tolist(), *sequence.stop.tokens})
            seen = torch.tensor(ids, device=self.cache.device)
        return Draw(sampling, sequence.seed, sequence.stop.num_tokens, seen)

    def _record_logprobs(
        self, sequence: Sequence, token: int, found: tuple[float, list[tuple[int, float]]] | None
    ) -> None:
        if found is not None:
            text = self.tokenizer.token_text
            top = tuple((i, text(i), value) for i, value in found[1])
            sequence.scored.append(TokenLogprob(token, text(token), found[0], top))

    def _finish(self, sequence: Sequence, reason: str, now: float) -> None:
        """Complete the result of a row that decoded, and give its pages back."""
        stop, result = sequence.stop, sequence.result
        assert stop is not None and sequence.decode_started is not None
        if sequence.error is None:
            result.reasoning, result.text = split_reasoning(stop.text(), self._opens_reasoning)
            result.finish_reason = reason
            if sequence.request.sampling.logprobs is not None:
                result.logprobs = sequence.scored
        result.usage.completion_tokens = stop.num_tokens
        result.timing.decode = now - sequence.decode_started
        result.timing.total = now - sequence.started
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.pages is not None:
            self.cache.pool.release(sequence.pages)
            sequence.pages = None


def _row_error(fault: BaseException) -> RowError:
    """What a failed prefill means for the row that caused it alone."""
    if isinstance(fault, (torch.OutOfMemoryError, MemoryError)):
        return RowError("out_of_memory", "the device ran out of memory for this row alone; shorten it or use --dtype")
    return RowError("internal", f"{type(fault).__name__} in the model's forward; the log has the details")
