"""`longbatch status`."""

from __future__ import annotations

from typing import Annotated

import typer

from longbatch.cli.options import RunFolderPath, print_json
from longbatch.errors import ExitCode


def status(
    out: RunFolderPath,
    watch: Annotated[bool, typer.Option("--watch", help="show it again and again until the run ends")] = False,
    json: Annotated[bool, typer.Option("--json", help="print it as JSON, once")] = False,
) -> ExitCode:
    """Say how far a run is. Rows, rates and signs of life, from any machine that sees the folder."""
    from longbatch.run.status import read_status
    from longbatch.run.status_view import print_status
    from longbatch.run.status_view import watch as watch_status

    if json:
        print_json(read_status(out).as_dict())
    elif watch:
        watch_status(out)
    else:
        print_status(read_status(out))
    return ExitCode.OK
