"""`longbatch bench`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from longbatch.cli.options import parse_lengths
from longbatch.errors import ExitCode, UsageError


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="which benchmark; a wrong name lists those there are")],
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="fidelity: model folder or id; the small default model if left out"),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="also write the measurements here, as they come")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,...", help="attention, fidelity, prefill: prompt lengths in tokens; K and M multiply by 1,024"
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="attention, decode, fidelity, prefill: fewer and shorter cases")
    ] = False,
    cases: Annotated[
        str | None,
        typer.Option(metavar="ROWSxTOKENS:KV,...", help="decode: rows, their context, and the format of their K/V"),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="decode: write the timeline here, for Chrome's viewer")
    ] = None,
    rivals: Annotated[
        Path | None, typer.Option(metavar="DIR", help="attention: folder with copies of MInference and FlexPrefill")
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="fidelity: profile to measure; the first of several is held to the limits"),
    ] = None,
    documents: Annotated[
        Path | None,
        typer.Option(metavar="MANIFEST", help="fidelity: long texts; those of Python's standard library if left out"),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="fidelity: draw density against gap here")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="auto|bfloat16|float16|float32", help="fidelity: as of run")
    ] = None,
) -> ExitCode:
    """Measure speed and fidelity against a rival or a limit. Both in the same run, with the results checked."""
    from longbatch.bench import find
    from longbatch.bench.report import recorded

    given = {
        "model": model,
        "lengths": None if lengths is None else parse_lengths(lengths),
        "quick": quick or None,
        "cases": cases,
        "trace": trace,
        "rivals": rivals,
        "profile": profile or None,
        "documents": documents,
        "picture": picture,
        "dtype": dtype,
    }
    measure = find(name)
    measurements = recorded(name, measure(**_accepted(name, measure, given)), json)
    return ExitCode.OK if all(row.checked for row in measurements) else ExitCode.FIDELITY


def _accepted(name: str, measure: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """What was given, if the benchmark reads all of it. Raises UsageError."""
    options = {
        parameter.name
        for parameter in inspect.signature(measure).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    found = {option: value for option, value in given.items() if value is not None}
    for option in found:
        if option not in options:
            shown = "MODEL" if option == "model" else f"--{option}"
            raise UsageError(f"bench {name} takes no {shown}", hint="see longbatch bench --help")
    return found
