"""`longbatch stop` and `longbatch retry`: what a person asks of a run folder from outside."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from longbatch.config import Resolved
from longbatch.errors import ROW_ERROR_TYPES, ExitCode, RunningError, UsageError
from longbatch.output import Done, RowState, RunFolder, scan
from longbatch.output.keys import key_part
from longbatch.report.units import seconds_text
from longbatch.run.control import mark_for_retry, request_stop
from longbatch.run.status import Supervisor, read_supervisors
from longbatch.run.stored import read_command

POLL_SECONDS = 1.0


def stop_run(out: Path, say: Callable[[str], None], *, wait: bool = False) -> ExitCode:
    """Ask whoever works on a run folder, on whatever machine, to save and end; wait until all of them have ended.

    Raises UsageError, DiskError.
    """
    work = RunFolder.open(out).work
    asked = {(found.name, found.host, found.pid): found for found in read_supervisors(work) if found.alive}
    if not asked:
        say(f"nothing is running in {out}")
        return ExitCode.OK
    request_stop(work)
    for supervisor in asked.values():
        say(f"{_who(supervisor)} was asked to stop")
    while wait and asked:
        time.sleep(POLL_SECONDS)
        now = {(found.name, found.host, found.pid): found for found in read_supervisors(work)}
        for name, before in list(asked.items()):
            found = now.get(name)
            if found is None or not found.alive:
                say(f"{_who(before)} has ended" + (f": {found.state}" if found is not None else ""))
                del asked[name]
            elif found.state != before.state:
                say(f"{_who(found)} is {found.state}, as of {seconds_text(max(0.0, time.time() - found.updated))} ago")
                asked[name] = found
    return ExitCode.OK


def retry(out: Path, types: list[str], sources: list[str], resolved: Resolved, say: Callable[[str], None]) -> ExitCode:
    """Mark failed rows, all or those of some error types, to run again, and continue the run.

    sources and settings: those of the last start where they are not given. Raises UsageError, and what a run raises.
    """
    from longbatch.run.execute import execute

    _check_types(types)
    folder = RunFolder.open(out)
    for supervisor in read_supervisors(folder.work):
        if supervisor.alive:
            raise RunningError(
                f"{_who(supervisor)} works on {out}",
                hint=f"wait for it, or end it with `longbatch stop {out} --wait`; then retry",
            )
    command = read_command(folder.work)
    from_flags = [name for name, origin in resolved.origins.items() if origin.startswith("flag ")]
    settings = command.settings(resolved.settings, from_flags)
    if not sources and command.sources is None:
        raise UsageError(
            f"{out} does not say where its rows came from", hint=f"name the sources again: longbatch retry {out} SOURCE"
        )
    counts = mark_failed(folder, types)
    if not counts:
        say("no row failed" + (f" with {' or '.join(types)}" if types else "") + "; nothing to retry")
        return ExitCode.OK
    say("running again: " + ", ".join(f"{count:,} {kind}" for kind, count in counts.items()))
    return execute(replace(settings, out=out), sources or command.sources or [])


def mark_failed(folder: RunFolder, types: Iterable[str] = ()) -> dict[str, int]:
    """Mark the failed rows of these error types (none: all types) to run again; their number by type.

    Raises DiskError.
    """
    done = scan(folder)
    wanted = set(types)
    codes = [code for code, name in enumerate(done.error_types) if not wanted or name in wanted]
    chosen = np.flatnonzero(_is_failed(done) & np.isin(done.errors, codes))
    mark_for_retry(folder.work, key_part(done.answers)[chosen].tolist(), done.attempts[chosen].tolist())
    found, numbers = np.unique(done.errors[chosen], return_counts=True)
    return {done.error_types[code]: number for code, number in zip(found.tolist(), numbers.tolist(), strict=True)}


def _is_failed(done: Done) -> np.ndarray:
    failed: np.ndarray = np.isin(done.states, (RowState.FAILED, RowState.RETRYABLE))
    return failed


def _check_types(types: Iterable[str]) -> None:
    for kind in types:
        if kind not in ROW_ERROR_TYPES:
            near = difflib.get_close_matches(kind, ROW_ERROR_TYPES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(ROW_ERROR_TYPES)}"
            raise UsageError(f"there is no error type {kind!r}", hint=hint)


def _who(supervisor: Supervisor) -> str:
    return f"{supervisor.name} (process {supervisor.pid} on {supervisor.host})"
