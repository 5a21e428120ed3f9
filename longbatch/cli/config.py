"""`longbatch config`."""

from __future__ import annotations

from typing import Annotated

import typer

from longbatch.cli.options import Config, print_json
from longbatch.config import help_text, resolve
from longbatch.errors import ExitCode
from longbatch.folders import user_file


def config(
    show: Annotated[bool, typer.Option("--show", help="print every setting with its value and its origin")] = False,
    config: Config = None,
    json: Annotated[bool, typer.Option("--json", help="print them as JSON")] = False,
) -> ExitCode:
    """Explain the settings. With --show, print the value of each and where it comes from."""
    resolved = resolve({}, config_file=config)
    values = resolved.settings.as_dict()
    if json:
        print_json({name: {"value": value, "origin": resolved.origins[name]} for name, value in values.items()})
        return ExitCode.OK
    width = max(len(name) for name in values)
    for name, value in values.items():
        about = f"{_text(value)}  ({resolved.origins[name]})" if show else help_text(name)
        print(f"{name:{width}}  {about}")
    if not show:
        print(f"\nSet by a flag, LONGBATCH_NAME, ./longbatch.toml or [tool.longbatch], or {user_file()}")
    return ExitCode.OK


def _text(value: object) -> str:
    return "unset" if value is None else str(value)
