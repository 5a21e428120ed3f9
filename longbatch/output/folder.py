"""The run folder: its layout on disk, and the settings that all results in it share."""

from __future__ import annotations

import datetime
import json
import secrets
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from longbatch.errors import UsageError
from longbatch.output.files import as_json, disk_errors, fsync_folder, publish, temporary_path, write_synced
from longbatch.output.schema import SCHEMA_VERSION

RUN_FORMAT = 1
# Settings whose text may be private: only a hash of them is stored and shown.
PRIVATE_SETTINGS = frozenset({"prompt", "system"})
ABSENT = "(not set)"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """An existing run folder. identity: the output-changing settings, flat, as stored in run.json.

    info: what else run.json says (versions, device, command), never compared.
    """

    path: Path
    run_id: str
    config_hash: str
    created: datetime.datetime
    identity: dict[str, Any]
    info: dict[str, Any]

    @property
    def parts(self) -> Path:
        return self.path / "parts"

    @property
    def results(self) -> Path:
        return self.path / "results"

    @property
    def success(self) -> Path:
        return self.path / "_SUCCESS.json"

    @property
    def work(self) -> Path:
        return self.path / "_work"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def damaged(self) -> Path:
        """Where files that failed a check are moved, so that their rows run again."""
        return self.work / "damaged"

    def worker(self, name: str) -> Path:
        """The folder that only this worker writes to."""
        return self.work / name

    @classmethod
    def create_or_open(cls, path: Path, identity: dict[str, Any], info: dict[str, Any]) -> RunFolder:
        """Start a run in a new or empty folder, or continue the one that is there.

        identity: JSON values of every setting that can change an output; a setting that is None is the same
        as one that an older version did not store. Of two processes that start at once, one defines the run
        and the other opens it. Raises UsageError if the folder holds something else, or a run whose identity
        differs (each differing setting is named with both values), DiskError if it cannot be written.
        """
        settings = _flatten(identity)
        with disk_errors("create the run folder", path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (path / "run.json").exists():
                _require_empty(path)
                path.chmod(0o700)
                _define(path, settings, info)
            for name in ("parts", "_work", "logs"):
                (path / name).mkdir(mode=0o700, exist_ok=True)
            fsync_folder(path)
        folder = cls.open(path)
        folder._require_same(settings)
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open an existing run folder; raises UsageError if it is none, or of a newer format."""
        try:
            content = json.loads((path / "run.json").read_bytes())
            if content["format"] > RUN_FORMAT:
                hint = "continue it with the version that started it, or a newer one"
                raise UsageError(f"{path} was written by a newer version of longbatch", hint=hint)
            return cls(
                path,
                content["run_id"],
                content["config_hash"],
                datetime.datetime.fromisoformat(content["created"]),
                content["identity"],
                content["info"],
            )
        except FileNotFoundError:
            raise UsageError(f"{path} is not a run folder: it has no run.json") from None
        except (ValueError, KeyError, TypeError) as error:
            hint = "give another folder with --out"
            raise UsageError(f"{path / 'run.json'} is not a description of a run", hint=hint) from error

    def _require_same(self, settings: dict[str, Any]) -> None:
        names = [name for name in {**self.identity, **settings} if self.identity.get(name) != settings.get(name)]
        if not names:
            return
        lines = [f"  {name}: {_shown(self.identity, name)} there, {_shown(settings, name)} now" for name in names]
        hint = "give another folder with --out, or the settings that the run was started with"
        raise UsageError(f"{self.path} holds a run with other settings:\n" + "\n".join(lines), hint=hint)


def _require_empty(path: Path) -> None:
    known = {"run.json", "parts", "_work", "logs"}
    strange = sorted(
        entry.name for entry in path.iterdir() if entry.name not in known and not entry.name.startswith(".run.json.")
    )
    if strange:
        hint = "give a new or an empty folder with --out"
        raise UsageError(f"{path} is not a run folder, and not empty either: it has {strange[0]}", hint=hint)


def _define(path: Path, settings: dict[str, Any], info: dict[str, Any]) -> None:
    now = datetime.datetime.now(datetime.UTC)
    content = {
        "format": RUN_FORMAT,
        "schema_version": SCHEMA_VERSION,
        "run_id": f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(4)}",
        "config_hash": blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest(),
        "created": now.isoformat(timespec="seconds"),
        "identity": settings,
        "info": info,
    }
    temporary = temporary_path(path / "run.json")
    try:
        write_synced(temporary, as_json(content))
        publish(temporary, path / "run.json")
    except FileExistsError:  # another process was faster; its run is opened
        temporary.unlink()
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level with dotted names, as JSON reads them back; private texts as hashes."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{name}."))
        elif name in PRIVATE_SETTINGS and value is not None:
            flat[prefix + name] = f"text {blake2b(str(value).encode(), digest_size=8).hexdigest()}"
        elif value is not None:
            flat[prefix + name] = json.loads(json.dumps(value))
    return flat


def _shown(settings: dict[str, Any], name: str) -> str:
    if name not in settings:
        return ABSENT
    text = json.dumps(settings[name], ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
