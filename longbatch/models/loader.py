"""From a model folder to a decoder: strict, without pickle, one copy from file to weight.

Every name and shape is checked against the spec before anything is allocated, and all that is wrong is reported at
once. Then each checkpoint tensor is copied, and cast, into its rows of the fused parameter on the device.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from longbatch.models.adapter import read_adapter
from longbatch.models.checkpoint import checkpoint_files, stored_tensors
from longbatch.models.decoder import Decoder
from longbatch.models.fp8 import Fp8Weight, Weight
from longbatch.models.matching import match_tensors
from longbatch.models.parameters import Parameter, Source, parameters
from longbatch.models.quantized import read_scheme
from longbatch.models.reading import read_weights
from longbatch.models.registry import read_json, read_spec
from longbatch.models.spec import ModelSpec


def load_decoder(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    weights_dtype: str = "auto",
    adapter: Path | None = None,
) -> Decoder:
    """The decoder of a model folder, weights in dtype on device. weights_dtype: as in `Settings`; a matrix is quantized
    as soon as it is complete, so that few of them are there in dtype at once. adapter: folder of a LoRA adapter that is
    merged into the weights.

    Raises `UsageError`: the model or its format is not supported, or its tensors are not exactly those of the
    config, in which case every missing, extra and mis-shaped one is named.
    """
    spec, scheme = read_spec(model_dir), read_scheme(read_json(model_dir / "config.json"))
    matches = match_tensors(spec, stored_tensors(checkpoint_files(model_dir)), scheme)
    updates = read_adapter(adapter, spec).updates if adapter else {}
    filling: dict[str, Tensor] = {}
    tensors: dict[str, Weight] = {}
    num_missing = Counter(match.source.parameter.name for match in matches)
    for match, weight in read_weights(matches, scheme, updates, device):
        parameter = match.source.parameter
        if parameter.name not in filling:
            filling[parameter.name] = _allocate(spec, parameter, dtype, device)
        _place(filling[parameter.name], weight, match.source)
        num_missing[parameter.name] -= 1
        if not num_missing[parameter.name]:
            tensors[parameter.name] = _finished(spec, parameter, filling.pop(parameter.name), weights_dtype)
    return Decoder(spec, tensors)


def _allocate(spec: ModelSpec, parameter: Parameter, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A parameter without values yet."""
    return torch.empty(parameter.shape, dtype=_dtype(spec, parameter, dtype), device=device)


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


def _finished(spec: ModelSpec, parameter: Parameter, tensor: Tensor, weights_dtype: str) -> Weight:
    """A complete parameter as the decoder holds it: norms with their offset, so that the decoder need not know of it,
    and the matrices of the layers quantized where that is asked for."""
    if parameter.role == "norm" and spec.norm_offset:
        tensor.add_(spec.norm_offset)
    return Fp8Weight.of(tensor) if weights_dtype == "fp8" and parameter.is_product else tensor


def random_decoder(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, seed: int, weights_dtype: str = "auto"
) -> Decoder:
    """A decoder with random weights, drawn on the device: matrices, biases and sinks normal with deviation 0.02,
    norms one. The same seed gives the same weights on the same kind of device, before they are quantized."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors: dict[str, Weight] = {}
    for parameter in parameters(spec):
        tensor = _allocate(spec, parameter, dtype, device)
        if parameter.role == "norm":
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02, generator=generator)
        quantizes = weights_dtype == "fp8" and parameter.is_product
        tensors[parameter.name] = Fp8Weight.of(tensor) if quantizes else tensor
    return Decoder(spec, tensors)
