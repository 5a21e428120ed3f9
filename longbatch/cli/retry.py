"""`longbatch retry`."""

from __future__ import annotations

from typing import Annotated

import typer

from longbatch.cli.options import ALL_SETTINGS, RunFolderPath, settings_flags
from longbatch.config import Resolved
from longbatch.errors import ExitCode

# The folder is the argument; the others choose rows in ways of their own.
_NOT_RETRIED = {"out", "only", "shard"}


@settings_flags(*[name for name in ALL_SETTINGS if name not in _NOT_RETRIED])
def retry(
    out: RunFolderPath,
    resolved: Resolved,
    sources: Annotated[
        list[str] | None, typer.Argument(metavar="SOURCE", help="manifests; those of the last start if not given")
    ] = None,
    type: Annotated[
        list[str] | None, typer.Option("--type", metavar="TYPE", help="only rows with this error; may be repeated")
    ] = None,
) -> ExitCode:
    """Run failed rows again. Settings are those of the last start, but for the flags given here."""
    from longbatch.run.job import say_on_stderr
    from longbatch.run.requests import retry as retry_rows

    return retry_rows(out, type or [], sources or [], resolved, say_on_stderr)
