"""Where longbatch keeps what outlives a run: converted models, measured rates, the user's settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
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


def _user_folder(environ: Mapping[str, str], variable: str, fallback: str) -> Path:
    if environ.get(variable):
        return Path(environ[variable]) / "longbatch"
    # Under cron HOME may be missing; expanduser then asks the password database, and may find nothing.
    home = environ.get("HOME") or os.path.expanduser("~")
    return Path(home) / fallback / "longbatch"
