"""What a run is made of before any weight is loaded: model, tokenizer, manifest, device, and what identifies it."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from longbatch import __version__
from longbatch.config import Settings
from longbatch.config.kv_formats import KVFormat, kv_format
from longbatch.core import Sampling
from longbatch.device import DeviceInfo, Rates, survey
from longbatch.errors import UsageError
from longbatch.folders import cache_folder
from longbatch.manifest import Manifest, ManifestOptions
from longbatch.models import ModelSpec, model_hash, read_spec
from longbatch.models.adapter import adapter_hash, read_adapter
from longbatch.models.parameters import weight_bytes
from longbatch.output import RunFolder
from longbatch.plan import Budget, CostModel, entry_bytes
from longbatch.plan.cost import products_speed
from longbatch.plan.weights import budget_with_weights, weights_place
from longbatch.prompt import PromptBuilder
from longbatch.run.attention import Device, RunAttention, resolve_attention

SPOOL = "spool"
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Settings whose value is not itself what changes answers: the files of the model and of the adapter are, by their hash,
# the resolved dtype and K/V format, and what the settings of attention come to.
_RESOLVED = ("model", "adapter", "dtype", "weights_dtype", "kv_dtype", "attention", "profile", "min_sparse_length")
_VERSIONS = ("torch", "triton", "tokenizers", "numpy", "pyarrow")


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a worker is started with. worker: the folder that only it writes to. rank: its number among the workers.
    engine: `module:function` that makes the engine. started: wall-clock time at which the run began to work. spool:
    where the run keeps local copies of its sources."""

    settings: Settings
    sources: list[str]
    out: Path
    model_dir: Path
    device: DeviceInfo
    dtype: str
    attention: RunAttention
    budget: Budget
    worker: str
    attempt: int
    rank: int
    engine: str
    started: float
    spool: Path

    def as_json(self) -> dict[str, Any]:
        """JSON values for `from_json`."""
        paths = {name: str(getattr(self, name)) for name in ("out", "model_dir", "spool")}
        values = asdict(replace(self, attention=RunAttention()))
        return {**values, **paths, "settings": self.settings.as_dict(), "attention": self.attention.as_json()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> WorkerSetup:
        """The setup that `as_json` described."""
        budget = {**values["budget"], "parts": tuple((name, size) for name, size in values["budget"]["parts"])}
        device = {**values["device"], "capability": tuple(values["device"]["capability"])}
        return cls(
            **{
                **values,
                "settings": Settings.from_dict(values["settings"]),
                "out": Path(values["out"]),
                "model_dir": Path(values["model_dir"]),
                "spool": Path(values["spool"]),
                "attention": RunAttention.from_json(values["attention"]),
                "device": DeviceInfo(**device),
                "budget": Budget(**budget),
            }
        )


@dataclass(frozen=True)
class Job:
    """Everything about a run that is known before weights are loaded. Making one imports no torch. rates, model_hash,
    adapter_hash: of its device, its model and its adapter, only where the job plans, not in a worker."""

    settings: Settings
    sources: list[str]
    model_dir: Path
    spec: ModelSpec
    manifest: Manifest
    builder: PromptBuilder
    devices: tuple[DeviceInfo, ...]
    dtype: str
    rates: Rates | None
    attention: RunAttention
    model_hash: str = ""
    adapter_hash: str | None = None

    @classmethod
    def open(cls, settings: Settings, sources: list[str], say: Callable[[str], None]) -> Job:
        """Find the model, the manifest and the device. say: is told before anything is downloaded.

        Raises UsageError, ManifestError, DeviceError.
        """
        model_dir = find_model(settings.model, say)
        devices, dtype, measured = survey(settings.gpus, settings.dtype, cache_folder())
        job = cls._assemble(settings, sources, model_dir, devices, dtype, measured, RunAttention())
        adapter = None if settings.adapter is None else _check_adapter(job, settings.adapter, say)
        digest = model_hash(model_dir)
        found = resolve_attention(settings, job.spec, digest, Device(devices[0], dtype, say))
        return replace(job, attention=found, model_hash=digest, adapter_hash=adapter)

    @classmethod
    def reopen(cls, setup: WorkerSetup) -> Job:
        """The same job in a worker, for its device; nothing is looked for or fetched again."""
        job = cls._assemble(
            setup.settings, setup.sources, setup.model_dir, [setup.device], setup.dtype, None, setup.attention
        )
        job.manifest.spool(setup.spool)
        return job

    @classmethod
    def _assemble(
        cls,
        settings: Settings,
        sources: list[str],
        model_dir: Path,
        devices: list[DeviceInfo],
        dtype: str,
        measured: Rates | None,
        attention: RunAttention,
    ) -> Job:
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
        return cls(settings, sources, model_dir, spec, manifest, builder, tuple(devices), dtype, measured, attention)

    @property
    def device(self) -> DeviceInfo:
        """The first device; the others are of its kind."""
        return self.devices[0]

    @property
    def kv(self) -> KVFormat:
        """How K/V are stored."""
        return kv_format(self.settings.kv_dtype, self.dtype)

    @property
    def decode_rows(self) -> int:
        """Most rows that decode at once."""
        return self.settings.decode_batch or (256 if self.device.on_gpu else 64)

    def identity(self) -> dict[str, Any]:
        """Everything that can change an answer: a run folder holds one identity only."""
        chosen = {name: value for name, value in self.settings.identity().items() if name not in _RESOLVED}
        template = self.builder.template
        return {
            **chosen,
            **self.attention.identity(),
            "dtype": self.dtype,
            "kv_dtype": None if self.kv.name == self.dtype else self.kv.name,
            # None, as in runs that were started before there was a choice.
            "weights_dtype": None if self.settings.weights_dtype == "auto" else self.settings.weights_dtype,
            "model_hash": self.model_hash,
            "adapter_hash": self.adapter_hash,
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
            "adapter": None if self.settings.adapter is None else str(self.settings.adapter),
            "architecture": self.spec.architecture,
            "sources": [source.name for source in self.manifest.sources],
            "attention": self.attention.asked(self.settings.min_sparse_length),
        }

    def budget(self) -> Budget:
        """The memory of the device, shared out. Raises DeviceError where that, or the host's, is too little."""
        shares = self._shares()
        if self.settings.spill is None:
            return shares
        # A row that keeps its state after each chunk loses at most one of them.
        longest = min(shares.kv_tokens, self.spec.max_length)
        chunk = self.cost().chunk_tokens(longest, self.settings.max_wave_seconds, shares.tile_tokens)
        return replace(shares, chunk_tokens=chunk)

    def cost(self) -> CostModel:
        """Predicted times, from the device's rates. Raises DeviceError where sparse ones cannot be measured, or the
        model does not fit."""
        assert self.rates is not None
        width = DTYPE_BYTES[self.dtype]
        sparse = (
            self.attention.rows(self.spec, Device(self.device, self.dtype).rates) if self.attention.is_sparse else None
        )
        weights = self._weight_bytes / self.spec.num_parameters
        speed = products_speed(self.settings.weights_dtype, self.dtype, self.device.capability)
        place = self._shares().weights
        streamed = weights_place(place, self.spec, width, self.settings.weights_dtype, self.device.on_gpu).layer_bytes
        seconds = streamed / self.rates.host_to_device if self.rates.host_to_device else 0.0
        return CostModel(self.spec, self.rates, weights, entry_bytes(self.spec, self.kv), sparse, speed, seconds)

    def _shares(self) -> Budget:
        return budget_with_weights(
            self.settings.weights,
            self.spec,
            self.devices,
            DTYPE_BYTES[self.dtype],
            self.settings.weights_dtype,
            self.kv,
            wave_tokens=self.settings.wave_tokens,
            kv_tokens=self.settings.kv_tokens,
            sparse_heads=max(layer.num_heads for layer in self.spec.layers) if self.attention.is_sparse else 0,
            decode_rows=self.decode_rows,
        )

    @property
    def _weight_bytes(self) -> int:
        return weight_bytes(self.spec, DTYPE_BYTES[self.dtype], self.settings.weights_dtype)


def open_folder(job: Job) -> tuple[Job, RunFolder]:
    """The job's run folder, started or continued. Raises UsageError, DiskError.

    Of several processes that start at once, each with a least length of sparse rows that it measured, the one that
    starts the run decides for all; also that no row is sparse.
    """
    assert job.settings.out is not None
    try:
        return job, RunFolder.create_or_open(job.settings.out, job.identity(), job.info())
    except UsageError:
        begun = job.attention.as_begun(job.settings.out)
        if not job.attention.is_sparse or job.settings.min_sparse_length is not None or begun is None:
            raise
    job = replace(job, attention=begun)
    assert job.settings.out is not None
    return job, RunFolder.create_or_open(job.settings.out, job.identity(), job.info())


def find_model(model: str | None, say: Callable[[str], None]) -> Path:
    """The model's folder; the small default model where none is named."""
    if model is None:
        from longbatch.models.bundled import sample_weights

        return sample_weights(say)
    from longbatch.models.hub import resolve

    return resolve(model)


def _check_adapter(job: Job, folder: Path, say: Callable[[str], None]) -> str:
    """The adapter's hash. Raises UsageError for one that cannot be merged into the job's model; one that was trained on
    a model of another name is told of."""
    adapter = read_adapter(folder, job.spec)
    if not any(map(adapter.fits, (job.settings.model or "", str(job.model_dir.resolve())))):
        say(f"warning: the adapter {folder} was trained on {adapter.base_model}, and is merged into {job.model_dir}")
    return adapter_hash(folder)


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
