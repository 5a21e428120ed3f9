"""The command line: typer only, one file per command, no logic. Heavy imports happen inside the commands."""

from longbatch.cli.app import main

__all__ = ["main"]
