"""What a search has found so far, on the disk: one small file per finished layer, so that a kill costs one layer.

    FILE.search/search.json       what the search is: model, documents, tolerance and its measure, number format and
                                  version; and what was noted when it began: time, device, the rates it prices by
    FILE.search/layer-0007.json   what was chosen for a layer

Files appear whole or not at all. A folder that belongs to another search is refused, and the difference named.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from longbatch.errors import UsageError
from longbatch.output.files import as_json, disk_errors, replace_file, temporary_path
from longbatch.sparsity.profile import Fields

_IDENTITY = "search.json"
_LAYER_MEND = "delete it; what it held is searched again"
# Without it nobody knows whose the layers beside it are.
_IDENTITY_MEND = "delete its folder to begin the search anew, or restore the file"


def state_folder(profile: Path) -> Path:
    """The folder that a search for this profile works in."""
    return profile.with_name(f"{profile.name}.search")


def remove_state(profile: Path) -> None:
    """Remove what a search has kept: its profile is written. Raises DiskError."""
    folder = state_folder(profile)
    with disk_errors("remove", folder):
        # All at once: half of a folder would look like a search that goes on.
        aside = temporary_path(folder)
        os.rename(folder, aside)
        shutil.rmtree(aside)


class SearchState:
    """The folder beside the profile that a search writes to, made by `open`. facts: what was noted when the search
    began, whoever goes on with it."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self._folder = folder
        self.facts = facts

    @classmethod
    def open(cls, profile: Path, identity: dict[str, Any], facts: dict[str, Any]) -> SearchState:
        """Begin a search, or go on with the one that has the same identity. Both are JSON values.

        Raises UsageError when the folder holds another search or a damaged one, DiskError.
        """
        folder = state_folder(profile)
        path = folder / _IDENTITY
        with disk_errors("write", folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                replace_file(path, as_json({"identity": identity, "facts": facts}))
        content = _read(path, _IDENTITY_MEND)
        found: dict[str, Any] = content.take("identity", dict)
        noted = content.inner(content.take("facts", dict), "facts")
        for name, value in facts.items():
            noted.take(name, type(value))
        # Through JSON, as what is compared to it has been.
        wanted: dict[str, Any] = json.loads(as_json(identity))
        differing = sorted(key for key in {**found, **wanted} if found.get(key) != wanted.get(key))
        if differing:
            raise UsageError(
                f"{folder} holds another search; different: {', '.join(differing)}",
                hint="repeat its command to go on with it, delete the folder to begin anew, or choose another -o",
            )
        return cls(folder, noted.values)

    def fault(self, fact: str, text: str) -> UsageError:
        """That something is wrong with a fact."""
        return Fields(self._folder / _IDENTITY, self.facts, "facts", _IDENTITY_MEND).fault(fact, text)

    def layer(self, index: int) -> Fields | None:
        """What was saved for a layer, None where it is not finished. Raises UsageError for a damaged file."""
        path = self._path(index)
        return _read(path, _LAYER_MEND) if path.exists() else None

    def save_layer(self, index: int, values: dict[str, Any]) -> None:
        """Keep what was found for a layer. Raises DiskError."""
        path = self._path(index)
        with disk_errors("write", path):
            replace_file(path, as_json(values))

    def _path(self, index: int) -> Path:
        return self._folder / f"layer-{index:04d}.json"


def _read(path: Path, mend: str) -> Fields:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint=mend) from error
    return Fields(path, value, mend=mend)
