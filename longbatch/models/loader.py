"""From a model folder to a decoder: strict, without pickle, one copy from file to weight.

Every name and shape is checked against the spec before anything is allocated, and all that is wrong is reported at
once. Then each checkpoint tensor is copied, and cast, into its rows of the fused parameter on the device.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from longbatch.errors import UsageError
from longbatch.models.checkpoint import FLOAT_BYTES, StoredTensor, checkpoint_files, stored_tensors
from longbatch.models.decoder import Decoder
from longbatch.models.parameters import Parameter, Source, parameters, sources
from longbatch.models.registry import read_spec
from longbatch.models.spec import ModelSpec


def load_decoder(model_dir: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The decoder of a model folder, weights in dtype on device.

    Raises `UsageError`: the model or its format is not supported, or its tensors are not exactly those of the
    config, in which case every missing, extra, mis-shaped and quantized one is named.
    """
    spec = read_spec(model_dir)
    matches = match_tensors(spec, stored_tensors(checkpoint_files(model_dir)))
    tensors = _allocate(spec, dtype, device)
    by_file: dict[Path, list[_Match]] = defaultdict(list)
    for match in matches:
        by_file[match.stored.file].append(match)
    for file, own in by_file.items():
        with safe_open(file, framework="pt", device="cpu") as reader:
            for match in sorted(own, key=lambda match: match.stored.start):
                _place(tensors[match.source.parameter.name], reader.get_tensor(match.stored.name), match.source)
    _finish(spec, tensors)
    return Decoder(spec, tensors)


@dataclass(frozen=True, slots=True)
class _Match:
    """A tensor of the decoder's sources, found in a file."""

    source: Source
    stored: StoredTensor


def match_tensors(spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> list[_Match]:
    """Pairs every source of the decoder with the stored tensor that holds it. Raises `UsageError`, naming all that
    is missing, extra, mis-shaped or not of a float type."""
    available = _renamed(spec, stored.values())
    wanted = [source for parameter in parameters(spec) for source in sources(parameter, spec)]
    matches: list[_Match] = []
    faults: list[str] = []
    for source in wanted:
        found = available.pop(source.name, None)
        if found is None:
            faults.append(f"missing: {source.name} {list(source.shape)}")
        elif found.dtype not in FLOAT_BYTES:
            faults.append(f"unsupported type {found.dtype} (quantized?): {found.name}")
        elif found.shape != source.shape:
            faults.append(f"wrong shape: {found.name} {list(found.shape)}, the config needs {list(source.shape)}")
        else:
            matches.append(_Match(source, found))
    faults += [f"extra: {found.name} {list(found.shape)}" for found in available.values()]
    if faults:
        raise UsageError(
            f"the weights are not those of the config ({spec.architecture}):\n  " + "\n  ".join(faults),
            hint="the files are incomplete, or config.json belongs to another model",
        )
    return matches


def _renamed(spec: ModelSpec, stored: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
    """Stored tensors by the names that the spec expects, ignored ones and a copy of tied embeddings left out."""
    available: dict[str, StoredTensor] = {}
    for tensor in stored:
        name = tensor.name
        for pattern, replacement in spec.renames:
            name = re.sub(pattern, replacement, name)
        if any(re.search(pattern, name) for pattern in spec.ignored):
            continue
        if name in available:
            raise UsageError(f"{available[name].name} and {tensor.name} are the same weight by two names")
        available[name] = tensor
    if spec.tied_embeddings:
        embed, head = spec.weight_names["embed"][0], spec.weight_names["head"][0]
        copy = available.pop(head, None)
        if copy is not None:
            available.setdefault(embed, copy)
    return available


def _allocate(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Empty parameters by name."""
    return {
        parameter.name: torch.empty(parameter.shape, dtype=_dtype(spec, parameter, dtype), device=device)
        for parameter in parameters(spec)
    }


def _dtype(spec: ModelSpec, parameter: Parameter, dtype: torch.dtype) -> torch.dtype:
    """Norms stored with an offset stay in float32: bfloat16 would round 1 + w."""
    return torch.float32 if parameter.role == "norm" and spec.norm_offset else dtype


def _place(target: Tensor, stored: Tensor, source: Source) -> None:
    """Copies a checkpoint tensor to its place in a parameter."""
    parameter = source.parameter
    if parameter.transposed:
        stored = stored.transpose(-2, -1)
    if not parameter.alternating:
        target[source.index].copy_(stored)
        return
    # Outputs alternate between gate and up along the output axis; here all of gate comes first.
    size = parameter.parts[0]
    target[:, :size].copy_(stored[:, 0::2])
    target[:, size:].copy_(stored[:, 1::2])


def _finish(spec: ModelSpec, tensors: dict[str, Tensor]) -> None:
    """Adds the norms' offset, so that the decoder need not know of it."""
    if spec.norm_offset:
        for parameter in parameters(spec):
            if parameter.role == "norm":
                tensors[parameter.name].add_(spec.norm_offset)


def random_decoder(spec: ModelSpec, dtype: torch.dtype, device: torch.device, seed: int) -> Decoder:
    """A decoder with random weights, drawn on the device: matrices, biases and sinks normal with deviation 0.02,
    norms one. The same seed gives the same weights on the same kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = _allocate(spec, dtype, device)
    for parameter in parameters(spec):
        tensor = tensors[parameter.name]
        if parameter.role == "norm":
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02, generator=generator)
    return Decoder(spec, tensors)
