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
        typer.Argument(
            metavar="MODEL",
            help="fidelity, soak: model folder or id; if left out, the small default model, or a tiny one",
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="also write the measurements here, as they come")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="attention, fidelity, prefill, weights: prompt lengths in tokens; K and M multiply by 1,024",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="attention, decode, fidelity, memory, prefill, weights: fewer and shorter cases"),
    ] = False,
    cases: Annotated[
        str | None,
        typer.Option(metavar="ROWSxTOKENS:KV,...", help="decode: rows, their context, and the format of their K/V"),
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
    shape: Annotated[
        str | None, typer.Option(metavar="NAME", help="weights: of which model; a wrong name lists those there are")
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(metavar="N", min=4, help="weights: first layers of the model; all that fit if left out"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="decode, weights: put a timeline here, in the format of Chrome's tracing"),
    ] = None,
    rows: Annotated[int | None, typer.Option(metavar="N", min=700, help="soak: rows; 10,000 if left out")] = None,
) -> ExitCode:
    """Measure speed, memory and fidelity against a rival or a limit, in the same run, with the results checked."""
    from longbatch.bench import find
    from longbatch.bench.report import recorded

    given = {
        "model": model,
        "lengths": None if lengths is None else parse_lengths(lengths),
        "quick": quick or None,
        "cases": cases,
        "rivals": rivals,
        "profile": profile or None,
        "documents": documents,
        "picture": picture,
        "dtype": dtype,
        "shape": shape,
        "layers": layers,
        "trace": trace,
        "rows": rows,
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
