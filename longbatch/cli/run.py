"""`longbatch run`."""

from __future__ import annotations

from typing import Annotated

import typer

from longbatch.cli.options import ALL_SETTINGS, Sources, settings_flags
from longbatch.config import Settings
from longbatch.errors import ExitCode


@settings_flags(*ALL_SETTINGS)
def run(
    sources: Sources,
    settings: Settings,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the plan and run nothing")] = False,
) -> ExitCode:
    """Answer every row of a manifest. The same command again continues where it stopped."""
    if dry_run:
        from longbatch.cli.plan import show_plan

        return show_plan(sources, settings)
    from longbatch.run.execute import execute

    return execute(settings, sources)
