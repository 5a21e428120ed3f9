"""Which stored tensors make which tensor of a decoder, checked whole before anything is read. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from longbatch.errors import UsageError
from longbatch.models.checkpoint import FLOAT_BYTES, StoredTensor
from longbatch.models.parameters import Source, parameters, sources
from longbatch.models.quantized import Scheme
from longbatch.models.quantized.stored import UNREAD, drop_empty_biases, take_parts
from longbatch.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Match:
    """A tensor of the decoder's sources, found in the files. parts: by the names of the quantization scheme where it
    is kept quantized; else one part of its own name."""

    source: Source
    parts: Mapping[str, StoredTensor]
    quantized: bool = False

    @property
    def first(self) -> StoredTensor:
        """The part that comes first: what a load is sorted by."""
        return next(iter(self.parts.values()))

    @property
    def layer(self) -> int | None:
        """The number of the layer that it is in."""
        return self.source.parameter.layer


def match_tensors(spec: ModelSpec, stored: Mapping[str, StoredTensor], scheme: Scheme | None) -> list[Match]:
    """Pairs every source of the decoder with the stored tensors that hold it. Raises `UsageError`, naming all that
    is missing, extra, mis-shaped or of a type that neither the decoder nor the scheme reads."""
    available = renamed(spec, stored.values(), scheme)
    wanted = [source for parameter in parameters(spec) for source in sources(parameter, spec)]
    matches: list[Match] = []
    faults: list[str] = []
    for source in wanted:
        parts = take_parts(scheme, source.name, source.shape, available, faults) if scheme else None
        if parts is not None:
            matches.append(Match(source, parts, quantized=True))
            continue
        found = available.pop(source.name, None)
        if found is None:
            faults.append(f"missing: {source.name} {list(source.shape)}")
        elif found.dtype not in FLOAT_BYTES:
            faults.append(f"unsupported type {found.dtype} (quantized?): {found.name}")
        elif found.shape != source.shape:
            faults.append(f"wrong shape: {found.name} {list(found.shape)}, the config needs {list(source.shape)}")
        else:
            matches.append(Match(source, {found.name: found}))
    drop_empty_biases((match.source.name.removesuffix(".weight") for match in matches if match.quantized), available)
    faults += [f"extra: {found.name} {list(found.shape)}" for found in available.values()]
    if faults:
        raise UsageError(
            f"the weights are not those of the config ({spec.architecture}):\n  " + "\n  ".join(faults),
            hint="the files are incomplete, or config.json belongs to another model",
        )
    return matches


def renamed(spec: ModelSpec, stored: Iterable[StoredTensor], scheme: Scheme | None = None) -> dict[str, StoredTensor]:
    """Stored tensors by the names that the spec expects, ignored ones and a copy of tied embeddings left out."""
    ignored = (*spec.ignored, UNREAD) if scheme else spec.ignored
    available: dict[str, StoredTensor] = {}
    for tensor in stored:
        name = tensor.name
        for pattern, replacement in spec.renames:
            name = re.sub(pattern, replacement, name)
        if any(re.search(pattern, name) for pattern in ignored):
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
