"""All commands together, and `main`, which turns every outcome into an exit code and a line on stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from longbatch import __version__
from longbatch.cli import (
    bench,
    config,
    convert,
    doctor,
    export,
    merge,
    models,
    plan,
    profile,
    retry,
    run,
    slurm,
    status,
    stop,
    validate,
    verify,
)
from longbatch.errors import ExitCode, LongbatchError
from longbatch.folders import cache_folder
from longbatch.privacy import error_text, traceback_text

# The base of everything that typer raises about a command line; public only through this subclass.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="longbatch",
    help="Offline batch inference on very long inputs: a table of prompts in, a Parquet file of answers out.",
    epilog="Exit codes: 0 all rows ok, 1 internal error, 2 usage, 3 finished with failed rows, 4 nothing can run, "
    "5 no usable device, 6 disk, 7 sparse attention too far from dense, 8 too many failed rows, 75 interrupted or "
    "incomplete and saved, 130 second Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run.run)
app.command()(plan.plan)
app.command()(validate.validate)
app.command()(profile.profile)
app.command()(status.status)
app.command()(stop.stop)
app.command()(retry.retry)
app.command()(slurm.slurm)
app.command()(merge.merge)
app.command()(verify.verify)
app.command()(export.export)
app.add_typer(models.app, name="models")
app.command()(convert.convert)
app.command()(doctor.doctor)
app.command()(config.config)
app.command()(bench.bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"longbatch {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", help="print the version and exit", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Offline batch inference on very long inputs: a table of prompts in, a Parquet file of answers out."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. Prints errors as `error:` and `hint:` lines on stderr."""
    try:
        outcome = app(args=arguments, standalone_mode=False, prog_name="longbatch")
        sys.stdout.flush()
        return int(outcome or ExitCode.OK)
    except LongbatchError as error:
        _print_error(error.message, error.hint)
        return error.exit_code
    except _CommandLineError as error:
        return _print_usage_error(error)
    except (KeyboardInterrupt, typer.Abort):
        _print_error("interrupted")
        return ExitCode.KILLED
    except (BrokenPipeError, SystemExit) as error:
        # Whoever read standard output has seen enough; typer turns that into an exit of its own.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        # Without this the interpreter complains when it closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.OK
    except Exception as error:
        place = _save_traceback(error)
        _print_error(f"internal error: {error_text(error)}", f"the traceback is in {place}" if place else None)
        return ExitCode.INTERNAL


def _print_error(message: str, hint: str | None = None) -> None:
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)


def _print_usage_error(error: Exception) -> int:
    message = getattr(error, "format_message", lambda: str(error))()
    if "\n" in message:  # a command that was called bare: its help
        print(message, file=sys.stderr)
    else:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "longbatch"
        _print_error(message[:1].lower() + message[1:].rstrip("."), f"see {command} --help")
    return ExitCode.USAGE


def _save_traceback(error: Exception) -> Path | None:
    folder = cache_folder() / "logs"
    path = folder / f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback_text(error), encoding="utf-8")
    except OSError:
        return None
    return path
