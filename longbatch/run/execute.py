"""A run on one page: manifest -> index -> plan -> engine -> journal and parts -> results."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from longbatch.config import Settings
from longbatch.core import Result
from longbatch.errors import ExitCode, InterruptedRun, UsageError
from longbatch.output import Placement, ResultWriter, RunFolder, merge, recover, scan
from longbatch.report.progress import Progress
from longbatch.run.feed import Feed
from longbatch.run.finish import Work, exit_code, print_json, summary_json, summary_lines
from longbatch.run.index import RowIndex
from longbatch.run.job import Job, say_on_stderr
from longbatch.run.planning import Remaining, get_index, index_path, remaining
from longbatch.run.stopping import StopRequest

if TYPE_CHECKING:
    from longbatch.engine import Engine

WORKER = "w0"
_log = logging.getLogger("longbatch")


def execute(settings: Settings, sources: list[str]) -> ExitCode:
    """Run everything that is left of a job. Raises LongbatchError; InterruptedRun when it was asked to stop."""
    if settings.out is None:
        raise UsageError("a run needs a folder for its results", hint="give one with -o OUT")
    say: Callable[[str], None] = (lambda text: None) if settings.quiet else say_on_stderr
    job = Job.open(settings, sources, say)
    folder = RunFolder.create_or_open(settings.out, job.identity(), job.info())
    _log_to(folder)
    with StopRequest() as stop:
        recover(folder)
        index = get_index(job, folder)
        left = remaining(job, index, scan(folder))
        _log.info("rows=%d finished=%d refused=%d", len(index), left.num_finished, len(left.failed))
        job.manifest.spool(folder.work / "spool")
        work = _work(job, folder, left, stop)
    if stop.requested:
        raise InterruptedRun("stopped; everything finished is saved", hint="run the same command again to continue")
    expected = index
    if settings.only is not None:
        stored = RowIndex.load(index_path(folder), None)
        expected = index if stored is None else stored
    summary = merge(folder, expected.keys, partial=settings.only is not None)
    if settings.json:
        print_json(summary_json(folder, summary, work))
    elif not settings.quiet:
        say("\n".join(summary_lines(folder, summary, work)))
    return exit_code(settings, summary)


def _work(job: Job, folder: RunFolder, left: Remaining, stop: StopRequest) -> Work:
    """Write the rows that cannot run as errors, run the others, and return what was done."""
    settings, totals = job.settings, left.plan.totals
    feed = Feed(job, left)
    progress = Progress(len(left.index), totals.prompt_tokens, settings.progress, quiet=settings.quiet)
    placement = Placement(device=job.device.torch_name, rank=0)
    attempt = 1 + int(left.attempts.max(initial=0))
    begin = time.monotonic()
    with ResultWriter(folder, WORKER, attempt, placement) as writer:
        for result in feed.error_rows():
            writer.append(result)
        if not totals.num_rows or stop.requested:
            return Work()
        engine = make_engine(job, left)
        ready, ready_at = time.monotonic(), time.time()
        progress.start(left.num_finished + len(left.failed), len(left.failed))
        rows = failed = generated = 0

        def tick() -> bool:
            counters = engine.counters
            progress.update(
                left.num_finished + len(left.failed) + rows,
                len(left.failed) + failed,
                min(counters.prefill_tokens, totals.prompt_tokens),
                counters.decode_tokens,
            )
            return stop.requested

        for result in engine.run(feed.waves(), tick):
            _complete(result, feed, left, ready)
            writer.append(result)
            rows, failed = rows + 1, failed + (result.status != "ok")
            generated += result.usage.completion_tokens
        for result in feed.failures:
            writer.append(result)
            rows, failed = rows + 1, failed + 1
        tick()
        progress.finish()
        counters = engine.counters
        _log.info("prefill %.1f s, decode %.1f s", counters.prefill_seconds, counters.decode_seconds)
        return Work(
            rows,
            counters.prefill_tokens,
            generated,
            ready_at=ready_at,
            startup_seconds=ready - begin,
            seconds=time.monotonic() - ready,
            busy_seconds=counters.busy_seconds,
            prefill_seconds=counters.prefill_seconds,
            decode_seconds=counters.decode_seconds,
        )


def make_engine(job: Job, left: Remaining) -> Engine:
    """Load the weights and allocate the cache: the part of a run that needs torch."""
    import torch

    from longbatch.cache import PAGE_TOKENS, KVCache
    from longbatch.engine import Engine, EngineLimits
    from longbatch.models import load

    if job.settings.threads is not None:
        torch.set_num_threads(job.settings.threads)
    device, dtype = torch.device(job.device.torch_name), getattr(torch, job.dtype)
    budget = left.plan.budget
    model = load(job.model_dir, dtype, device)
    shapes = [(layer.num_kv_heads, layer.head_dim) for layer in job.spec.layers]
    cache = KVCache(shapes, budget.kv_tokens // PAGE_TOKENS, dtype=dtype, device=device)
    limits = EngineLimits(
        step_tokens=budget.wave_tokens,
        tile_rows=budget.tile_tokens,
        decode_rows=job.settings.decode_batch or (256 if job.device.on_gpu else 64),
        max_tokens=job.settings.max_tokens,
        run_seed=job.settings.seed,
    )
    tokenizer = job.builder.tokenizer
    named = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    _log.info("model %s on %s, %d tokens of K/V", job.spec.architecture, job.device.name, budget.kv_tokens)
    return Engine(model, tokenizer, cache, limits, eos_ids=frozenset((*job.spec.eos_ids, *named)))


def _complete(result: Result, feed: Feed, left: Remaining, begin: float) -> None:
    """Fill in what only the run knows."""
    known = feed.loaded.pop(result.key)
    result.attempt = int(left.attempts[known.entry]) + 1
    result.wave, result.width = known.wave, 1
    result.attention_mode, result.attention_density = "dense", 1.0
    timing = result.timing
    timing.load, timing.tokenize = known.load, known.tokenize
    if timing.total is not None:
        timing.queued = max(0.0, time.monotonic() - begin - timing.total)


def _log_to(folder: RunFolder) -> None:
    """One log file per process; it holds counts and tracebacks, no prompt and no answer."""
    path = folder.logs / f"run-{datetime.now():%Y%m%d-%H%M%S}.log"
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
