"""Flags made from `Settings`: name, help and values stand there once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from longbatch.config import Settings, choices, flag_name, help_text, is_switch, resolve
from longbatch.errors import UsageError

Outcome = TypeVar("Outcome")

_DEFAULTS = {item.name: item.default for item in dataclasses.fields(Settings)}
ALL_SETTINGS = tuple(_DEFAULTS)

_SHORT = {"out": "-o", "quiet": "-q"}
_METAVARS = {
    "model": "FOLDER|ID",
    "adapter": "FOLDER",
    "out": "FOLDER",
    "gpus": "N|all",
    "prompt": "TEMPLATE",
    "keep_columns": "NAME,...",
    "media_root": "FOLDER",
    "only": "ID",
    "allow_failures": "N|P%",
    "system": "TEXT",
    "max_wave_seconds": "SECONDS",
    "max_row_bytes": "BYTES",
    "abort_on_failures": "N|P%|off",
    "shard": "I/N|auto",
    "grace": "SECONDS",
    "max_time": "DURATION",
    "max_gpu_hours": "HOURS",
    "row_timeout": "SECONDS",
    "price_per_gpu_hour": "PRICE",
    "on_finish": "COMMAND",
    "spill": "FOLDER",
    "attention": "auto|dense|PATTERN",
    "profile": "FILE",
    "max_gap": "NATS",
}
# Of a length in tokens; Python refuses to convert thousands of them.
_LENGTH_DIGITS = 15
Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE",
        help="manifests (.jsonl, .parquet; also .gz and .zst), text files, folders or quoted patterns of them",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="settings file, in place of ./longbatch.toml"),
]
RunFolderPath = Annotated[Path, typer.Argument(metavar="OUT", help="run folder")]


def settings_flags(*names: str) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
    """Give a command one flag for each named setting, and `--config`; it receives the resolved `settings`, or, if it
    has a parameter of that name, `resolved`, which tells where each came from too.

    Every flag is optional: what is not given comes from the environment, the files or the default.
    """

    def decorate(command: Callable[..., Outcome]) -> Callable[..., Outcome]:
        @functools.wraps(command)
        def resolved(config: Path | None, **values: Any) -> Outcome:
            flags = {name: values.pop(name) for name in names}
            found = resolve(flags, config_file=config)
            known = {"resolved": found} if wants_origins else {"settings": found.settings}
            return command(**known, **values)

        own = list(inspect.signature(command, eval_str=True).parameters.values())
        wants_origins = any(parameter.name == "resolved" for parameter in own)
        parameters = [parameter for parameter in own if parameter.name not in ("settings", "resolved")]
        parameters += [_parameter(name) for name in names]
        parameters.append(_keyword("config", Config))
        resolved.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        resolved.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return resolved

    return decorate


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths in tokens such as `32K,100000,1M`. Raises UsageError."""
    lengths = []
    for part in text.split(","):
        number, factor = part.strip().upper(), 1
        if number.endswith(("K", "M")):
            number, factor = number[:-1], 1024 if number.endswith("K") else 1024 * 1024
        if len(number) > _LENGTH_DIGITS or not number.isdecimal() or not int(number):
            raise UsageError(f"--lengths: {part.strip()[:40]!r} is no length", hint="such as 32K,128K")
        lengths.append(int(number) * factor)
    return tuple(lengths)


def refuse_without_effect(context: typer.Context, what: str, allowed: Collection[str]) -> None:
    """Raise UsageError for what was given on the command line beside the parameters allowed. what: the way of calling
    the command that reads no others."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in allowed:
            shown = max(parameter.opts, key=len) if parameter.param_type_name == "option" else name.upper()
            raise UsageError(f"{what} takes no {shown}", hint=f"see {context.command_path} --help")


def print_json(value: Any) -> None:
    """Print a value as JSON on standard output."""
    import orjson

    print(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def _parameter(name: str) -> inspect.Parameter:
    flag, short = flag_name(name), [_SHORT[name]] if name in _SHORT else []
    if is_switch(name):
        switch = typer.Option(f"{flag}/--no-{flag[2:]}", *short, help=_help(name))
        return _keyword(name, Annotated[bool | None, switch])
    metavar = "|".join(choices(name)) or _METAVARS.get(name, "N")
    # Values arrive as text: settings.py converts and checks them, whatever layer they come from.
    return _keyword(name, Annotated[str | None, typer.Option(flag, *short, metavar=metavar, help=_help(name))])


def _help(name: str) -> str:
    default = _DEFAULTS[name]
    shown = default is not None and default is not False and default != ()
    return f"{help_text(name)} [{default}]" if shown else help_text(name)


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
