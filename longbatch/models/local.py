"""Which models are on this machine: those converted into longbatch's cache and those in the hub's. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from longbatch.errors import UsageError
from longbatch.folders import cache_folder
from longbatch.models.registry import read_json


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model folder. name: what `--model` takes to mean it. architecture: as its config.json says."""

    name: str
    folder: Path
    architecture: str


def local_models() -> list[LocalModel]:
    """The models that can be named with `--model`, by name. Folders elsewhere can be named by path."""
    found = []
    for name, folder in sorted({**dict(_converted()), **dict(_pulled())}.items()):
        try:
            architectures = read_json(folder / "config.json").get("architectures") or ["unknown"]
        except UsageError:
            continue  # no model, or one that is still being fetched
        found.append(LocalModel(name, folder, str(architectures[0])))
    return found


def _converted() -> Iterator[tuple[str, Path]]:
    for config in (cache_folder() / "models").glob("*/config.json"):
        yield str(config.parent), config.parent


def _pulled() -> Iterator[tuple[str, Path]]:
    """Hub snapshots by id; a revision other than main is part of the name."""
    from huggingface_hub.constants import HF_HUB_CACHE

    for reference in Path(HF_HUB_CACHE).glob("models--*/refs/**/*"):
        if reference.is_file():
            repository = next(parent for parent in reference.parents if parent.name.startswith("models--"))
            revision = reference.relative_to(repository / "refs").as_posix()
            name = repository.name.removeprefix("models--").replace("--", "/")
            folder = repository / "snapshots" / reference.read_text().strip()
            yield name if revision == "main" else f"{name}@{revision}", folder
