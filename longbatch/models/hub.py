"""Models on the Hugging Face hub: `pull` fetches one, `resolve` finds one that is there. Nothing else downloads.

Only weights in safetensors, settings, templates and tokenizer files at the top of a repository are fetched: never
pickles, never code. Where a model came from is recorded beside it and read back by `read_source`.
"""

from __future__ import annotations

import errno
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from longbatch.errors import DiskError, LongbatchError, UsageError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "LICENSE*", "USE_POLICY*")
# Mistral's and Meta's own formats, the same weights once more.
_IGNORED = ("*/*", "consolidated*")
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_RECORD = "longbatch-source.json"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model folder came from. revision: what was asked for. commit: what that was. license: as the
    repository's card states it, None if it does not."""

    repo_id: str
    revision: str
    commit: str
    license: str | None


def pull(repo_id: str, revision: str = "main", folder: Path | None = None) -> tuple[Path, Source]:
    """Fetches a model into `folder`, or into the hub's cache, where `resolve` finds it; returns its folder.

    What is there already is not fetched again, and an interrupted download continues. Raises `UsageError`, with
    the mend, when there is no such model, no access to it, no network, or nothing in it that can be loaded, and
    `DiskError` when the disk is full.
    """
    from huggingface_hub import HfApi, snapshot_download

    # Of httpx or of its successor, by the hub's release; it has no other public name that is the same in both.
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    if not _is_id(repo_id):
        raise UsageError(f"{repo_id!r} is no model id", hint="a model id looks like ORGANIZATION/NAME")
    if folder is not None and folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", hint="name a folder")
    try:
        info = HfApi().model_info(repo_id, revision=revision)
        _check_files(info)
        # By commit into a folder, so that it is the one checked; by name into the cache, which remembers names.
        path = snapshot_download(
            repo_id,
            revision=revision if folder is None else info.sha,
            local_dir=folder,
            allow_patterns=list(_PATTERNS),
            ignore_patterns=list(_IGNORED),
        )
    except (HTTPError, OSError) as error:
        raise _explained(error, repo_id, revision) from error
    source = Source(repo_id, revision, str(info.sha), info.card_data.license if info.card_data else None)
    _record(Path(path)).write_text(json.dumps(asdict(source), indent=2) + "\n", encoding="utf-8")
    return Path(path), source


def resolve(model: str) -> Path:
    """The folder of a model given by path, or by hub id (ORGANIZATION/NAME or ORGANIZATION/NAME@REVISION) when it
    was pulled. Raises `UsageError`, with the mend, when it is neither."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise UsageError(f"{model} is a file, and a model is a folder", hint="convert a GGUF file: longbatch convert")
    repo_id, _, revision = model.partition("@")
    if not _is_id(repo_id):
        raise UsageError(f"there is no model folder {model}", hint="give a model folder, or a hub id ORGANIZATION/NAME")

    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo_id, "config.json", revision=revision or None)
    if not isinstance(config, str):
        wanted = f"{repo_id} --revision {revision}" if revision else repo_id
        raise UsageError(
            f"{model} is neither a folder nor a model that was pulled", hint=f"fetch it: longbatch models pull {wanted}"
        )
    return Path(config).parent


def read_source(model_dir: Path) -> Source | None:
    """What `pull` recorded about a model folder, None where it recorded nothing."""
    try:
        return Source(**json.loads(_record(model_dir).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _is_id(text: str) -> bool:
    """Whether a text has the form ORGANIZATION/NAME, by the hub's rules."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return text.count("/") == 1


def _record(model_dir: Path) -> Path:
    """The record's place: inside a folder of its own, but beside a snapshot in the hub's cache, whose files are
    the repository's."""
    if model_dir.parent.name == "snapshots":
        return model_dir.parent.parent / f"{model_dir.name}.{_RECORD}"
    return model_dir / _RECORD


def _check_files(info: ModelInfo) -> None:
    names = [sibling.rfilename for sibling in info.siblings or []]
    if "config.json" not in names:
        hint = "it holds GGUF files; fetch one and use: longbatch convert" if _any(names, ".gguf") else None
        raise UsageError(f"{info.id} holds no config.json, so it is no model that can be loaded", hint=hint)
    if not any(name.endswith(".safetensors") and "/" not in name for name in names):
        raise UsageError(
            f"{info.id} holds no weights in safetensors, and pickled ones are not loaded",
            hint="look for a revision or a copy of the model with model.safetensors",
        )


def _any(names: list[str], suffix: str) -> bool:
    return any(name.endswith(suffix) for name in names)


def _explained(error: Exception, repo_id: str, revision: str) -> LongbatchError:
    """The user's error for one of the hub's."""
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RevisionNotFoundError

    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return DiskError(f"{repo_id} was not fetched: {error.strerror}", hint="a new attempt continues the download")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, OfflineModeIsEnabled):
        return UsageError(f"{repo_id} was not fetched: HF_HUB_OFFLINE is set", hint="unset HF_HUB_OFFLINE")
    if isinstance(error, RevisionNotFoundError):
        return UsageError(f"{repo_id} has no revision {revision!r}", hint="name a branch, tag or commit of the model")
    if isinstance(error, GatedRepoError) or status == 403:
        return UsageError(
            f"access to {repo_id} is not granted (HTTP {status})",
            hint="ask for access on the model's page, then give a token that has it: hf auth login, or HF_TOKEN",
        )
    if status == 401:
        return UsageError(
            f"{repo_id} does not exist, or it is private, or the token is not valid (HTTP 401)",
            hint="check the id; for a private model give a token: hf auth login, or HF_TOKEN",
        )
    if status == 404:
        return UsageError(
            f"{repo_id} does not exist on the hub (HTTP 404)", hint="check the id, upper and lower case too"
        )
    if status is not None:
        return UsageError(f"{repo_id} was not fetched: the hub answered HTTP {status}", hint="try again later")
    return UsageError(
        f"{repo_id} was not fetched: the hub cannot be reached ({type(error).__name__})",
        hint="check the network and HF_ENDPOINT, or pull on another machine and copy the folder",
    )
