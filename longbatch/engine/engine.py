"""The engine: rows in waves go through prefill, rows that generate go on through decode, results come out.

It takes as many rows of a wave as the pages allow, prefills them together, and decodes whenever the next rows have
to wait for pages. Rows that fail together are retried apart, so that a row that fails never costs another.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from longbatch.cache import PAGE_TOKENS, KVCache
from longbatch.core import Prompt, Request, Result, TokenLogprob
from longbatch.engine.decode import DecodeBatch
from longbatch.engine.faults import late, nonfinite, require_device, row_error
from longbatch.engine.jobs import Owner, conclude, family_of, open_sequence, shared_family
from longbatch.engine.limits import Counters, EngineLimits
from longbatch.engine.packing import Family, pack
from longbatch.engine.prefill import prefill
from longbatch.engine.readout import LOGIT_TILE, LastReader, Reader, deliver
from longbatch.engine.sampler import Choice, Draw, sample
from longbatch.engine.sequence import Sequence
from longbatch.engine.sharing import group
from longbatch.errors import RowError
from longbatch.models.decoder import Decoder
from longbatch.prompt import Tokenizer
from longbatch.prompt.reasoning import split_reasoning

Row = tuple[Request, Prompt]
_log = logging.getLogger(__name__)


class _StoppedError(Exception):
    """The caller asked to stop."""


class Engine:
    """Runs rows on one device; `run` is the whole of it."""

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer, cache: KVCache, limits: EngineLimits, *, eos_ids: frozenset[int]
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.cache = cache
        self.limits = limits
        self.counters = Counters()
        self._eos = eos_ids
        self._batch = DecodeBatch(model, cache)
        self._parked: list[tuple[Sequence, int]] = []
        self._should_stop: Callable[[], bool] = lambda: False

    def run(self, waves: Iterable[list[Row]], should_stop: Callable[[], bool] = lambda: False) -> Iterator[Result]:
        """Results in order of completion; waves are drawn as they are needed. An empty wave is no wave yet: answers
        that are under way then go on by one token.

        should_stop is asked before every step: once it says so, rows that are not complete are dropped. Raises
        DeviceError where the device is lost, which no row is to blame for.
        """
        self._should_stop = should_stop
        try:
            for wave in waves:
                if not wave and self.num_decoding:
                    yield from self._decode_step()
                yield from self._wave(wave)
            while self.num_decoding:
                yield from self._decode_step()
        except _StoppedError:
            return
        finally:
            self._drop()

    def _wave(self, wave: list[Row]) -> Iterator[Result]:
        """Prefill every row of a wave; those that generate may still be decoding afterwards."""
        waiting: list[Sequence] = []
        for request, prompt in wave:
            sequence = self._open(request, prompt)
            refusal = self._refusal(sequence)
            if refusal is None:
                waiting.append(sequence)
            else:
                sequence.fail(refusal)
                yield sequence.result
        while waiting:
            taken = self._admissible(waiting)
            if not taken:
                yield from self._decode_step()
                continue
            starting, waiting = waiting[:taken], waiting[taken:]
            now = time.monotonic()
            for sequence in starting:
                sequence.started = now
            yield from self._start(starting)

    @property
    def num_decoding(self) -> int:
        """Rows whose answers are under way."""
        return len(self._batch) + len(self._parked)

    def _open(self, request: Request, prompt: Prompt) -> Sequence:
        return open_sequence(request, prompt, self.tokenizer, self.limits, self._eos)

    def _ask(self) -> None:
        """Called before every step."""
        if self._should_stop():
            raise _StoppedError

    def _release(self, sequence: Sequence) -> None:
        if sequence.pages is not None:
            self.cache.pool.release(sequence.pages)
            sequence.pages = None

    def _drop(self) -> None:
        """Give back the pages of rows that will not be completed."""
        for sequence in (*self._batch.sequences, *(parked for parked, _ in self._parked)):
            self._release(sequence)
        self._batch = DecodeBatch(self.model, self.cache)
        self._parked = []

    # ------------------------------------------------------------------------------------- admission

    def _refusal(self, sequence: Sequence) -> RowError | None:
        """Why a row can never run: not even the empty cache holds it, or the model has not all of its tokens."""
        have = self.cache.pool.num_pages
        if sequence.num_pages > have:
            return RowError(
                "does_not_fit",
                f"the row needs {sequence.num_pages * PAGE_TOKENS:,} tokens of K/V cache and the device holds "
                f"{have * PAGE_TOKENS:,}; lower max_tokens, shorten the prompt, or use a device with more memory",
            )
        vocabulary = self.model.spec.vocab_size
        if any(int(ids.max(initial=0)) >= vocabulary for ids in (sequence.prompt.ids, *sequence.prompt.branches)):
            return RowError(
                "invalid_value",
                f"a token of the prompt is not among the model's {vocabulary:,}; the tokenizer is another model's",
            )
        return None

    def _admissible(self, waiting: list[Sequence]) -> int:
        """How many of the waiting rows can be prefilled now. While others decode, rows that cannot all start wait
        until at least half as many as decode can, so that prefill steps stay large; and while some are parked, none
        start, so that the parked ones get their turn."""
        if self._parked:
            return 0
        free, places = self.cache.pool.num_free, self.limits.decode_rows - self.num_decoding
        tokens = taken = 0
        for sequence in waiting:
            decodes = sequence.request.task.decodes
            if sequence.num_pages > free or (decodes and places == 0):
                break
            tokens += sequence.num_tokens
            if taken and tokens > self.limits.step_tokens:
                return taken
            taken += 1
            free -= sequence.num_pages
            places -= decodes
        return taken if taken == len(waiting) or 2 * taken >= self.num_decoding else 0

    # ------------------------------------------------------------------------------------- prefill

    def _start(self, sequences: list[Sequence]) -> Iterator[Result]:
        """Prefill rows together; if that fails, each half by itself, down to the row that fails alone."""
        results = self._attempt(sequences)
        if results is not None:
            yield from results
            return
        half = len(sequences) // 2
        for part in (sequences[:half], sequences[half:]):
            yield from self._start([self._reopened(sequence) for sequence in part])

    def _attempt(self, sequences: list[Sequence]) -> list[Result] | None:
        """Results of the rows that a prefill completes; None if it failed and more than one row may be to blame.

        The caller goes on outside of the exception, whose traceback would keep the step's tensors alive.
        """
        try:
            return self._prefill(sequences)
        except BaseException as fault:
            for sequence in sequences:
                self._release(sequence)
            if not isinstance(fault, (RuntimeError, MemoryError)):
                raise
            require_device(fault)
            return [self._failed(sequences[0], fault)] if len(sequences) == 1 else None

    def _reopened(self, sequence: Sequence) -> Sequence:
        """The row as it was before a prefill that failed."""
        fresh = self._open(sequence.request, sequence.prompt)
        fresh.started = sequence.started
        return fresh

    def _prefill(self, sequences: list[Sequence]) -> list[Result]:
        begin = time.monotonic()
        families = list(self._families(sequences))
        limits, device = self.limits, self.cache.device
        for packed in pack(families, step_tokens=limits.step_tokens, tile_rows=limits.tile_rows, device=device):
            self._ask()
            reads = [(branch.owner.reader, start, stop) for branch, start, stop in packed.reads]
            deliver(self.model, prefill(self.model, self.cache, packed.step), reads)
        readers: dict[int, list[Reader]] = {}
        for family in families:
            for branch in family.branches:
                readers.setdefault(id(branch.owner.sequence), []).append(branch.owner.reader)
        finished = [sequence for sequence in sequences if not sequence.request.task.decodes]
        for sequence in finished:
            conclude(sequence, readers[id(sequence)], self.model, self.tokenizer)
            self._release(sequence)
        finished += self._first_tokens([(s, readers[id(s)][0]) for s in sequences if s.request.task.decodes])
        end = time.monotonic()
        self.counters.prefill_tokens += sum(family.num_tokens for family in families)
        self.counters.prefill_seconds += end - begin
        for sequence in sequences:
            timing = sequence.result.timing
            timing.prefill = end - begin
            if sequence.request.task.decodes:
                timing.ttft = end - sequence.started
                sequence.decode_started = end
        for sequence in finished:
            sequence.stamp(end)
        work = [part for family in families for part in self._work(family)]
        total = sum(flops for _, flops in work)
        for sequence, flops in work:
            sequence.result.usage.gpu_seconds += (end - begin) * flops / total
        return [sequence.result for sequence in finished]

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
                    yield family_of(sequence, self.model, pool)

    def _work(self, family: Family[Owner]) -> Iterator[tuple[Sequence, float]]:
        """Floating-point operations of each branch, and its part of the trunk's: matrix products, and attention over
        what each token sees."""
        spec = self.model.spec
        per_key = sum(4 * layer.num_heads * layer.head_dim for layer in spec.layers)
        trunk = len(family.trunk)
        shared = (spec.matmul_flops_per_token * trunk + per_key * trunk * trunk / 2) / len(family.branches)
        for branch in family.branches:
            own = len(branch.ids)
            flops = spec.matmul_flops_per_token * own + per_key * own * (trunk + own / 2)
            yield branch.owner.sequence, shared + flops

    def _first_tokens(self, starting: list[tuple[Sequence, Reader]]) -> list[Sequence]:
        """Sample the first token of each prefilled row. Rows that go on join the decode batch; the others are
        returned."""
        joining: list[Sequence] = []
        tokens: list[int] = []
        finished: list[Sequence] = []
        rows = max(1, LOGIT_TILE // self.model.spec.vocab_size)
        for low in range(0, len(starting), rows):
            part = starting[low : low + rows]
            hidden = [reader.hidden for _, reader in part if isinstance(reader, LastReader)]
            logits = self._logits(torch.cat([state for state in hidden if state is not None]))
            sequences = [sequence for sequence, _ in part]
            choice = self._choose(sequences, logits)
            for sequence, token, live in zip(
                sequences, choice.tokens.tolist(), self._record(sequences, choice), strict=True
            ):
                if live:
                    joining.append(sequence)
                    tokens.append(token)
                else:
                    finished.append(sequence)
        if joining:
            self._batch.join(joining, tokens)
        return finished

    @torch.inference_mode()
    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.logits(self.model.final_norm(hidden))

    # ------------------------------------------------------------------------------------- decode

    def _decode_step(self) -> list[Result]:
        """One token for every live row."""
        self._ask()
        begin = time.monotonic()
        batch = self._batch
        if not batch.sequences:
            batch.join([sequence for sequence, _ in self._parked], [token for _, token in self._parked])
            self._parked = []
        sequences = batch.sequences
        # A step reads the weights once for all rows and each row's own K/V.
        weights = self.model.spec.num_parameters / len(sequences)
        work = [weights + self.model.spec.kv_entries_per_token * sequence.num_cached for sequence in sequences]
        try:
            choice = self._choose(sequences, batch.forward())
        except (RuntimeError, MemoryError) as fault:
            require_device(fault)
            return self._retreat(fault)
        live = self._record(sequences, choice)
        batch.feed(choice.tokens)
        batch.keep(live)
        end = time.monotonic()
        self.counters.decode_tokens += len(sequences)
        self.counters.decode_seconds += end - begin
        results: list[Result] = []
        per_work = (end - begin) / sum(work)
        for sequence, share, alive in zip(sequences, work, live, strict=True):
            sequence.result.usage.gpu_seconds += share * per_work
            if not alive:
                sequence.stamp(end)
                results.append(sequence.result)
        return results

    def _retreat(self, fault: BaseException) -> list[Result]:
        """A decode step failed: go on with half of the rows, the others later; a row that fails alone ends."""
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
        sequence.fail(row_error(fault))
        sequence.stamp(time.monotonic())
        self._release(sequence)
        return sequence.result

    # ------------------------------------------------------------------------------------- tokens

    def _choose(self, sequences: list[Sequence], logits: torch.Tensor) -> Choice:
        """Sample the next token of each row; nothing of the rows changes yet."""
        return sample(logits, [self._draw(sequence) for sequence in sequences])

    def _draw(self, sequence: Sequence) -> Draw:
        assert sequence.stop is not None
        sampling, tokens = sequence.request.sampling, sequence.stop.tokens
        if sampling.repetition_penalty != 1.0:
            if sequence.seen is None:
                sequence.seen = torch.zeros(self.model.spec.vocab_size, dtype=torch.bool, device=self.cache.device)
                sequence.seen[torch.from_numpy(sequence.prompt.ids).to(self.cache.device, torch.int64)] = True
            if tokens:
                sequence.seen[tokens[-1]] = True
        return Draw(sampling, sequence.seed, sequence.stop.num_tokens, sequence.seen)

    def _record(self, sequences: list[Sequence], choice: Choice) -> list[bool]:
        """Take each row's token; rows whose answer it completes get their result. Returns which rows go on."""
        live: list[bool] = []
        for b, (sequence, token) in enumerate(zip(sequences, choice.tokens.tolist(), strict=True)):
            assert sequence.stop is not None
            reason: str | None = "error"
            if choice.finite[b]:
                reason = sequence.stop.push(token)
                found = choice.logprobs[b]
                if found is not None:
                    text = self.tokenizer.token_text
                    top = tuple((id, text(id), value) for id, value in found[1])
                    sequence.scored.append(TokenLogprob(token, text(token), found[0], top))
                if reason is None and self._is_late(sequence):
                    reason = "error"
                    sequence.fail(late(self.limits))
            else:
                sequence.fail(nonfinite())
            live.append(reason is None)
            if reason is not None:
                self._finish(sequence, reason)
        return live

    def _is_late(self, sequence: Sequence) -> bool:
        limit = self.limits.row_seconds
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
        self._release(sequence)
