"""LoRA adapters in PEFT's layout, merged into the weights while they are loaded. Torch-free.

A folder with `adapter_config.json` and `adapter_model.safetensors`. A module's weight [out, in] becomes
weight + scale * B A, with A [r, in], B [out, r] and scale = lora_alpha / r, or lora_alpha / sqrt(r) with `use_rslora`.
What changes more than that (DoRA, biases, trained embeddings, other kinds of adapters) is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from longbatch.errors import UsageError
from longbatch.models.checkpoint import FLOAT_BYTES, StoredTensor, stored_tensors
from longbatch.models.families.config import Config
from longbatch.models.parameters import parameters, sources
from longbatch.models.registry import read_json
from longbatch.models.spec import ModelSpec

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_MERGE = "merge the adapter into its base model with PEFT (merge_and_unload) and save that as safetensors"
# Settings that change more than scale * B A, with the values that leave it at that.
_PLAIN: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "modules_to_save": ([],),
    "layer_replication": ([],),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "alora_invocation_tokens": ([],),
    "arrow_config": ({},),
    # Others also change the weights of the base model that the adapter is added to.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True, slots=True)
class Update:
    """What is added to a weight: scale * b a, b [out, r], a [r, in]."""

    a: StoredTensor
    b: StoredTensor
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """base_model: what the adapter was trained on, as its config names it. updates: by the name of the weight in the
    base model's checkpoint."""

    base_model: str | None
    updates: Mapping[str, Update]

    def fits(self, model: str) -> bool:
        """Whether the base model goes by the same name as `model`, a folder or hub id; what comes before the last
        name is a matter of where it lies."""
        return self.base_model is None or _last_name(self.base_model) == _last_name(model)


def read_adapter(folder: Path, spec: ModelSpec) -> Adapter:
    """The adapter of a folder for a model.

    Raises `UsageError`: it is none, or of a kind that is not merged (named), or its tensors are not those of the model,
    in which case every unknown, incomplete and mis-shaped one is named.
    """
    config = Config(_settings(folder), str(folder / _CONFIG))
    _refuse_other_kinds(config)
    rank, alpha = config.integer("r"), config.number("lora_alpha")
    scale = alpha / (sqrt(rank) if config.flag("use_rslora", False) else rank)
    shapes = {
        source.name: source.shape
        for parameter in parameters(spec)
        for source in sources(parameter, spec)
        if parameter.role == "matrix" and parameter.key != "embed"
        if source.name.endswith(".weight") and len(source.shape) == 2
    }
    pairs: dict[str, dict[str, StoredTensor]] = {}
    faults: list[str] = []
    for tensor in stored_tensors((_weights_file(folder),)).values():
        name, half = _target(tensor.name, spec)
        if half is None or name not in shapes:
            faults.append(f"unknown: {tensor.name} {list(tensor.shape)}")
        else:
            pairs.setdefault(name, {})[half] = tensor
    for name, pair in pairs.items():
        faults += _faults(name, pair, rank, shapes[name])
    if not pairs and not faults:
        faults.append("no tensor at all")
    if faults:
        raise UsageError(
            f"the adapter {folder} is not one for {spec.architecture}:\n  " + "\n  ".join(faults),
            hint="an adapter changes matrices of attention and MLP, each by lora_A and lora_B of the model's sizes",
        )
    base_model = config.values.get("base_model_name_or_path")
    updates = {name: Update(pair[_A], pair[_B], scale) for name, pair in pairs.items()}
    return Adapter(str(base_model) if base_model else None, updates)


def adapter_hash(folder: Path) -> str:
    """blake2b (32 hex digits) over what the adapter adds: its scale, and every byte of its tensors."""
    config = _settings(folder)
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([config.get(key) for key in ("r", "lora_alpha", "use_rslora")]).encode())
    with _weights_file(folder).open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _settings(folder: Path) -> dict[str, Any]:
    if not (folder / _CONFIG).is_file():
        raise UsageError(f"{folder} is not an adapter: it has no {_CONFIG}", hint="give the folder that PEFT saved")
    return read_json(folder / _CONFIG)


def _weights_file(folder: Path) -> Path:
    path = folder / _WEIGHTS
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        hint = "adapter_model.bin is a pickle and is never opened; save the adapter as safetensors" if pickled else None
        raise UsageError(f"{folder} has no {_WEIGHTS}", hint=hint)
    return path


def _refuse_other_kinds(config: Config) -> None:
    kind = str(config.values.get("peft_type", "unknown"))
    if kind.upper() != "LORA":
        raise UsageError(f"{config.where}: adapters of type {kind} are not merged; known: LORA", hint=_MERGE)
    odd = [f"{key} {config.values[key]!r}" for key, plain in _PLAIN.items() if not _is_plain(config, key, plain)]
    # A rule may be any regular expression over names.
    odd += [f"{key} {config.values[key]!r}" for key in ("rank_pattern", "alpha_pattern") if config.values.get(key)]
    if odd:
        raise UsageError(f"{config.where}: not merged: {', '.join(odd)}", hint=_MERGE)


def _is_plain(config: Config, key: str, plain: tuple[object, ...]) -> bool:
    return not config.has(key) or config.values[key] in plain


def _target(name: str, spec: ModelSpec) -> tuple[str, str | None]:
    """The weight that a tensor of the adapter changes, and which half of its update it is."""
    half = next((half for half in (_A, _B) if name.endswith(half)), None)
    if half is None or not name.startswith(_PREFIX):
        return name, None
    weight = name.removeprefix(_PREFIX).removesuffix(half) + ".weight"
    for pattern, replacement in spec.renames:
        weight = re.sub(pattern, replacement, weight)
    return weight, half


def _faults(name: str, pair: Mapping[str, StoredTensor], rank: int, shape: tuple[int, ...]) -> Iterator[str]:
    module = name.removesuffix(".weight")
    for half, wanted in ((_A, (rank, shape[1])), (_B, (shape[0], rank))):
        tensor = pair.get(half)
        if tensor is None:
            yield f"missing: {module}{half} {list(wanted)}"
        elif tensor.dtype not in FLOAT_BYTES:
            yield f"unsupported type {tensor.dtype}: {tensor.name}"
        elif tensor.shape != wanted:
            yield f"wrong shape: {tensor.name} {list(tensor.shape)}, the model and r {rank} need {list(wanted)}"


def _last_name(model: str) -> str:
    return model.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].lower()
