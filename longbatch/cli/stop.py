"""`longbatch stop`."""

from __future__ import annotations

from typing import Annotated

import typer

from longbatch.cli.options import RunFolderPath
from longbatch.errors import ExitCode


def stop(
    out: RunFolderPath,
    wait: Annotated[bool, typer.Option("--wait", help="return when all that ran have saved and ended")] = False,
) -> ExitCode:
    """Ask a run to save and end. Works from any machine that sees the folder; `run` again continues it."""
    from longbatch.run.requests import stop_run

    return stop_run(out, lambda line: print(line, flush=True), wait=wait)
