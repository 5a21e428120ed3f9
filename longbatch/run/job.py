"""What a run is made of before any weight is loaded: model, tokenizer, manifest, device, and what identifies it."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from longbatch import __version__
from longbatch.config import Settings, cache_folder
from longbatch.core import Sampling
from longbatch.device import DeviceInfo, default_dtype, detect, rates
from longbatch.errors import UsageError
from longbatch.manifest import Manifest, ManifestOptions
from longbatch.models import ModelSpec, model_hash, read_spec
from longbatch.plan import Budget, CostModel, budget
from longbatch.prompt import PromptBuilder

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Settings whose value is not itself what changes answers: the model's files are, by their hash, and the resolved dtype.
_RESOLVED = ("model", "dtype")
_VERSIONS = ("torch", "triton", "tokenizers", "numpy", "pyarrow")


@dataclass(frozen=True)
class Job:
    """Everything about a run that is known before weights are loaded. Torch is not imported by making one, except
    where a GPU must be looked for."""

    settings: Settings
    model_dir: Path
    spec: ModelSpec
    manifest: Manifest
    builder: PromptBuilder
    device: DeviceInfo
    dtype: str

    @classmethod
    def open(cls, settings: Settings, sources: list[str], say: Callable[[str], None]) -> Job:
        """Find the model, the manifest and the device. say: is told before anything is downloaded.

        Raises UsageError, ManifestError, DeviceError.
        """
        model_dir = find_model(settings.model, say)
        options = ManifestOptions(
            task=settings.task,
            prompt=settings.prompt,
            system=settings.system,
            defaults=default_sampling(settings, model_dir),
            keep_columns=settings.keep_columns,
            ignore_unsupported=settings.ignore_unsupported,
            max_row_bytes=settings.max_row_bytes,
            limit=settings.limit,
            only=settings.only,
            media_root=settings.media_root,
        )
        manifest = Manifest.open(sources, options)
        spec = read_spec(model_dir)
        builder = PromptBuilder(
            model_dir,
            spec.max_length,
            overlong=settings.overlong,
            prompt_format=settings.prompt_format,
            document_root=manifest.root,
            default_max_tokens=settings.max_tokens,
        )
        devices = detect(settings.gpus)
        if len(devices) > 1 and settings.gpus != "auto":
            raise UsageError(
                f"this version runs on one device, and --gpus {settings.gpus} asks for {len(devices)}",
                hint="use --gpus 1, and CUDA_VISIBLE_DEVICES to choose which",
            )
        dtype = default_dtype(devices[0]) if settings.dtype == "auto" else settings.dtype
        return cls(settings, model_dir, spec, manifest, builder, devices[0], dtype)

    def identity(self) -> dict[str, Any]:
        """Everything that can change an answer: a run folder holds one identity only."""
        chosen = {name: value for name, value in self.settings.identity().items() if name not in _RESOLVED}
        template = self.builder.template
        return {
            **chosen,
            "dtype": self.dtype,
            "model_hash": model_hash(self.model_dir),
            "tokenizer_hash": self.builder.tokenizer.hash,
            "template_hash": None if template is None else template.hash,
        }

    def info(self) -> dict[str, Any]:
        """What else run.json says: versions, device, where model and manifest were."""
        versions = {name: metadata.version(name) for name in _VERSIONS if _installed(name)}
        return {
            "longbatch": __version__,
            "python": platform.python_version(),
            "versions": versions,
            "platform": platform.platform(),
            "device": self.device.name,
            "model": str(self.model_dir),
            "architecture": self.spec.architecture,
            "sources": [source.name for source in self.manifest.sources],
        }

    def budget(self) -> Budget:
        """The memory of the device, shared out."""
        width = DTYPE_BYTES[self.dtype]
        device = self.device
        memory = min(device.memory_bytes, device.free_bytes or device.memory_bytes)
        return budget(
            self.spec,
            memory,
            width,
            width,
            device.on_gpu,
            wave_tokens=self.settings.wave_tokens,
            kv_tokens=self.settings.kv_tokens,
        )

    def cost(self) -> CostModel:
        """Predicted times, from the device's remembered rates."""
        width = DTYPE_BYTES[self.dtype]
        return CostModel(self.spec, rates(self.device, self.dtype, cache_folder()), width, width)


def find_model(model: str | None, say: Callable[[str], None]) -> Path:
    """The model's folder; the small default model where none is named."""
    if model is None:
        from longbatch.models.bundled import sample_weights

        return sample_weights(say)
    from longbatch.models.hub import resolve

    return resolve(model)


def default_sampling(settings: Settings, model_dir: Path) -> Sampling:
    """Sampling of rows that say nothing: greedy, or the model's own generation_config.json."""
    if settings.generation_config == "greedy":
        return Sampling()
    path = model_dir / "generation_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read, and --generation-config model needs it", hint="use --generation-config greedy"
        ) from error
    if not config.get("do_sample", False):
        return Sampling(repetition_penalty=float(config.get("repetition_penalty") or 1.0))
    defaults = Sampling(temperature=1.0)
    kinds: dict[str, Callable[[Any], Any]] = {
        "temperature": float,
        "top_k": int,
        "top_p": float,
        "min_p": float,
        "repetition_penalty": float,
    }
    found = {name: kind(config[name]) for name, kind in kinds.items() if config.get(name) is not None}
    return replace(defaults, **found)


def say_on_stderr(text: str) -> None:
    """One line for a person, away from the results on standard output."""
    print(text, file=sys.stderr, flush=True)


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
