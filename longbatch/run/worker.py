"""One device's process: takes waves from the supervisor, runs them, writes their results, says how far it is.

    python -m longbatch.run.worker FD

FD is its end of a socket pair. It ends when the supervisor says so, and at once when the supervisor is gone.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longbatch.core import Location, Prompt, Request, Result
from longbatch.errors import DiskError, ExitCode, LongbatchError
from longbatch.folders import cache_folder
from longbatch.output import Placement, ResultWriter, RunFolder
from longbatch.privacy import LogFormatter, hide_data_in_tracebacks
from longbatch.run.channel import Channel, Message
from longbatch.run.feed import Feed, Loaded, Wanted, WaveRows
from longbatch.run.inflight import Begun, clear_begun, write_begun
from longbatch.run.job import Job, WorkerSetup

if TYPE_CHECKING:
    from longbatch.engine import Engine
    from longbatch.engine.verification import VerifyingEngine

BEAT_SECONDS = 1.0
# How long a result usually takes into the journal.
WRITE_SECONDS = 0.02
# A row's key in hex, as the supervisor sends it, before the hash of its content.
KEY_HEX = 32
_PR_SET_PDEATHSIG = 1
_log = logging.getLogger("longbatch.worker")


def main(descriptor: int) -> int:
    """The whole life of a worker; the exit code."""
    _die_with_parent()
    # A supervisor that finds a worker stuck asks for its stacks before it kills it.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    # Ctrl-C and TERM reach the supervisor, which tells its workers what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Standard error is the worker's log: no prompt gets into it, whatever fails and whatever libraries tell.
    hide_data_in_tracebacks()
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("longbatch").setLevel(logging.INFO)
    channel = Channel(socket.socket(fileno=descriptor))
    messages = channel.receive(None)
    if not messages:
        return ExitCode.OK
    setup = WorkerSetup.from_json(messages[0]["setup"])
    try:
        worker = Worker(setup, channel, messages[1:])
    except LongbatchError as error:
        _refuse(channel, error)
        return error.exit_code
    worker.run()
    # Everything is on the disk; taking the interpreter and torch apart would only keep the run waiting.
    os._exit(ExitCode.OK)


def _refuse(channel: Channel, error: LongbatchError) -> None:
    """Tell the supervisor why this worker ends; no other one would do better."""
    channel.send("refused", exit_code=int(error.exit_code), message=error.message, hint=error.hint)
    channel.flush()


class Worker:
    """A loaded engine and its way out. Raises LongbatchError when it cannot start."""

    def __init__(self, setup: WorkerSetup, channel: Channel, messages: list[Message]) -> None:
        begin = time.monotonic()
        self._channel = channel
        self._coming: deque[tuple[Message, Future[WaveRows]]] = deque()
        self._ending = False
        self._stop_at: float | None = None
        self._finished: deque[list[Any]] = deque()
        self._num_reported = 0
        self._spilled: deque[Path] = deque()  # of each finished row that is not in the journal yet
        self._begun: dict[tuple[int, int], Begun] = {}
        self._beat = 0.0
        self._started = setup.started
        folder = RunFolder.open(setup.out)
        self._feed = Feed(Job.reopen(setup))
        self._prompts = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        # The prompts of the first waves are made while the weights are loaded.
        self._take(messages + channel.receive())
        self._folder = folder.worker(setup.worker)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        module, _, function = setup.engine.partition(":")
        make: Callable[[Job, WorkerSetup], Engine] = getattr(importlib.import_module(module), function)
        self._engine = make(self._feed.job, setup)
        placement = Placement(device=setup.device.torch_name, rank=setup.rank)
        self._writer = ResultWriter(folder, setup.worker, setup.attempt, placement)
        channel.send("ready", seconds=time.monotonic() - begin)

    def run(self) -> None:
        """Work until told to end. A full disk ends it with everything finished still in the journal or in memory."""
        with self._prompts:
            try:
                for result, loaded in self._feed.completed(self._engine.run(self._waves(), self._tick)):
                    self._deliver(result, loaded)
                self._writer.close()
            except LongbatchError as error:
                with suppress(DiskError):
                    self._writer.close()  # gives up its reserve for what is finished and not written yet
                _refuse(self._channel, error)
                raise
        clear_begun(self._folder)
        self._send_progress()
        if self._engine.spill is not None:
            self._engine.spill.close()
        self._channel.send("ended")
        self._channel.flush()

    def _waves(self) -> Iterator[list[tuple[Request, Prompt]]]:
        """The rows of each wave that comes; an empty list while there is nothing new and answers are under way."""
        while True:
            if self._stop_at is not None:
                return  # what is under way goes on until then
            if not self._coming:
                if self._ending:
                    return
                if not self._engine.num_decoding:
                    if self._finished:
                        self._send_progress()
                    # The end is near when the supervisor knows of the last results: they are in the journal soon.
                    self._take(self._channel.receive(WRITE_SECONDS if self._finished else BEAT_SECONDS))
                    self._tick()
                else:
                    yield []
                continue
            message, future = self._coming[0]
            if self._engine.num_decoding and (message["alone"] or not future.done()):
                # A suspect waits until nothing else can be harmed; a wave whose prompts are not made yet waits too.
                yield []
                continue
            self._coming.popleft()
            rows = future.result()
            self._begin(message)
            for result in rows.failures:
                self._deliver(result, rows.loaded[result.key])
            self._feed.loaded.update(rows.loaded)
            yield rows.rows
            if message["alone"]:
                while self._engine.num_decoding:
                    yield []

    def _begin(self, message: Message) -> None:
        """Put the wave's rows on record, then tell the supervisor."""
        for _, row, sample, *_, attempt, answer in message["rows"]:
            self._begun[row, sample] = Begun(row, sample, answer[:KEY_HEX], attempt)
        write_begun(self._folder, self._begun.values())
        self._channel.send("begin")

    def _deliver(self, result: Result, loaded: Loaded) -> None:
        if result.timing.total is not None:
            result.timing.queued = max(0.0, time.time() - self._started - result.timing.total)
        self._writer.append(result)
        self._begun.pop((result.row, result.key.sample), None)
        usage = result.usage
        kind = None if result.error is None else result.error.type
        self._finished.append([loaded.entry, kind, usage.prompt_tokens, usage.completion_tokens])
        if self._engine.spill is not None:
            self._spilled.append(self._engine.spill.folder_of(result))

    def _tick(self) -> bool:
        """Between two steps: news from the supervisor, a sign of life, and whether to stop."""
        self._take(self._channel.receive())
        if self._channel.closed:
            # Nobody is left to work for; everything finished goes to the disk first.
            self._writer.close()
            os._exit(ExitCode.INTERRUPTED)
        now = time.monotonic()
        if now - self._beat >= BEAT_SECONDS:
            self._beat = now
            self._send_progress()
        return self._stop_at is not None and now >= self._stop_at

    def _send_progress(self) -> None:
        """Only results that are in the journal are reported: the supervisor never asks for them again."""
        num_written = self._writer.num_written
        finished = [self._finished.popleft() for _ in range(num_written - self._num_reported)]
        if self._engine.spill is not None:
            for _ in finished:
                self._engine.spill.remove(self._spilled.popleft())
        self._num_reported = num_written
        self._channel.send("beat", finished=finished, **asdict(self._engine.counters))

    def _take(self, messages: list[Message]) -> None:
        for message in messages:
            if message["kind"] == "wave":
                wanted = [
                    Wanted(entry, row, sample, Location(*place), bytes.fromhex(answer[KEY_HEX:]), attempt)
                    for entry, row, sample, *place, attempt, answer in message["rows"]
                ]
                self._coming.append((message, self._prompts.submit(self._feed.read, message["wave"], wanted)))
            elif message["kind"] == "end":
                self._ending = True
            elif message["kind"] == "stop":
                self._stop_at = time.monotonic() + message["grace"]


def load_engine(job: Job, setup: WorkerSetup) -> Engine:
    """What answers rows: the part of a worker that needs torch."""
    from longbatch.engine import Spill

    engine = _load(job, setup)
    if job.settings.spill is not None:
        # Each run has its own folder there, so that runs with equal ids do not meet.
        run = RunFolder.open(setup.out)
        engine.spill = Spill(job.settings.spill / run.run_id, run.identity["model_hash"])
    return engine


def load_verifier(job: Job, setup: WorkerSetup) -> VerifyingEngine:
    """What runs rows again to measure how far sparse attention is from dense."""
    from longbatch.engine.verification import VerifyingEngine

    return VerifyingEngine(_load(job, setup))


def _load(job: Job, setup: WorkerSetup) -> Engine:
    """The weights and the cache."""
    import torch

    from longbatch.attention.measure import dense_kernels
    from longbatch.cache import PAGE_TOKENS, KVCache
    from longbatch.engine import Engine, EngineAttention, EngineLimits, warm_up
    from longbatch.models import load

    settings, budget = job.settings, setup.budget
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device, dtype = torch.device(setup.device.torch_name), getattr(torch, job.dtype)
    if setup.device.on_gpu:
        # Kernels are launched where the process is.
        torch.cuda.set_device(device)
    # Before the weights and the cache, which leave no room to measure in.
    dense = dense_kernels(job.spec.layers, setup.device, job.dtype, cache_folder())
    model = load(job.model_dir, dtype, device, settings.weights_dtype, settings.adapter, budget.weights)
    shapes = [(layer.num_kv_heads, layer.head_dim) for layer in job.spec.layers]
    num_pages = budget.kv_tokens // PAGE_TOKENS
    cache = KVCache(shapes, num_pages, dtype=dtype, device=device, kv=job.kv, num_open=job.decode_rows)
    limits = EngineLimits(
        step_tokens=budget.wave_tokens,
        tile_rows=budget.tile_tokens,
        decode_rows=job.decode_rows,
        max_tokens=settings.max_tokens,
        run_seed=settings.seed,
        row_seconds=settings.row_timeout,
        chunk_tokens=budget.chunk_tokens,
    )
    tokenizer = job.builder.tokenizer
    named = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    engine = Engine(model, tokenizer, cache, limits, eos_ids=frozenset((*job.spec.eos_ids, *named)))
    engine.dense = dense
    if setup.attention.is_sparse:
        engine.attention = EngineAttention.of(job.spec, setup.attention.layers, setup.attention.min_length)
    if setup.device.on_gpu:
        warm_up(engine)
    return engine


def _die_with_parent() -> None:
    """On Linux the kernel kills this process when the supervisor dies, even in the middle of a long step."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
