"""The command that a run was last started with, kept so that `retry` can start it again. Texts and whatever may hold a
token are not kept."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from longbatch.config import Settings, flag_name
from longbatch.errors import UsageError
from longbatch.output.files import as_json, disk_errors, replace_file

COMMAND_FILE = "command.json"
# Without these the same run cannot be started again; what they say is for nobody else to read.
_PRIVATE = ("prompt", "system")
# These belong to one start, not to the run.
_PASSING = frozenset(
    {
        "out",
        "only",
        "update",
        "shard",
        "max_time",
        "max_gpu_hours",
        "skip_if_running",
        "on_finish",
        "progress",
        "quiet",
        "json",
    }
)


@dataclass(frozen=True, slots=True)
class StoredCommand:
    """values: settings that were not at their defaults, as JSON values. sources: as given, local ones made absolute;
    None where one of them is a URL that may hold a secret. withheld: names of settings that were set and not kept."""

    values: dict[str, Any]
    sources: list[str] | None
    withheld: list[str]

    def settings(self, given: Settings, from_flags: Iterable[str]) -> Settings:
        """The settings of a new start: flags as given now, then what is kept here, then whatever else was given.

        Raises UsageError if a text that the run needs is not given again.
        """
        flags = set(from_flags)
        missing = [flag_name(name) for name in self.withheld if getattr(given, name) is None]
        if missing:
            raise UsageError(f"the run was started with {' and '.join(missing)}, which is not stored", hint=_AGAIN)
        kept = {name: value for name, value in self.values.items() if name not in flags}
        return Settings.from_dict({**given.as_dict(), **kept})


_AGAIN = "give it again, as it was"


def save_command(work: Path, settings: Settings, sources: list[str]) -> None:
    """Keep the command of a start. One of a single row (`--only`) is not that of the run. Raises DiskError."""
    if settings.only is not None:
        return
    defaults = {item.name: item.default for item in fields(Settings)}
    changed = {name: value for name, value in settings.as_dict().items() if getattr(settings, name) != defaults[name]}
    values = {name: value for name, value in changed.items() if name not in _PASSING and name not in _PRIVATE}
    for name in (
        "model",
        "media_root",
        "spill",
        "profile",
        "adapter",
    ):  # the next command may be given in another folder
        if name in values and (name == "spill" or Path(values[name]).exists()):
            values[name] = str(Path(values[name]).absolute())
    content = {
        "settings": values,
        "sources": None if any(map(_may_be_secret, sources)) else [_absolute(source) for source in sources],
        "withheld": [name for name in _PRIVATE if name in changed],
    }
    with disk_errors("write", work / COMMAND_FILE):
        replace_file(work / COMMAND_FILE, as_json(content))


def read_command(work: Path) -> StoredCommand:
    """What was kept last; nothing at all where the file is missing or damaged, so that all must be given again."""
    try:
        content = json.loads((work / COMMAND_FILE).read_bytes())
        sources = content["sources"]
        return StoredCommand(
            dict(content["settings"]), None if sources is None else list(sources), list(content["withheld"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return StoredCommand({}, None, [])


def _may_be_secret(source: str) -> bool:
    """Whether a URL has a query, a user name or a fragment."""
    if "://" not in source:
        return False
    parts = urlsplit(source)
    return bool(parts.query or parts.fragment or "@" in parts.netloc)


def _absolute(source: str) -> str:
    return source if "://" in source else str(Path(source).absolute())
