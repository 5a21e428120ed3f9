"""GGUF files to Hugging Face model folders: `convert`.

The file is parsed in a limited child process by our own reader (reader.py), which checks every count against the
file's size; values are dequantized by the gguf package. architectures.py says what each kind of model is called,
weights.py and tokenizer.py write the parts, worker.py puts them together in the child.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longbatch.errors import DiskError, UsageError
from longbatch.sandbox import SandboxError, SandboxMemory, SandboxRaised, SandboxTimeout, run_limited

# Counts changes of what conversions make, so that kept ones are made anew.
VERSION = 1
DTYPES = ("float32", "bfloat16", "float16")
# Measured: Gemma's 262,144 tokens take 0.6 GB of address space and weights less, whatever their number; the slowest
# quantization (IQ2_XXS) makes values of 19 MB of file a second on one core.
_MEMORY_BYTES = 4 << 30
_SECONDS = 60.0
_BYTES_PER_SECOND = 2e6
# Fewest bits per weight of any quantization is 1.6, the most on output 32.
_LARGEST_EXPANSION = 24


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion made. license: as the file states it, None if it does not. quantization: the types of its
    tensors."""

    folder: Path
    architecture: str
    name: str | None
    license: str | None
    num_parameters: int
    quantization: tuple[str, ...]
    dtype: str
    chat_template: bool

    def __str__(self) -> str:
        template = "with its chat template" if self.chat_template else "the file has no chat template"
        return (
            f"{self.folder}: {self.name or self.architecture}, {self.num_parameters / 1e6:,.0f} M parameters"
            f" ({', '.join(self.quantization)} to {self.dtype}), licence {self.license or 'not stated'}, {template}"
        )


def convert(gguf: Path, folder: Path, *, overwrite: bool = False, dtype: str = "float32") -> Conversion:
    """Converts one GGUF file into a model folder: config.json, model.safetensors, tokenizer.json,
    tokenizer_config.json with the chat template, generation_config.json.

    The folder appears complete or not at all. overwrite: replace a model folder that is there. dtype: one of
    DTYPES. Raises `UsageError` for what cannot be converted, a damaged file included, and `DiskError`.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if not gguf.is_file():
        raise UsageError(f"{gguf} is not a file", hint="give the path of a .gguf file")
    _check_target(folder, overwrite)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise DiskError(f"cannot write beside {folder}: {error.strerror}") from error
    try:
        made = _convert(gguf, partial, dtype)
        partial.chmod(0o755)
        _publish(partial, folder, overwrite)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Conversion(folder=folder, quantization=tuple(made.pop("quantization")), **made)


def _check_target(folder: Path, overwrite: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file", hint="name a new folder")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"{folder} is not empty", hint="name a new folder, or replace this one with --overwrite")
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} is no model folder, so it is not replaced", hint="name a new folder")


def _convert(gguf: Path, partial: Path, dtype: str) -> dict[str, Any]:
    size = gguf.stat().st_size
    try:
        made: dict[str, Any] = run_limited(
            "longbatch.models.gguf.worker:convert",
            {"gguf": str(gguf.resolve()), "folder": str(partial.resolve()), "dtype": dtype},
            seconds=_SECONDS + size / _BYTES_PER_SECOND,
            memory_bytes=_MEMORY_BYTES,
            max_file_bytes=size * _LARGEST_EXPANSION + (1 << 30),
        )
    except SandboxRaised as error:
        if error.type == "NoSpace":
            raise DiskError(f"{gguf} was not converted: {error.message}") from error
        if error.type == "GgufError":
            raise UsageError(f"{gguf} cannot be converted: {error.message}") from error
        raise UsageError(f"{gguf} cannot be converted: {error}") from error
    except (SandboxTimeout, SandboxMemory) as error:
        raise UsageError(f"{gguf} cannot be converted: its conversion {error}; the file may be damaged") from error
    except SandboxError as error:
        raise UsageError(f"{gguf} cannot be converted: the process reading it {error}") from error
    return made


def _publish(partial: Path, folder: Path, overwrite: bool) -> None:
    """Moves the finished folder into place; what it replaces is moved aside first and deleted last."""
    aside = partial.with_name(f"{partial.name}.old")
    try:
        if overwrite and folder.exists():
            os.rename(folder, aside)
        os.rename(partial, folder)
    except OSError as error:
        if aside.exists():
            os.rename(aside, folder)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise UsageError(f"{folder} was made by another process meanwhile") from error
        raise DiskError(f"cannot move the model to {folder}: {error.strerror}") from error
    shutil.rmtree(aside, ignore_errors=True)
