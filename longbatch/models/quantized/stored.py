"""A quantized weight among the stored tensors: its parts found, and all that is wrong with them named. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

from longbatch.models.checkpoint import FLOAT_BYTES, StoredTensor
from longbatch.models.quantized.scheme import Part, Scheme

# Scales of activations and of K/V, which nothing here uses.
UNREAD = r"\.(input|output|q|k|v|kv)_scale$"
_WEIGHT = ".weight"


def take_parts(
    scheme: Scheme, name: str, shape: tuple[int, ...], available: MutableMapping[str, StoredTensor], faults: list[str]
) -> dict[str, StoredTensor] | None:
    """The parts of a weight by their names in the scheme, taken out of the available tensors; None if the weight is
    not kept quantized. What is missing or mis-shaped is added to faults."""
    plain = available.get(name)
    if len(shape) != 2 or not name.endswith(_WEIGHT) or (plain is not None and plain.dtype in FLOAT_BYTES):
        return None
    module = name.removesuffix(_WEIGHT)
    wanted = scheme.parts((shape[0], shape[1]))
    if not any(f"{module}.{suffix}" in available for part in wanted for suffix in part.suffixes):
        return None
    found: dict[str, StoredTensor] = {}
    for part in wanted:
        known = [f"{module}.{suffix}" for suffix in part.suffixes]
        tensor = next((available.pop(key) for key in known if key in available), None)
        fault = _fault(part, module, tensor)
        if fault is not None:
            faults.append(fault)
        elif tensor is not None:
            found[part.suffixes[0]] = tensor
    return found


def drop_empty_biases(modules: Iterable[str], available: MutableMapping[str, StoredTensor]) -> None:
    """Takes out of the available tensors the biases of zeros that some tools store for modules that have none."""
    for module in modules:
        bias = available.get(f"{module}.bias")
        if bias is not None and bias.dtype in FLOAT_BYTES and not any(_bytes(bias)):
            del available[f"{module}.bias"]


def _bytes(tensor: StoredTensor) -> bytes:
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        return stream.read(tensor.stop - tensor.start)


def _fault(part: Part, module: str, tensor: StoredTensor | None) -> str | None:
    shapes = " or ".join(str(list(shape)) for shape in part.shapes)
    if tensor is None:
        return None if part.optional else f"missing: {module}.{' or '.join(part.suffixes)} {shapes}"
    if tensor.dtype not in part.dtypes:
        return f"unsupported type {tensor.dtype}: {tensor.name}, the quantization needs {' or '.join(part.dtypes)}"
    if tensor.shape not in part.shapes:
        return f"wrong shape: {tensor.name} {list(tensor.shape)}, the config needs {shapes}"
    return None
