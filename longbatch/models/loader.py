"""From a model folder to a decoder: strict, without pickle, one copy from file to weight.

Every name and shape is checked against the spec before anything is allocated, and all that is wrong is reported at
once. Then each checkpoint tensor is copied, and cast, into its rows of the fused parameter on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from longbatch.models.adapter import Update, read_adapter
from longbatch.models.checkpoint import checkpoint_files, stored_tensors
from longbatch.models.decoder import Decoder, Layer
from longbatch.models.fp8 import Fp8Weight, Weight
from longbatch.models.layout import LayerLayout, layer_layouts, number_bytes
from longbatch.models.matching import Match, match_tensors
from longbatch.models.parameters import Parameter, Source, parameters
from longbatch.models.quantized import Scheme, read_scheme
from longbatch.models.reading import Files, KeptFiles, MappedFiles, read_weights
from longbatch.models.registry import read_json, read_spec
from longbatch.models.spec import ModelSpec
from longbatch.models.streaming import DiskWeights, HostWeights, ReadLayer, StreamedLayers, layer_in, weights_in


def load_decoder(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    weights_dtype: str = "auto",
    adapter: Path | None = None,
    weights: str = "resident",
) -> Decoder:
    """The decoder of a model folder, weights in dtype for device. weights_dtype: as in `Settings`; a matrix is
    quantized as soon as it is complete, so that few of them are there in dtype at once. adapter: folder of a LoRA
    adapter that is merged into the weights. weights: where those of the layers are kept, `resident` on the device,
    `host` or `disk`; the numbers are the same.

    Raises `UsageError`: the model or its format is not supported, or its tensors are not exactly those of the
    config, in which case every missing, extra and mis-shaped one is named.
    """
    checkpoint = Checkpoint.open(model_dir, dtype, device, weights_dtype, adapter)
    spec, matches = checkpoint.spec, checkpoint.matches
    if weights == "resident":
        with MappedFiles() as files:
            return Decoder(spec, dict(checkpoint.read(matches, files)))
    layouts = layer_layouts(spec, dtype.itemsize, weights_dtype)
    with MappedFiles() as files:
        tensors = dict(checkpoint.read([match for match in matches if match.layer is None], files))
        if weights == "host":
            kept = HostWeights(layouts, device)
            places = _places(kept, layouts, dtype)
            checkpoint.fill([match for match in matches if match.layer is not None], places, files)
            return Decoder(spec, tensors, _layers(spec, kept, layouts, dtype, device))
    stored = DiskWeights(layouts, dtype, device, _reader(checkpoint))
    return Decoder(spec, tensors, StreamedLayers(spec, layouts, dtype, device, stored))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights of a model folder, found and not read yet, and what becomes of them."""

    spec: ModelSpec
    scheme: Scheme | None
    matches: list[Match]
    updates: Mapping[str, Update]
    dtype: torch.dtype
    device: torch.device
    weights_dtype: str

    @classmethod
    def open(
        cls, model_dir: Path, dtype: torch.dtype, device: torch.device, weights_dtype: str, adapter: Path | None
    ) -> Checkpoint:
        """Raises `UsageError`, as `load_decoder` does."""
        spec, scheme = read_spec(model_dir), read_scheme(read_json(model_dir / "config.json"))
        matches = match_tensors(spec, stored_tensors(checkpoint_files(model_dir)), scheme)
        updates = read_adapter(adapter, spec).updates if adapter else {}
        return cls(spec, scheme, matches, updates, dtype, device, weights_dtype)

    def read(
        self, matches: Sequence[Match], files: Files, places: Mapping[str, Weight] | None = None
    ) -> Iterator[tuple[str, Weight]]:
        """Every parameter of the matches, by name, as soon as it is complete; on the device, or in its place unless
        that is for a quantized one."""
        filling: dict[str, Tensor] = {}
        num_missing = Counter(match.source.parameter.name for match in matches)

        def into(match: Match) -> Tensor | None:
            return _part(begun(match.source.parameter), match.source)

        def begun(parameter: Parameter) -> Tensor:
            if parameter.name not in filling:
                place = None if places is None else places[parameter.name]
                filling[parameter.name] = (
                    place if isinstance(place, Tensor) else _allocate(self.spec, parameter, self.dtype, self.device)
                )
            return filling[parameter.name]

        for match, weight in read_weights(matches, self.scheme, self.updates, self.device, files, into):
            parameter = match.source.parameter
            _place(begun(parameter), weight, match.source)
            num_missing[parameter.name] -= 1
            if not num_missing[parameter.name]:
                finished = _finished(self.spec, parameter, filling.pop(parameter.name), self.weights_dtype)
                yield parameter.name, finished

    def fill(self, matches: Sequence[Match], places: Mapping[str, Weight], files: Files) -> None:
        """Put every parameter of the matches into its place, by name."""
        for name, weight in self.read(matches, files, places):
            _put(places[name], weight)


def _put(place: Weight, weight: Weight) -> None:
    """Copies a weight to its place, where it is not there yet."""
    if isinstance(place, Fp8Weight):
        assert isinstance(weight, Fp8Weight)
        place.data.view(torch.uint8).copy_(weight.data.view(torch.uint8))
        place.scale.copy_(weight.scale)
    elif place is not weight:
        assert isinstance(weight, Tensor)
        place.copy_(weight)


def _places(kept: HostWeights, layouts: Sequence[LayerLayout], dtype: torch.dtype) -> dict[str, Weight]:
    """The places of all layers' parameters in host memory, by name."""
    places: dict[str, Weight] = {}
    for buffer, layout in zip(kept.buffers, layouts, strict=True):
        places |= weights_in(buffer, layout, dtype)
    return places


def _layers(
    spec: ModelSpec, kept: HostWeights, layouts: Sequence[LayerLayout], dtype: torch.dtype, device: torch.device
) -> Sequence[Layer]:
    """Layers whose weights are in host memory; a CPU computes with them where they are."""
    if device.type != "cpu":
        return StreamedLayers(spec, layouts, dtype, device, kept)
    return tuple(
        layer_in(buffer, spec, index, layout, dtype)
        for index, (buffer, layout) in enumerate(zip(kept.buffers, layouts, strict=True))
    )


def _reader(checkpoint: Checkpoint) -> ReadLayer:
    """What reads a layer of a checkpoint from its files, whenever it is wanted."""
    matches: list[list[Match]] = [[] for _ in checkpoint.spec.layers]
    paths: list[set[Path]] = [set() for _ in matches]
    for match in checkpoint.matches:
        if match.layer is not None:
            matches[match.layer].append(match)
            paths[match.layer] |= {part.file for part in match.parts.values()}
            update = checkpoint.updates.get(match.source.name)
            paths[match.layer] |= set() if update is None else {update.a.file, update.b.file}
    files = KeptFiles(sorted(set().union(*paths)))

    def read(index: int, places: Mapping[str, Weight]) -> None:
        checkpoint.fill(matches[index], places, files)
        files.check(paths[index])

    return read


def _allocate(spec: ModelSpec, parameter: Parameter, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A parameter without values yet."""
    return torch.empty(parameter.shape, dtype=_dtype(spec, parameter, dtype), device=device)


def _dtype(spec: ModelSpec, parameter: Parameter, dtype: torch.dtype) -> torch.dtype:
    return dtype if number_bytes(spec, parameter, dtype.itemsize) == dtype.itemsize else torch.float32


def _part(target: Tensor, source: Source) -> Tensor | None:
    """The part of a parameter that a file's own bytes may be read into; None where there is none."""
    part = target[source.index]
    as_stored = not (source.parameter.transposed or source.parameter.alternating)
    return part if as_stored and part.device.type == "cpu" and part.is_contiguous() else None


def _place(target: Tensor, stored: Tensor, source: Source) -> None:
    """Copies a checkpoint tensor to its place in a parameter, unless it was read into it."""
    parameter = source.parameter
    if parameter.transposed:
        stored = stored.transpose(-2, -1)
    if not parameter.alternating:
        part = target[source.index]
        if part.data_ptr() != stored.data_ptr():
            part.copy_(stored)
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
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    weights_dtype: str = "auto",
    weights: str = "resident",
) -> Decoder:
    """A decoder with random weights, drawn on the device: matrices, biases and sinks normal with deviation 0.02,
    norms one. The same seed gives the same weights on the same kind of device, before they are quantized. weights: as
    for `load_decoder`; there is no disk that these could come from."""
    assert weights in ("resident", "host")
    layouts = layer_layouts(spec, dtype.itemsize, weights_dtype)
    kept = HostWeights(layouts, device) if weights == "host" else None
    places = {} if kept is None else _places(kept, layouts, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    tensors: dict[str, Weight] = {}
    for parameter in parameters(spec):
        tensor = _allocate(spec, parameter, dtype, device)
        if parameter.role == "norm":
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02, generator=generator)
        weight = Fp8Weight.of(tensor) if weights_dtype == "fp8" and parameter.is_product else tensor
        if parameter.name in places:
            _put(places[parameter.name], weight)
        else:
            tensors[parameter.name] = weight
    return Decoder(spec, tensors, None if kept is None else _layers(spec, kept, layouts, dtype, device))
