"""`longbatch bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longbatch.errors import ExitCode


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="which benchmark; a wrong name lists those there are")],
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="also write the measurements here")
    ] = None,
) -> ExitCode:
    """Measure speed against a rival or a limit. Both in the same run, with the results checked."""
    from longbatch.bench import find
    from longbatch.bench.report import print_table, write_json

    measurements = find(name)()
    print_table(measurements)
    if json is not None:
        write_json(name, measurements, json)
    return ExitCode.OK if all(row.checked for row in measurements) else ExitCode.FIDELITY
