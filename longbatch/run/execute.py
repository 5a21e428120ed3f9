"""A run on one page: manifest -> index -> plan -> workers -> journals and parts -> results."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

from longbatch.config import Settings
from longbatch.core import Fault, Result
from longbatch.errors import ExitCode, InterruptedRun, LongbatchError, RunningError, UsageError
from longbatch.output import KeyTable, ResultWriter, RunFolder, merge, recover, scan
from longbatch.output.keys import digest_of
from longbatch.privacy import LogFormatter
from longbatch.report.progress import Progress
from longbatch.run import slurm, space
from longbatch.run.control import RetryMarks, last_stop, stop_requested
from longbatch.run.deadline import Deadline
from longbatch.run.failures import Failures
from longbatch.run.feed import read_entry
from longbatch.run.finish import Work, exit_code, print_json, remove_copies, summary_json, summary_lines
from longbatch.run.hooks import on_finish
from longbatch.run.index import RowIndex
from longbatch.run.inflight import INTERRUPTED, Strike, StrikeBook, clear_begun, find_begun, read_begun
from longbatch.run.job import SPOOL, Job, say_on_stderr
from longbatch.run.owner import Owner
from longbatch.run.planning import Remaining, get_index, index_path, remaining
from longbatch.run.process import newest_attempt
from longbatch.run.shard import Shard
from longbatch.run.status import Snapshot, StatusFile, WorkerState
from longbatch.run.stopping import StopRequest
from longbatch.run.stored import save_command
from longbatch.run.supervisor import ENGINE, Supervisor

# A job that is requeued this often without an end has another problem than time.
MOST_REQUEUES = 100
OWNER_SECONDS = 60.0
TICK_SECONDS = 1.0
_log = logging.getLogger("longbatch")


def execute(settings: Settings, sources: list[str], *, engine: str = ENGINE) -> ExitCode:
    """Run everything that is left of a job. engine: `module:function` that makes a worker's engine.

    Raises LongbatchError; InterruptedRun when it was told to stop or its time was over.
    """
    if settings.out is None:
        raise UsageError("a run needs a folder for its results", hint="give one with -o OUT")
    say: Callable[[str], None] = (lambda text: None) if settings.quiet else say_on_stderr
    shard = Shard.parse(settings.shard, os.environ)
    job = Job.open(settings, sources, say)
    folder = RunFolder.create_or_open(settings.out, job.identity(), job.info())
    run = Run(job, folder, shard, say)
    try:
        with Owner.acquire(folder.work, run.name) as owner, _log_to(folder), StopRequest() as stop:
            save_command(folder.work, settings, sources)
            code, summary = run.go(engine, stop, owner)
    except RunningError as error:
        if not settings.skip_if_running:
            raise
        say(f"{error.message}; nothing to do")
        return ExitCode.OK
    except LongbatchError as error:
        _after(settings, folder, error.exit_code, {}, say)
        if isinstance(error, InterruptedRun) and slurm.job_id(os.environ) is not None:
            _back_into_the_queue(run, error, say)
        raise
    _after(settings, folder, code, summary, say)
    return code


def _after(
    settings: Settings, folder: RunFolder, code: ExitCode, summary: dict[str, object], say: Callable[[str], None]
) -> None:
    """The user's own command at the end of a run."""
    if settings.on_finish is not None:
        problem = on_finish(settings.on_finish, code, folder.path, summary)
        if problem:
            say(f"warning: {problem}")


def _back_into_the_queue(run: Run, error: InterruptedRun, say: Callable[[str], None]) -> None:
    """A Slurm job that was cut short continues by itself, as long as it gets on. Slurm ends this process then."""
    if run.num_rows == 0 and slurm.restart_count(os.environ):
        # Sites that requeue by exit code would do so for ever.
        hint = "give the job more time, or see the log for what keeps it from finishing a row"
        raise LongbatchError(f"{error.message}, and no row was finished since the last start", hint=hint) from error
    if run.comes_back:
        # Few sites requeue by exit code.
        say(slurm.requeue(os.environ, num_finished=run.num_rows, most=MOST_REQUEUES) or "requeued")


class Run:
    """One process's part in a run: all of it, or one shard.

    num_rows: results of this process. comes_back: whether it was cut short by something that wants it to go on later.
    """

    def __init__(self, job: Job, folder: RunFolder, shard: Shard | None, say: Callable[[str], None]) -> None:
        self._job = job
        self._folder = folder
        self._shard = shard
        self._say = say
        self.name = shard.name if shard else "run"
        self.num_rows = 0
        self.comes_back = False
        self._prefix = f"{shard.name}-" if shard else ""
        self._stop = StopRequest()
        self._current: tuple[Supervisor | None, Remaining | None] = (None, None)
        self._owner: Owner | None = None
        self._owned_at = time.monotonic()
        self._ticked_at = 0.0
        self._status = StatusFile(folder.work, self.name)
        self._known_stop = last_stop(folder.work)
        self._deadline = Deadline.find(job.settings.max_time, job.settings.grace, os.environ)
        self._started = time.time()
        self._why = ""

    def go(self, engine: str, stop: StopRequest, owner: Owner) -> tuple[ExitCode, dict[str, object]]:
        """Everything from what a dead process left to the merged results: exit code and summary."""
        self._stop, self._owner = stop, owner
        self._write_status("planning")
        try:
            return self._go(engine)
        except InterruptedRun:
            raise
        except LongbatchError as error:
            self._write_status("failed", *self._current, code=error.exit_code)
            raise

    def _go(self, engine: str) -> tuple[ExitCode, dict[str, object]]:
        self._recover()
        index = get_index(self._job, self._folder, self._tick)
        book = StrikeBook(self._folder.work, self.name)
        self._strike_leftovers(book)
        failures = Failures(self._job.settings.abort_on_failures)
        left, supervisor, work = self._work_through(index, book, failures, engine)
        try:
            return self._finish(index, left, work, supervisor)
        except InterruptedRun as error:
            # Every row had a result until the merge read the parts, so one is damaged and was set aside.
            self._say(f"{error.message}; they run again")
            _log.warning("%s", error.message)
        left, supervisor, repeated = self._work_through(index, book, failures, engine)
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
        if supervisor.dispatcher.num_left:
            if not self._why:
                # No wave that is left fits before the end, or a signal came before the first one.
                self._why = f"stopped before {self._deadline.describe()}"
                if self._stop.requested:
                    self._why = "stopped by a signal"
                self.comes_back = self._stop.requested or self._deadline.is_slurm
            self._write_status("interrupted", supervisor, left)
            num_left = supervisor.dispatcher.num_left
            raise InterruptedRun(
                f"{self._why or 'stopped'}; what is finished is saved, {num_left:,} rows are left",
                hint="run the same command again to continue",
            )
        return left, supervisor, work

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

    def _strike_leftovers(self, book: StrikeBook) -> None:
        """Note the rows that were under way when an earlier process was killed together with its workers."""
        for folder in find_begun(self._folder.work, self._prefix):
            book.add(Strike(begun.key, begun.attempt, INTERRUPTED) for begun in read_begun(folder))
            clear_begun(folder)

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

    def _supervise(self, supervisor: Supervisor, left: Remaining) -> None:
        settings, totals = self._job.settings, left.plan.totals
        self._current = supervisor, left
        num_done, num_failed = left.num_finished + len(left.failed), left.num_failed + len(left.failed)
        progress = Progress(len(left.share), totals.prompt_tokens, settings.progress, quiet=settings.quiet)
        progress.start(num_done, num_failed)

        def watch(running: Supervisor) -> bool:
            tally = running.tally
            read = min(tally.prefill_tokens, totals.prompt_tokens)
            progress.update(num_done + tally.rows, num_failed + tally.failed, read, tally.decode_tokens)
            self._write_status("stopping" if running.stopping else "running", running, left)
            return self._must_stop(running)

        try:
            supervisor.run(watch, self._deadline.allows)
        finally:
            progress.finish()

    def _must_stop(self, supervisor: Supervisor) -> bool:
        """Whether to stop and save now; `_why` then says why."""
        hours = supervisor.device_seconds / 3600
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
            tally, now = supervisor.tally, time.monotonic()
            snapshot = Snapshot(
                state,
                self._started,
                rows_total=len(left.share),
                rows_done=left.num_finished + len(left.failed) + tally.rows,
                rows_failed=left.num_failed + len(left.failed) + tally.failed,
                tokens_total=left.plan.totals.prompt_tokens,
                tokens_done=tally.prefill_tokens,
                generated=tally.decode_tokens,
                errors=dict(supervisor.failures.counts),
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
                gpu_seconds=supervisor.device_seconds,
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
        code = ExitCode.MANIFEST if nothing_ran else exit_code(settings, summary)
        self._write_status("finished", supervisor, left, code)
        content = summary_json(folder, summary, work)
        if settings.json:
            print_json(content)
        elif not settings.quiet:
            self._say("\n".join(summary_lines(folder, summary, work)))
        return code, content


@contextmanager
def _log_to(folder: RunFolder) -> Iterator[None]:
    """One log file per process; it holds counts and tracebacks, no prompt and no answer."""
    handler = logging.FileHandler(
        folder.logs / f"run-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.log", encoding="utf-8"
    )
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        handler.close()
