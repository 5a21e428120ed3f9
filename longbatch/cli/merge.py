"""`longbatch merge`."""

from __future__ import annotations

from typing import Annotated

import typer

from longbatch.cli.options import RunFolderPath
from longbatch.errors import ExitCode


def merge(
    out: RunFolderPath,
    partial: Annotated[bool, typer.Option("--partial", help="merge what is there even if rows are missing")] = False,
) -> ExitCode:
    """Write OUT/results from what is finished. One row per input row, in manifest order."""
    from longbatch.run import merge_folder

    return merge_folder(out, partial=partial)
