"""Where longbatch keeps what outlives a run: converted models, measured rates, the user's settings."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where converted models and measured rates are kept: LONGBATCH_CACHE_DIR, else under XDG_CACHE_HOME, else
    `~/.cache/longbatch`. The folder need not exist."""
    environ = os.environ if environ is None else environ
    if environ.get("LONGBATCH_CACHE_DIR"):
        return Path(environ["LONGBATCH_CACHE_DIR"])
    return _user_folder(environ, "XDG_CACHE_HOME", ".cache")


def user_file(environ: Mapping[str, str] | None = None) -> Path:
    """The user's settings file; it need not exist."""
    environ = os.environ if environ is None else environ
    return _user_folder(environ, "XDG_CONFIG_HOME", ".config") / "config.toml"


def write_table(path: Path, table: Mapping[str, object]) -> None:
    """Replace a file of remembered measurements, JSON values by key. A home that cannot be written only costs the
    measurement next time."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(table, indent=1), encoding="utf-8")
        os.replace(temporary, path)


def _user_folder(environ: Mapping[str, str], variable: str, fallback: str) -> Path:
    if environ.get(variable):
        return Path(environ[variable]) / "longbatch"
    # Under cron HOME may be missing; expanduser then asks the password database, and may find nothing.
    home = environ.get("HOME") or os.path.expanduser("~")
    return Path(home) / fallback / "longbatch"
