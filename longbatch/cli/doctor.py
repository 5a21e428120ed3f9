"""`longbatch doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from longbatch.cli.options import print_json, settings_flags
from longbatch.config import Settings
from longbatch.errors import ExitCode


@settings_flags("gpus", "dtype", "json")
def doctor(
    settings: Settings,
    measure: Annotated[bool, typer.Option("--measure", help="measure the devices' rates anew")] = False,
) -> ExitCode:
    """Say what this machine has. Versions, devices and their rates, optional parts, disk and limits."""
    from longbatch.doctor import examine

    findings = examine(settings, measure_anew=measure)
    if settings.json:
        print_json(findings.as_dict())
    else:
        print("\n".join(findings.lines()))
    return findings.exit_code
