"""`longbatch export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longbatch.cli.options import RunFolderPath
from longbatch.errors import ExitCode


def export(
    out: RunFolderPath,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="file to write; - is standard output")] = Path("-"),
    format: Annotated[
        str, typer.Option("--format", metavar="openai-jsonl|jsonl|csv", help="format to write")
    ] = "openai-jsonl",
) -> ExitCode:
    """Write merged results in another format."""
    from longbatch.output import RunFolder
    from longbatch.output.export import export as export_results

    export_results(RunFolder.open(out), format, None if file == Path("-") else file)
    return ExitCode.OK
