"""The rows of a job that are left, packed into waves."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longbatch.config import Settings
from longbatch.device import Rates
from longbatch.errors import UsageError
from longbatch.output import Done, RowState, RunFolder, scan
from longbatch.output.keys import key_part
from longbatch.plan import CostModel, Plan
from longbatch.plan import make_plan as pack
from longbatch.plan.sparse_rates import REFERENCE
from longbatch.report.plan_view import PlanView, Refusals
from longbatch.run.control import RetryMarks
from longbatch.run.index import RowIndex
from longbatch.run.job import Job, open_folder, say_on_stderr
from longbatch.run.shard import Shard, deal

INDEX_FILE = "index.parquet"


@dataclass(frozen=True)
class Remaining:
    """What is left to do.

    plan: rows to run. failed: entries that cannot run and have no result yet. attempts: of the results that are
    there, by entry; 0 where there is none. share: entries that this process is to bring to an end, of which
    num_finished have a result that stands, num_failed of these an error.
    """

    index: RowIndex
    plan: Plan
    failed: list[int]
    attempts: np.ndarray
    share: np.ndarray
    num_finished: int
    num_failed: int


def index_path(folder: RunFolder) -> Path:
    """Where a run folder keeps its index."""
    return folder.work / INDEX_FILE


def index_identity(job: Job) -> str:
    """A hash of all that the index depends on: the manifest's files and every setting that changes what is read."""
    settings = job.settings
    read = settings.limit, settings.only, str(settings.media_root), settings.max_row_bytes
    content = [job.manifest.fingerprint_sources(), job.identity(), read]
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def get_index(job: Job, folder: RunFolder | None, tick: Callable[[], None] = lambda: None) -> RowIndex:
    """The stored index where it fits, else a new one, stored where there is a folder. An index of one row
    (`--only`) is never stored. tick: called now and then meanwhile; what it raises ends the counting."""
    identity = index_identity(job)
    stored = RowIndex.load(index_path(folder), identity) if folder is not None else None
    if stored is not None and folder is not None:
        if stored.look_again(job.manifest, job.builder, tick):
            stored.save(index_path(folder))
        return stored
    index = RowIndex.build(job.manifest, job.builder, identity, tick)
    if folder is not None and job.settings.only is None:
        index.save(index_path(folder))
    return index


def remaining(job: Job, index: RowIndex, done: Done | None, marks: RetryMarks | None, shard: Shard | None) -> Remaining:
    """Compare the index with what is done, and plan the rest. With `--only` the row runs again whatever it holds.

    Raises UsageError when rows have changed since they were answered and `--update` is not given.
    """
    states = np.zeros(len(index), dtype=np.uint8)
    attempts = np.zeros(len(index), dtype=np.int32)
    if done is not None:
        places, states = done.find(index.keys.answers)
        attempts[places >= 0] = done.attempts[places[places >= 0]]
    if not job.settings.update:
        _refuse_changes(index, states, done)
    finished = (states == RowState.OK) | (states == RowState.FAILED)
    if job.settings.only is not None:
        finished[:] = False
    elif marks is not None:
        finished &= (states == RowState.OK) | ~marks.wanted(index.keys.answers, attempts)
    share = np.ones(len(index), dtype=bool)
    if shard is not None:
        share = deal(_fixed_work(job, index), shard.count) == shard.index
    left = np.flatnonzero(share & ~finished)
    able = left[np.isin(left, index.runnable(), assume_unique=True)]
    failed = left[~np.isin(left, able, assume_unique=True)].tolist()
    plan = pack(index.sizes(able), job.spec, job.budget(), job.cost(), max_wave_seconds=job.settings.max_wave_seconds)
    for size, error in plan.refused:
        entry = index.entry(size.row, size.sample)
        index.errors[entry] = error
        failed.append(entry)
    standing = share & finished
    num_failed = int(np.count_nonzero(standing & (states == RowState.FAILED)))
    num_finished = int(np.count_nonzero(standing))
    return Remaining(index, plan, sorted(failed), attempts, np.flatnonzero(share), num_finished, num_failed)


def _refuse_changes(index: RowIndex, states: np.ndarray, done: Done | None) -> None:
    """A row may change freely until it is answered; an error row is no answer."""
    if done is None:
        return
    answered = key_part(done.answers[done.states == RowState.OK])
    changed = np.flatnonzero(states == RowState.CHANGED)
    changed = changed[np.isin(key_part(index.keys.answers[changed]), answered)]
    if len(changed):
        first = int(index.keys.rows[changed[0]])
        raise UsageError(
            f"{len(changed):,} rows changed since they were answered, the first is row {first}",
            hint="answer them again with --update, or give another folder with --out",
        )


def _fixed_work(job: Job, index: RowIndex) -> np.ndarray:
    """Estimated work of each entry, from its lengths alone: the same on every machine."""
    rates = Rates(REFERENCE.dense_flops, REFERENCE.dense_flops, 1e12)
    cost = CostModel(job.spec, rates, sparse=job.attention.rows(job.spec, REFERENCE))
    entries = index.entries
    work: np.ndarray = cost.prefill(entries["prompt"], entries["branch_tokens"])
    work += entries["generated"] * cost.prefill(np.array([1]))[0]
    return work


def make_plan(settings: Settings, sources: list[str]) -> PlanView:
    """`longbatch plan`: nothing runs; with an output folder the index is stored there and `run` uses it."""
    job = Job.open(settings, sources, say_on_stderr)
    folder = None
    if settings.out is not None:
        job, folder = open_folder(job)
    index = get_index(job, folder)
    shard = Shard.parse(settings.shard, os.environ)
    done, marks = (None, None) if folder is None else (scan(folder), RetryMarks.load(folder.work))
    left = remaining(job, index, done, marks, shard)
    refusals = Refusals()
    for entry in left.failed:
        refusals.add(f"row {int(index.keys.rows[entry])}", index.errors[entry])
    return PlanView(
        plan=left.plan,
        model=job.model_dir.name,
        dtype=job.dtype,
        device=job.device,
        num_rows=len(left.share),
        num_finished=left.num_finished,
        refusals=refusals,
        stored=None if folder is None else folder.path,
        price_per_gpu_hour=settings.price_per_gpu_hour,
        attention=job.attention.describe(),
        kv_dtype=job.kv.name,
        weights_dtype=settings.weights_dtype,
        break_even_tokens=job.cost().break_even_tokens,
    )
