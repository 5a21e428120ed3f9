"""One process's part in a run on one page: index -> plan -> workers -> journals and parts -> results."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import numpy as np

from longbatch.core import Fault, Result
from longbatch.errors import ExitCode, FidelityError, InterruptedRun, LongbatchError
from longbatch.output import (
    Fidelity,
    KeyTable,
    ResultWriter,
    RunFolder,
    fidelity,
    merge,
    read_gaps,
    recover,
    result_files,
    scan,
)
from longbatch.output.keys import digest_of
from longbatch.report.progress import Progress
from longbatch.run import space
from longbatch.run.control import RetryMarks, last_stop, stop_requested
from longbatch.run.deadline import Deadline
from longbatch.run.failures import Failures
from longbatch.run.feed import read_entry
from longbatch.run.finish import (
    Work,
    attention_json,
    attention_lines,
    exit_code,
    gap_error,
    print_json,
    remove_copies,
    summary_json,
    summary_lines,
    too_far,
    too_far_error,
)
from longbatch.run.index import RowIndex
from longbatch.run.inflight import INTERRUPTED, Strike, StrikeBook, clear_begun, find_begun, read_begun
from longbatch.run.job import SPOOL, Job
from longbatch.run.owner import Owner
from longbatch.run.planning import Remaining, get_index, index_path, remaining
from longbatch.run.process import newest_attempt
from longbatch.run.sample import read_sample
from longbatch.run.shard import Shard
from longbatch.run.status import Snapshot, StatusFile, WorkerState
from longbatch.run.stopping import StopRequest
from longbatch.run.supervisor import Supervisor
from longbatch.run.verification import Verification

OWNER_SECONDS = 60.0
TICK_SECONDS = 1.0
_log = logging.getLogger("longbatch")


class Run:
    """One process's part in a run: all of it, or one shard.

    num_rows: results of this process. comes_back: whether it was cut short by something that wants it to go on later.
    gap_error: set at the end where --max-gap is not kept.
    """

    def __init__(self, job: Job, folder: RunFolder, shard: Shard | None, say: Callable[[str], None]) -> None:
        self._job = job
        self._folder = folder
        self._shard = shard
        self._say = say
        self.name = shard.name if shard else "run"
        self.num_rows = 0
        self.comes_back = False
        self.gap_error: FidelityError | None = None
        self._prefix = f"{shard.name}-" if shard else ""
        self._stop = StopRequest()
        self._current: tuple[Supervisor | None, Remaining | None] = (None, None)
        # Set while gaps are measured: whose rows the status tells of, and the device time held before.
        self._answered: tuple[Supervisor, Remaining] | None = None
        self._held_before = 0.0
        self._owner: Owner | None = None
        self._owned_at = time.monotonic()
        self._ticked_at = 0.0
        self._status = StatusFile(folder.work, self.name)
        self._known_stop = last_stop(folder.work)
        self._deadline = Deadline.find(job.settings.max_time, job.settings.grace, os.environ)
        self._started = time.time()
        self._why = ""

    def go(self, engine: str, verifier: str, stop: StopRequest, owner: Owner) -> tuple[ExitCode, dict[str, object]]:
        """Everything from what a dead process left to the merged results: exit code and summary."""
        self._stop, self._owner = stop, owner
        self._write_status("planning")
        try:
            return self._go(engine, verifier)
        except InterruptedRun:
            raise
        except LongbatchError as error:
            self._write_status("failed", *self._current, code=error.exit_code)
            raise

    def _go(self, engine: str, verifier: str) -> tuple[ExitCode, dict[str, object]]:
        self._recover()
        index = get_index(self._job, self._folder, self._tick)
        book = StrikeBook(self._folder.work, self.name)
        self._strike_leftovers(self._folder, book)
        failures = Failures(self._job.settings.abort_on_failures)
        left, supervisor, work = self._work_through(index, book, failures, engine)
        self._measure_gaps(index, left, supervisor, verifier)
        try:
            return self._finish(index, left, work, supervisor)
        except InterruptedRun as error:
            # Every row had a result until the merge read the parts, so one is damaged and was set aside.
            self._say(f"{error.message}; they run again")
            _log.warning("%s", error.message)
        left, supervisor, repeated = self._work_through(index, book, failures, engine)
        self._measure_gaps(index, left, supervisor, verifier)
        return self._finish(index, left, work + repeated, supervisor)

    def _work_through(
        self, index: RowIndex, book: StrikeBook, failures: Failures, engine: str
    ) -> tuple[Remaining, Supervisor, Work]:
        """Run what is left. Raises InterruptedRun where it does not get to the end."""
        job, folder = self._job, self._folder
        done = scan(folder)
        left = remaining(job, index, done, RetryMarks.load(folder.work), self._shard)
        totals = left.plan.totals
        for found in done.damage if totals.num_rows else ():
            self._say(f"damaged, so its rows run again: {found}")
            _log.warning("damaged: %s", found)
        needed = space.estimate(
            totals.num_rows + len(left.failed),
            totals.generated_tokens,
            num_workers=len(job.devices),
            stored=space.stored_bytes(folder),
        )
        space.check(folder.path, needed)
        _log.info("rows=%d finished=%d refused=%d", len(left.share), left.num_finished, len(left.failed))
        if left.failed or totals.num_rows:
            job.manifest.spool(folder.work / SPOOL)
        self._write_refused(left)
        supervisor = Supervisor(job, folder, left, book, failures, prefix=self._prefix, engine=engine)
        if totals.num_rows and not self._stop.requested:
            self._supervise(supervisor, left)
        work = Work.of(supervisor.tally)
        self.num_rows += work.rows
        self._require_end(supervisor, left, "rows are left")
        return left, supervisor, work

    def _require_end(self, supervisor: Supervisor, left: Remaining, what: str) -> None:
        """Raise InterruptedRun where something is left to do."""
        num_left = supervisor.dispatcher.num_left
        if not num_left:
            return
        if not self._why:
            # No wave that is left fits before the end, or a signal came before the first one.
            self._why = f"stopped before {self._deadline.describe()}"
            if self._stop.requested:
                self._why = "stopped by a signal"
            self.comes_back = self._stop.requested or self._deadline.is_slurm
        self._write_status("interrupted", supervisor, left)
        raise InterruptedRun(
            f"{self._why}; what is finished is saved, {num_left:,} {what}",
            hint="run the same command again to continue",
        )

    def _measure_gaps(self, index: RowIndex, left: Remaining, answered: Supervisor, verifier: str) -> None:
        """Run some rows that ran sparse again, also dense. Raises InterruptedRun where it does not get to the end."""
        job, spool = self._job, self._folder.work / SPOOL
        if not job.settings.verify_sample or not job.attention.is_sparse or job.settings.only is not None:
            return
        job.manifest.spool(spool)
        found = Verification.draw(job, self._folder, index, self._shard, left.share)
        book = StrikeBook(found.folder.work, self.name)
        self._strike_leftovers(found.folder, book)
        supervisor = Supervisor(
            job, found.folder, found.left, book, Failures("off"), prefix=self._prefix, engine=verifier, spool=spool
        )
        num_rows = found.left.plan.totals.num_rows
        if num_rows and not self._stop.requested:
            again = "row that ran sparse runs" if num_rows == 1 else "rows that ran sparse run"
            self._say(f"{num_rows:,} {again} again, to measure the gap to dense attention")
            self._answered, self._held_before = (answered, left), answered.device_seconds
            self._supervise(supervisor, found.left, "verifying")
        num_left = supervisor.dispatcher.num_left
        self._require_end(supervisor, found.left, f"{'row is' if num_left == 1 else 'rows are'} left to verify")
        self._answered, self._held_before = None, 0.0

    # ------------------------------------------------------------------------------------- before

    def _recover(self) -> None:
        """Publish what dead processes of this share, or of any, left in journals."""
        for found in recover(self._folder, f"{self._prefix}*"):
            _log.info(
                "recovered %s: %d rows, %d bytes torn off", found.journal, found.report.num_rows, found.report.torn
            )
            if found.report.num_damaged:
                self._say(f"damaged, so some rows run again: {found.journal}")
                _log.warning("damaged: %s: %d writes", found.journal, found.report.num_damaged)

    def _strike_leftovers(self, folder: RunFolder, book: StrikeBook) -> None:
        """Note the rows that were under way when an earlier process was killed together with its workers."""
        for worker in find_begun(folder.work, self._prefix):
            book.add(Strike(begun.key, begun.attempt, INTERRUPTED) for begun in read_begun(worker))
            clear_begun(worker)

    def _write_refused(self, left: Remaining) -> None:
        """Error rows for the entries that cannot run, each read again for what it carries along."""
        if not left.failed:
            return
        index = left.index
        name = f"{self._prefix}plan"
        with ResultWriter(self._folder, name, newest_attempt(self._folder, name) + 1, reserve_bytes=0) as writer:
            for entry in left.failed:
                row, sample = int(index.keys.rows[entry]), int(index.keys.samples[entry])
                location, error = index.location(entry), index.errors[entry]
                source = read_entry(self._job, location, row, sample)
                if error.type == "duplicate_id":
                    # Reading one row alone does not show that its id was taken; the refused row keeps none.
                    source = Fault(row, None, location, error, source.carried, index.fingerprint(entry))
                elif KeyTable.of([source]).answers[0] != index.keys.answers[entry]:
                    # Read alone it is another row: one too long, or one whose file changed. The index says what was
                    # refused.
                    id = source.id if digest_of(source) == index.key(entry) else None
                    source = Fault(row, id, location, error, source.carried, index.fingerprint(entry))
                result = Result.failed(source, error)
                result.attempt = int(left.attempts[entry]) + 1
                writer.append(result)

    def _tick(self) -> None:
        """While rows are counted: a sign of life, and the end of it when the run is told to stop."""
        now = time.monotonic()
        if now - self._ticked_at < TICK_SECONDS:
            return
        self._ticked_at = now
        self._write_status("planning")
        if self._told_to_stop():
            self._write_status("interrupted")
            hint = "run the same command again; counting begins anew"
            raise InterruptedRun(f"{self._why} while the rows were counted", hint=hint)

    # ------------------------------------------------------------------------------------- during

    def _supervise(self, supervisor: Supervisor, left: Remaining, state: str = "running") -> None:
        settings, totals = self._job.settings, left.plan.totals
        self._current = supervisor, left
        num_done, num_failed = left.num_finished + len(left.failed), left.num_failed + len(left.failed)
        verifying = self._answered is not None
        # A row that is measured is read twice, sparse and dense.
        tokens = totals.prompt_tokens * (2 if verifying else 1)
        note = "measuring the gap to dense attention" if verifying else ""
        progress = Progress(len(left.share), tokens, settings.progress, quiet=settings.quiet)
        progress.start(num_done, num_failed)

        def watch(running: Supervisor) -> bool:
            tally = running.tally
            read = min(tally.prefill_tokens, tokens)
            progress.update(num_done + tally.rows, num_failed + tally.failed, read, tally.decode_tokens, note)
            self._write_status("stopping" if running.stopping else state, running, left)
            return self._must_stop(running)

        try:
            supervisor.run(watch, self._deadline.allows)
        finally:
            progress.finish()

    def _must_stop(self, supervisor: Supervisor) -> bool:
        """Whether to stop and save now; `_why` then says why."""
        hours = (self._held_before + supervisor.device_seconds) / 3600
        limit = self._job.settings.max_gpu_hours
        if not self._told_to_stop() and limit is not None and hours >= limit:
            self._why = f"stopped after {hours:.2f} GPU hours"
        return bool(self._why)

    def _told_to_stop(self) -> bool:
        """Whether a signal, another process or the time says so; `_why` then says which."""
        if self._why:
            return True
        left = self._deadline.seconds_left()
        if self._stop.requested:
            self._why, self.comes_back = "stopped by a signal", True
        elif not self._is_owner():
            self._why = "stopped: another process took over this run while this one was silent"
        elif stop_requested(self._folder.work, self._known_stop):
            self._why = "stopped by `longbatch stop`"
        elif left is not None and left <= self._job.settings.grace:
            self._why, self.comes_back = f"stopped before {self._deadline.describe()}", self._deadline.is_slurm
        return bool(self._why)

    def _is_owner(self) -> bool:
        """Looked up about once a minute: a process that was frozen for long may have been replaced."""
        now = time.monotonic()
        if self._owner is None or now - self._owned_at < OWNER_SECONDS:
            return True
        self._owned_at = now
        return self._owner.still_holds()

    def _write_status(
        self, state: str, supervisor: Supervisor | None = None, left: Remaining | None = None, code: int | None = None
    ) -> None:
        snapshot = Snapshot(state, self._started, exit_code=code)
        if supervisor is not None and left is not None:
            answered, left = self._answered or (supervisor, left)
            tally, now = answered.tally, time.monotonic()
            snapshot = Snapshot(
                state,
                self._started,
                rows_total=len(left.share),
                rows_done=left.num_finished + len(left.failed) + tally.rows,
                rows_failed=left.num_failed + len(left.failed) + tally.failed,
                tokens_total=left.plan.totals.prompt_tokens,
                tokens_done=tally.prefill_tokens,
                generated=tally.decode_tokens,
                errors=dict(answered.failures.counts),
                workers=tuple(
                    WorkerState(
                        worker.name,
                        worker.process.pid,
                        worker.device.torch_name,
                        worker.state,
                        now - worker.beat,
                        supervisor.dispatcher.under_way(worker.name),
                    )
                    for worker in supervisor.workers
                ),
                gpu_seconds=self._held_before + supervisor.device_seconds,
                price_per_gpu_hour=self._job.settings.price_per_gpu_hour,
                exit_code=code,
            )
        self._status.write(snapshot)

    # ------------------------------------------------------------------------------------- after

    def _finish(
        self, index: RowIndex, left: Remaining, work: Work, supervisor: Supervisor
    ) -> tuple[ExitCode, dict[str, object]]:
        """Merge, unless this is one shard of several, and say how it went."""
        settings, folder = self._job.settings, self._folder
        if self._shard is not None:
            failed = left.num_failed + len(left.failed) + supervisor.tally.failed
            code = ExitCode.FAILED_ROWS if failed > settings.allowed_failures(len(left.share)) else ExitCode.OK
            gaps = read_gaps(folder).of(index.keys.answers[left.share])
            if too_far(float(np.nanmax(gaps, initial=0.0)), settings.max_gap):
                code, self.gap_error = ExitCode.FIDELITY, too_far_error(settings.max_gap)
            self._write_status("finished", supervisor, left, code)
            self._say(
                f"share {self._shard.index} of {self._shard.count} is finished; then: longbatch merge {folder.path}"
            )
            return code, {}
        self._write_status("merging", supervisor, left)
        expected = index
        if settings.only is not None:
            stored = RowIndex.load(index_path(folder), None)
            expected = index if stored is None else stored
        summary = merge(folder, expected.keys, partial=settings.only is not None)
        if not summary.num_missing:
            remove_copies(folder, settings.spill)
        nothing_ran = not left.plan.totals.num_rows and len(left.failed) == summary.num_rows
        attention = self._job.attention
        found = fidelity(result_files(folder)) if attention.is_sparse else Fidelity()
        # One row that runs again is not measured.
        wanted = settings.verify_sample if found.num_sparse and settings.only is None else 0
        sample = read_sample(folder, wanted, found.num_sparse) if wanted else None
        self.gap_error = gap_error(found, settings.max_gap) if settings.only is None else None
        code = ExitCode.MANIFEST if nothing_ran else exit_code(settings, summary, self.gap_error)
        self._write_status("finished", supervisor, left, code)
        content = summary_json(folder, summary, work, attention_json(attention, found))
        if settings.json:
            print_json(content)
        elif not settings.quiet:
            told = attention_lines(attention, found, settings, sample)
            self._say("\n".join(summary_lines(folder, summary, work, told)))
        return code, content
