"""A run from its settings to its exit code: the job, the folder, its owner, and what follows after the end."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

from longbatch.config import Settings
from longbatch.errors import ExitCode, InterruptedRun, LongbatchError, RunningError, UsageError
from longbatch.output import RunFolder
from longbatch.privacy import LogFormatter
from longbatch.run import slurm
from longbatch.run.hooks import on_finish
from longbatch.run.job import Job, open_folder, say_on_stderr
from longbatch.run.owner import Owner
from longbatch.run.part import Run
from longbatch.run.shard import Shard
from longbatch.run.stopping import StopRequest
from longbatch.run.stored import save_command
from longbatch.run.supervisor import ENGINE
from longbatch.run.verification import VERIFIER

# A job that is requeued this often without an end has another problem than time.
MOST_REQUEUES = 100
_log = logging.getLogger("longbatch")


def execute(settings: Settings, sources: list[str], *, engine: str = ENGINE, verifier: str = VERIFIER) -> ExitCode:
    """Run everything that is left of a job. engine, verifier: `module:function` that makes the engine of a worker that
    answers rows, or measures them.

    Raises LongbatchError; InterruptedRun when it was told to stop or its time was over, FidelityError when all is done
    and a measured gap is larger than allowed, or none could be measured.
    """
    if settings.out is None:
        raise UsageError("a run needs a folder for its results", hint="give one with -o OUT")
    say: Callable[[str], None] = (lambda text: None) if settings.quiet else say_on_stderr
    shard = Shard.parse(settings.shard, os.environ)
    job, folder = open_folder(Job.open(settings, sources, say))
    if job.attention.name is not None and not job.attention.is_sparse:
        say(f"attention: every row runs dense ({job.attention.why})")
    run = Run(job, folder, shard, say)
    try:
        with Owner.acquire(folder.work, run.name) as owner, _log_to(folder), StopRequest() as stop:
            save_command(folder.work, settings, sources)
            code, summary = run.go(engine, verifier, stop, owner)
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
    if run.gap_error is not None:
        raise run.gap_error
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
