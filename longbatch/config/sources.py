"""Where the values of settings come from.

A value is taken from the first of: a flag, an environment variable `LONGBATCH_NAME`, the project's file
(`longbatch.toml` in the working folder, else the table `[tool.longbatch]` of its `pyproject.toml`, or the file named by
`--config`), the user's file (`~/.config/longbatch/config.toml`), the default. A key that is not a setting is an error,
in all of them.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longbatch.config.settings import NAMES, Settings, convert, flag_name
from longbatch.errors import UsageError
from longbatch.folders import user_file

PREFIX = "LONGBATCH_"
# Environment variables with our prefix that are no settings: each is read where its comment says.
OTHER_VARIABLES = frozenset(
    {
        "LONGBATCH_CACHE_DIR",  # folders.cache_folder()
        "LONGBATCH_CONFIG",  # resolve(): the same as --config
        "LONGBATCH_EXIT_CODE",  # told to the --on-finish command, which may call longbatch
        "LONGBATCH_SUMMARY",  # likewise
    }
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings and, by name, where each value came from: `flag --NAME`, a variable, a file, or `default`."""

    settings: Settings
    origins: dict[str, str]


def resolve(
    flags: Mapping[str, Any],
    *,
    config_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Resolved:
    """Settings from flags (None and () mean not given), environment, files and defaults, in this order.

    `config_file` takes the place of the project's file. Raises UsageError for an unknown key, a value of the
    wrong type or outside its range, naming where it stands.
    """
    environ = os.environ if environ is None else environ
    folder = Path.cwd() if folder is None else folder
    if config_file is None and environ.get(PREFIX + "CONFIG"):
        config_file = Path(environ[PREFIX + "CONFIG"])
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    layers = [
        _from_flags(flags),
        _from_environment(environ),
        _from_project(config_file, folder),
        _from_user(environ),
    ]
    for layer in layers:
        for name, (value, origin) in layer.items():
            if name not in values:
                values[name] = convert(name, value, origin)
                origins[name] = origin
    for name in NAMES:
        origins.setdefault(name, "default")
    return Resolved(Settings(**values), origins)


def _from_flags(flags: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    given = {name: value for name, value in flags.items() if value is not None and value != ()}
    for name in given:
        _known(name, "flags")
    return {name: (value, f"flag {flag_name(name)}") for name, value in given.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or value == "":
            continue
        name = variable[len(PREFIX) :].lower()
        _known(name, f"environment variable {variable}", style=lambda known: PREFIX + known.upper())
        found[name] = (value, f"environment {variable}")
    return found


def _from_project(config_file: Path | None, folder: Path) -> dict[str, tuple[Any, str]]:
    if config_file is not None:
        if not config_file.is_file():
            raise UsageError(f"settings file {config_file} does not exist")
        return _from_table(_read_toml(config_file), str(config_file))
    own = folder / "longbatch.toml"
    if own.is_file():
        return _from_table(_read_toml(own), "longbatch.toml")
    shared = folder / "pyproject.toml"
    if shared.is_file():
        table = _read_toml(shared).get("tool", {}).get("longbatch", {})
        return _from_table(table, "pyproject.toml [tool.longbatch]")
    return {}


def _from_user(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    path = user_file(environ)
    return _from_table(_read_toml(path), str(path)) if path.is_file() else {}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _from_table(table: Mapping[str, Any], origin: str) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        _known(name, origin)
        found[name] = (value, origin)
    return found


def _known(name: str, place: str, style: Any = str) -> None:
    if name in NAMES:
        return
    near = difflib.get_close_matches(name, list(NAMES), n=1, cutoff=0.6)
    hint = f"did you mean {style(near[0])}?" if near else "see `longbatch config --show` for the settings there are"
    raise UsageError(f"unknown setting {name!r} in {place}", hint=hint)
