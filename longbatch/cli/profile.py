"""`longbatch profile`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from longbatch.cli.options import parse_lengths, refuse_without_effect, settings_flags
from longbatch.config import Settings
from longbatch.errors import ExitCode

_READ = (
    "gpus",
    "dtype",
    "weights",
    "threads",
    "prompt",
    "system",
    "prompt_format",
    "media_root",
    "max_row_bytes",
    "limit",
    "quiet",
)


@settings_flags(*_READ)
def profile(
    settings: Settings,
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="FOLDER|ID", help="model folder or hub id; the small default model if none")
    ] = None,
    calibration: Annotated[
        list[str] | None,
        typer.Option("--calibration", metavar="SOURCE", help="manifest or texts to calibrate on; may be repeated"),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="the profile to write")] = None,
    tolerance: Annotated[
        float,
        typer.Option("--tolerance", metavar="X", help="largest relative L2 error of a head"),
    ] = 0.05,
    measure: Annotated[
        str,
        typer.Option(
            "--measure",
            metavar="output|stream|model",
            help="what the tolerance limits: the error of a head's output, or what it does to the hidden states; model "
            "trades the latter against time over all heads",
        ),
    ] = "output",
    price: Annotated[
        str,
        typer.Option(
            "--price",
            metavar="time|density",
            help="what a selection costs: predicted seconds, or the share of the causal area that it computes",
        ),
    ] = "time",
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            metavar="N,...",
            help="tokens that the documents are cut to, such as 16K,100000; their own if not given",
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE", help="PNG of patterns and density; beside -o if not given"),
    ] = None,
    show: Annotated[Path | None, typer.Option("--show", metavar="FILE", help="print a profile that is there")] = None,
    import_minference: Annotated[
        Path | None, typer.Option("--import-minference", metavar="FILE", help="turn a MInference pattern file into -o")
    ] = None,
) -> ExitCode:
    """Choose a sparse attention pattern for every head of a model. The same command again continues."""
    from longbatch.run.profile import Goal, import_profile, make_profile, show_profile

    if show is not None:
        refuse_without_effect(context, "profile --show", ("show", "picture"))
        show_profile(show, picture)
    elif import_minference is not None:
        allowed = ("import_minference", "out", "picture", "quiet", "config")
        refuse_without_effect(context, "profile --import-minference", allowed)
        import_profile(import_minference, out, picture, quiet=settings.quiet)
    else:
        make_profile(
            replace(settings, model=model),
            calibration or [],
            out,
            Goal(tolerance, measure, price),
            lengths=() if lengths is None else parse_lengths(lengths),
            picture=picture,
        )
    return ExitCode.OK
