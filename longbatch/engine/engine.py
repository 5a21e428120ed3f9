"""The engine: rows in waves go through prefill, rows that generate go on through decode, results come out.

It takes as many rows of a wave as the pages allow, prefills them together, and decodes whenever the next rows have
to wait for pages. Rows that fail together are retried apart, so that a row that fails never costs another.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial

import torch

from longbatch.attention import DenseKernels
from longbatch.cache import PAGE_TOKENS, KVCache
from longbatch.core import Prompt, Request, Result
from longbatch.engine.answers import Answers
from longbatch.engine.decoding import Decoding
from longbatch.engine.faults import log_fault, require_device, row_error
from longbatch.engine.jobs import Owner, conclude, families_of, open_sequence, report_attention, work_of
from longbatch.engine.ladder import Ladder, Shape, step_down
from longbatch.engine.limits import Counters, EngineAttention, EngineLimits
from longbatch.engine.packing import Family, pack
from longbatch.engine.prefill import prefill
from longbatch.engine.readout import LOGIT_TILE, LastReader, Reader, deliver
from longbatch.engine.sequence import Sequence
from longbatch.engine.spill import Spill
from longbatch.errors import RowError
from longbatch.models.decoder import Decoder
from longbatch.prompt import Tokenizer

Row = tuple[Request, Prompt]
_log = logging.getLogger(__name__)


class _StoppedError(Exception):
    """The caller asked to stop."""


class Engine:
    """Runs rows on one device; `run` is the whole of it. attention: how long rows are prefilled sparse, None where none
    are. dense: which kernels run dense attention, None: torch's. spill: where long rows keep their state, if anywhere;
    who takes the results removes it from there. share: whether what rows begin with alike is prefilled once."""

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer, cache: KVCache, limits: EngineLimits, *, eos_ids: frozenset[int]
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.cache = cache
        self.limits = limits
        self.counters = Counters()
        self.attention: EngineAttention | None = None
        self.dense: DenseKernels | None = None
        self.spill: Spill | None = None
        self.share = True
        self._ladder = Ladder(limits)
        self._answers = Answers(tokenizer, cache, limits)
        self._eos = eos_ids
        self._decoding = Decoding(model, cache, self._answers, limits)
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
        waiting, refused = self._sorted_out([self._open(request, prompt) for request, prompt in wave])
        yield from refused
        while waiting:
            taken = self._admissible(waiting)
            if not taken:
                yield from self._decode_step()
                continue
            starting, waiting = waiting[:taken], waiting[taken:]
            yield from self._decoding.settle(self.counters)
            now, num_lessons = time.monotonic(), self._ladder.num_lessons
            for sequence in starting:
                sequence.started = sequence.started or now
            again: list[Sequence] = []
            most = yield from self._start(starting, again)
            if 0 < most < sum(sequence.num_tokens for sequence in starting):
                self._ladder.wave_tokens = most
            if self._ladder.num_lessons > num_lessons:
                waiting, refused = self._sorted_out([self._reopened(sequence) for sequence in waiting])
                yield from refused
            waiting = again + waiting

    @property
    def num_decoding(self) -> int:
        """Rows whose answers are under way."""
        return len(self._decoding)

    def _open(self, request: Request, prompt: Prompt, shape: Shape | None = None) -> Sequence:
        return open_sequence(request, prompt, self.tokenizer, self._ladder, self._eos, shape)

    def _decode_step(self) -> list[Result]:
        """One token for every live row."""
        self._ask()
        return self._decoding.step(self.counters)

    def _ask(self) -> None:
        """Called before every step."""
        if self._should_stop():
            raise _StoppedError

    def _drop(self) -> None:
        """Give back the pages of rows that will not be completed."""
        for sequence in self._decoding.drop():
            sequence.release(self.cache.pool)

    # ------------------------------------------------------------------------------------- admission

    def _sorted_out(self, sequences: list[Sequence]) -> tuple[list[Sequence], list[Result]]:
        """The rows that can run, and the results of those that never can."""
        able, refused = [], []
        for sequence in sequences:
            refusal = self._refusal(sequence)
            if refusal is None:
                able.append(sequence)
            else:
                sequence.fail(refusal)
                refused.append(sequence.result)
        return able, refused

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
        if self._decoding.has_parked:
            return 0
        free, places = self.cache.pool.num_free, self.limits.decode_rows - self.num_decoding
        tokens = taken = 0
        for sequence in waiting:
            decodes = sequence.request.task.decodes
            if sequence.num_pages > free or (decodes and places == 0):
                break
            tokens += sequence.num_tokens
            alone = sequence.alone or waiting[0].alone
            if taken and (alone or tokens > self._ladder.wave_tokens):
                return taken
            taken += 1
            free -= sequence.num_pages
            places -= decodes
        return taken if taken == len(waiting) or 2 * taken >= self.num_decoding else 0

    # ------------------------------------------------------------------------------------- prefill

    def _start(self, sequences: list[Sequence], again: list[Sequence]) -> Generator[Result, None, int]:
        """Prefill rows together; if that fails, each half by itself, down to the row that fails alone. Returns the
        most tokens that ran together, 0 if a row is to blame and not their number.

        again: gets the rows that have to be admitted once more, smaller pieces of them or with more pages.
        """
        outcome = self._attempt(sequences)
        if not isinstance(outcome, RowError):
            yield from outcome
            return sum(sequence.num_tokens for sequence in sequences)
        first = sequences[0]
        lacks_memory = outcome.type == "out_of_memory"
        if len(sequences) == 1:
            smaller = self._smaller(first) if lacks_memory else None
            if smaller is None:
                yield self._answers.fail(first, outcome)
            else:
                again.append(smaller)
            return 0
        if lacks_memory:
            for sequence in sequences:
                sequence.result.notes.append(f"out of memory: wave of {len(sequences):,} rows halved")
        half, ran = len(sequences) // 2, []
        for part in (sequences[:half], sequences[half:]):
            fresh = [self._reopened(sequence) for sequence in part]
            if sum(sequence.num_pages for sequence in fresh) > sum(sequence.num_pages for sequence in part):
                again += fresh
                ran.append(0)
            else:
                ran.append((yield from self._start(fresh, again)))
        return max(ran) if all(ran) else 0

    def _attempt(self, sequences: list[Sequence]) -> list[Result] | RowError:
        """Results of the rows that a prefill completes, or what it failed of.

        The caller goes on outside of the exception, whose traceback would keep the step's tensors alive.
        """
        try:
            finished = self._prefill(sequences)
        except BaseException as fault:
            for sequence in sequences:
                sequence.release(self.cache.pool)
            if not isinstance(fault, (RuntimeError, MemoryError)):
                raise
            require_device(fault)
            error = row_error(fault)
            log_fault(f"prefill of {len(sequences)} rows", fault, error)
            return error
        for sequence in sequences:
            remark = self._ladder.remark(sequence.num_tokens, sequence.shape)
            if remark is not None:
                sequence.result.notes.append(remark)
        if len(sequences) == 1:
            self._ladder.learn(sequences[0].num_tokens, sequences[0].shape)
        return finished

    def _smaller(self, sequence: Sequence) -> Sequence | None:
        """The row one step further down the ladder, as far as the pages allow; None at the bottom."""
        shape = self._ladder.below(sequence.shape, sequence.num_tokens)
        if shape is None:
            return None
        smaller = self._reopened(sequence, shape)
        if self._refusal(smaller) is not None:
            return None
        smaller.result.notes.append(step_down(sequence.shape, shape))
        return smaller

    def _reopened(self, sequence: Sequence, shape: Shape | None = None) -> Sequence:
        """The row as it was before a prefill that failed."""
        fresh = self._open(sequence.request, sequence.prompt, shape)
        fresh.started, fresh.result.notes = sequence.started, sequence.result.notes
        return fresh

    def _prefill(self, sequences: list[Sequence]) -> list[Result]:
        begin = time.monotonic()
        tile_rows = min(sequence.shape.tile_rows for sequence in sequences)
        pool = self.cache.pool
        families = list(families_of(sequences, self.model, pool, tile_rows, self.attention, share=self.share))
        resumed = self._run_steps(families, sequences)
        readers: dict[int, list[Reader]] = {}
        for family in families:
            for branch in family.branches:
                readers.setdefault(id(branch.owner.sequence), []).append(branch.owner.reader)
        finished = [sequence for sequence in sequences if not sequence.request.task.decodes]
        for sequence in finished:
            conclude(sequence, readers[id(sequence)], self.model, self.tokenizer)
            sequence.release(self.cache.pool)
        finished += self._first_tokens([(s, readers[id(s)][0]) for s in sequences if s.request.task.decodes])
        report_attention(families, self.attention)
        end = time.monotonic()
        self.counters.prefill_tokens += sum(family.num_tokens for family in families) - resumed
        self.counters.prefill_seconds += end - begin
        for sequence in sequences:
            timing = sequence.result.timing
            timing.prefill = end - begin
            if sequence.request.task.decodes:
                timing.ttft = end - sequence.started
                sequence.decode_started = end
        for sequence in finished:
            sequence.stamp(end)
        work = [part for family in families for part in work_of(family, self.model.spec)]
        total = sum(flops for _, flops in work)
        for sequence, flops in work:
            sequence.result.usage.gpu_seconds += (end - begin) * flops / total
        return [sequence.result for sequence in finished]

    def _run_steps(self, families: list[Family[Owner]], sequences: list[Sequence]) -> int:
        """Run what is to be read; returns how many tokens of it lay on the disk."""
        first = sequences[0]
        tile_rows, step_tokens = min(sequence.shape.tile_rows for sequence in sequences), first.shape.step_tokens
        if len(sequences) > 1:
            # They were admitted together, so they fit.
            step_tokens = sum(sequence.num_tokens for sequence in sequences)
        spilled = None
        if self.spill is not None and len(sequences) == 1 and first.pages is not None:
            spilled = self.spill.row(families[0], self.cache)
        start = 0 if spilled is None else spilled.resume()
        if start:
            first.result.usage.cached_tokens = start
            first.result.notes.append(f"resumed at token {start:,}")
        device = self.cache.device
        layers = None if self.attention is None else self.attention.layers
        steps = partial(pack, families, step_tokens=step_tokens, tile_rows=tile_rows, device=device, dense=self.dense)
        for packed in steps(start=start, attention=layers, whole_pages=self.cache.kv.has_open):
            self._ask()
            reads = [(branch.owner.reader, low, high) for branch, low, high in packed.reads]
            deliver(self.model, prefill(self.model, self.cache, packed.step), reads)
            if spilled is not None:
                spilled.save(packed.step)
        return start

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
            choice = self._answers.choose(sequences, logits)
            for sequence, token, live in zip(
                sequences, choice.tokens.tolist(), self._answers.record(sequences, choice), strict=True
            ):
                if live:
                    joining.append(sequence)
                    tokens.append(token)
                else:
                    finished.append(sequence)
        if joining:
            self._decoding.join(joining, tokens)
        return finished

    @torch.inference_mode()
    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.logits(self.model.final_norm(hidden))
