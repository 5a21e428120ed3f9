"""The status of a run as a person reads it: a table on a terminal, plain text elsewhere, again and again if wished."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from longbatch.report.console import plain_table, standard_output
from longbatch.report.units import money_text, rate_text, seconds_text
from longbatch.run.status import RunStatus, StatusReader, Supervisor

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

WATCH_SECONDS = 2.0
# Off a terminal nobody needs a line so often.
LINE_SECONDS = 30.0


def print_status(status: RunStatus) -> None:
    """Print one status on standard output."""
    standard_output().print(_view(status))


def watch(out: Path) -> None:
    """Show the status until no supervisor is at work: a table that changes on a terminal, else a line now and then.

    Raises UsageError, DiskError.
    """
    reader = StatusReader(out)
    first = reader.read()
    if not sys.stdout.isatty():
        for status in _changes(reader, first, LINE_SECONDS):
            print(status_line(status), flush=True)
        return
    from rich.live import Live

    with Live(_view(first), console=standard_output(), auto_refresh=False) as live:
        for status in _changes(reader, first, WATCH_SECONDS):
            live.update(_view(status), refresh=True)


def status_line(status: RunStatus) -> str:
    """A status as one line."""
    parts = [time.strftime("[%H:%M:%S]", time.localtime(status.time)), status.state, *_row_texts(status)]
    return " ".join([*parts, *_rate_texts(status)])


def _changes(reader: StatusReader, status: RunStatus, seconds: float) -> Iterator[RunStatus]:
    """The status now, every so many seconds, when its state changes, and at the end."""
    yield status
    shown = time.monotonic()
    while any(supervisor.alive for supervisor in status.supervisors):
        time.sleep(WATCH_SECONDS)
        before, status = status.state, reader.read()
        active = any(supervisor.alive for supervisor in status.supervisors)
        if not active:
            status = StatusReader(status.out).read()
        if not active or status.state != before or time.monotonic() - shown >= seconds - WATCH_SECONDS / 2:
            shown = time.monotonic()
            yield status


def _view(status: RunStatus) -> Group:
    from rich.console import Group

    facts = plain_table("", "")
    facts.add_row("run", f"{status.out}, {status.state}")
    facts.add_row("rows", ", ".join(_row_texts(status)))
    for kind, count in sorted(status.errors.items(), key=lambda item: -item[1]):
        facts.add_row("", f"{kind}: {count:,}")
    rates = _rate_texts(status)
    if rates:
        facts.add_row("rates", ", ".join(rates))
    if status.gpu_hours:
        price = "" if status.price is None else f", price {money_text(status.price)}"
        facts.add_row("device time", f"{seconds_text(3600 * status.gpu_hours)}{price}")
    shown = [supervisor for supervisor in status.supervisors if supervisor.alive or supervisor.state == "dead"]
    return Group(facts, "", _processes(status, shown)) if shown else Group(facts)


def _processes(status: RunStatus, supervisors: list[Supervisor]) -> Table:
    """A line for each supervisor at work or dead, and one for each of its workers."""
    table = plain_table("process", "host", ">pid", "device", "state", ">silent for", ">rows", ">ETA")
    for supervisor in supervisors:
        snapshot, silence = supervisor.snapshot, status.silence(supervisor)
        table.add_row(
            supervisor.name,
            supervisor.host,
            str(supervisor.pid),
            "",
            supervisor.state,
            seconds_text(silence),
            f"{snapshot.rows_done:,}/{snapshot.rows_total:,}",
            _eta(supervisor),
        )
        for worker in snapshot.workers if supervisor.at_work else ():
            table.add_row(
                f"  {worker.name}",
                "",
                str(worker.pid),
                worker.device,
                worker.state,
                seconds_text(worker.heartbeat_age + silence),
                f"{worker.rows_in_flight:,} begun",
                "",
            )
    return table


def _eta(supervisor: Supervisor) -> str:
    return "" if supervisor.eta_seconds is None or not supervisor.at_work else seconds_text(supervisor.eta_seconds)


def _row_texts(status: RunStatus) -> list[str]:
    total = "?" if status.rows_total is None else f"{status.rows_total:,}"
    texts = [f"{status.rows_done:,}/{total} done"]
    if status.rows_failed:
        texts.append(f"{status.rows_failed:,} failed")
    return texts


def _rate_texts(status: RunStatus) -> list[str]:
    active = [supervisor for supervisor in status.supervisors if supervisor.at_work]
    if not active:
        return []
    texts = [
        f"{rate_text(sum(item.rows_per_second for item in active))} rows/s",
        f"prefill {rate_text(sum(item.tokens_per_second for item in active))} tok/s",
        f"decode {rate_text(sum(item.generated_per_second for item in active))} tok/s",
    ]
    if status.eta_seconds is not None:
        texts.append(f"ETA {seconds_text(status.eta_seconds)}")
    return texts
