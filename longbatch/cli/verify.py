"""`longbatch verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from longbatch.cli.options import RunFolderPath, print_json
from longbatch.errors import ExitCode


def verify(
    out: RunFolderPath,
    mend: Annotated[
        bool, typer.Option("--mend", help="move damaged parts away, so that the next run answers their rows again")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
) -> ExitCode:
    """Check every part and result of a run folder. Each is read again and compared with its checksums."""
    from longbatch.output import RunFolder
    from longbatch.output.verify import verify as verify_folder

    report = verify_folder(RunFolder.open(out), mend=mend)
    if json:
        print_json(report.as_dict())
    else:
        print("\n".join(report.lines()))
    if report.damage:
        return ExitCode.DISK
    return ExitCode.OK if report.complete else ExitCode.INTERRUPTED
