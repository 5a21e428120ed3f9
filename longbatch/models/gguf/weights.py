"""From the tensors of a GGUF file to one `model.safetensors`, a chunk of rows at a time.

Nothing larger than a chunk (or one expert) is in memory, whatever the size of the model: the safetensors header
follows from the shapes, so it is written first and the values follow in order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longbatch.models.gguf.architectures import Weight, architecture
from longbatch.models.gguf.reader import GgufError, GgufFile, GgufTensor

Values = NDArray[np.float32]

_SAFETENSORS_TYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}
# Read for the config, or derived from it: no weights of a checkpoint.
_CONFIG_TENSORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of the checkpoint. values: makes its float32 values, in row-major order, in pieces."""

    name: str
    shape: tuple[int, ...]
    values: Callable[[], Iterator[Values]]

    def num_bytes(self, dtype: str) -> int:
        size = _SAFETENSORS_TYPES[dtype][1]
        for length in self.shape:
            size *= length
        return size


def outputs(gguf: GgufFile, sizes: dict[str, int]) -> list[Output]:
    """The checkpoint's tensors, after checking that the file holds each one in its shape, and no others.
    Raises `GgufError`, naming what is missing, extra or misshapen."""
    found = architecture(gguf)
    if "token_embd.weight" not in gguf.tensors:
        raise GgufError("it lacks the tensor token_embd.weight")
    if sizes["layers"] > len(gguf.tensors):
        raise GgufError(f"it announces {sizes['layers']} layers and holds {len(gguf.tensors)} tensors: it is damaged")
    sizes = sizes | {"vocab": gguf.tensors["token_embd.weight"].num_rows}
    weights = [
        Weight("token_embd.weight", "model.embed_tokens.weight", ("vocab", "hidden")),
        Weight("output_norm.weight", "model.norm.weight", ("hidden",), "norm"),
        Weight("output.weight", "lm_head.weight", ("vocab", "hidden"), optional=True),
    ]
    for layer in range(sizes["layers"]):
        for weight in found.weights:
            target = f"model.layers.{layer}.{weight.target}"
            weights.append(weight._replace(source=f"blk.{layer}.{weight.source}", target=target))
    present = [weight for weight in weights if weight.source in gguf.tensors]
    missing = [weight.source for weight in weights if weight.source not in gguf.tensors and not weight.optional]
    if missing:
        raise GgufError(f"it lacks {_some('tensor', missing)}")
    extra = gguf.tensors.keys() - {weight.source for weight in weights} - _CONFIG_TENSORS
    if extra:
        raise GgufError(f"it holds {_some('tensor', sorted(extra))}, which {gguf.architecture} models here do not have")
    result: list[Output] = []
    for weight in present:
        expected = tuple(sizes[name] for name in weight.shape)
        if gguf.tensors[weight.source].shape != expected:
            shape = list(gguf.tensors[weight.source].shape)
            raise GgufError(f"its tensor {weight.source} has the shape {shape}, its metadata say {list(expected)}")
        edit = found.norm_edit if weight.edit == "norm" else weight.edit
        result.extend(_edited(gguf, weight._replace(edit=edit), sizes["head"]))
    return result


def _some(noun: str, names: list[str]) -> str:
    shown = ", ".join(name[:80] for name in names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"the {noun}{'s' if len(names) > 1 else ''} {shown}{more}"


def _edited(gguf: GgufFile, weight: Weight, head: int) -> list[Output]:
    tensor = gguf.tensors[weight.source]
    rows = partial(gguf.rows, tensor)
    match weight.edit:
        case "":
            return [Output(weight.target, tensor.shape, rows)]
        case "minus_one":
            return [Output(weight.target, tensor.shape, lambda: (chunk - np.float32(1) for chunk in rows()))]
        case "unpermute":
            return [Output(weight.target, tensor.shape, partial(_unpermuted, gguf, tensor, head))]
        case "split":
            experts, shape = tensor.shape[0], tensor.shape[1:]
            return [
                Output(weight.target.format(e), shape, partial(rows, e * shape[0], (e + 1) * shape[0]))
                for e in range(experts)
            ]
        case "transpose":
            shape = (tensor.shape[0], tensor.shape[2], tensor.shape[1])
            return [Output(weight.target, shape, lambda: (expert.T for expert in _experts(gguf, tensor)))]
        case "gate_up":
            up = gguf.tensors[weight.source.replace("ffn_gate_", "ffn_up_")]
            shape = (tensor.shape[0], tensor.shape[2], 2 * tensor.shape[1])
            return [Output(weight.target, shape, partial(_interleaved, gguf, tensor, up))]
        case "gate_up_bias":
            up = gguf.tensors[weight.source.replace("ffn_gate_", "ffn_up_")]
            shape = (tensor.shape[0], 2 * tensor.shape[1])
            pairs = partial(zip, rows(), gguf.rows(up), strict=True)
            return [Output(weight.target, shape, lambda: (np.stack(pair, axis=-1) for pair in pairs()))]
        case _:  # with_gate: written with its gate
            return []


def _unpermuted(gguf: GgufFile, tensor: GgufTensor, head: int) -> Iterator[Values]:
    """Rows of each head from llama.cpp's interleaved RoPE order (pairs) back to halves."""
    if len(tensor.shape) == 1:
        (bias,) = gguf.rows(tensor)
        yield bias.reshape(-1, head // 2, 2).swapaxes(1, 2)
        return
    for chunk in gguf.rows(tensor, step=head):
        yield chunk.reshape(-1, head // 2, 2, chunk.shape[-1]).swapaxes(1, 2)


def _experts(gguf: GgufFile, tensor: GgufTensor) -> Iterator[Values]:
    num_experts, num_rows = tensor.shape[:2]
    for expert in range(num_experts):
        yield np.concatenate(list(gguf.rows(tensor, expert * num_rows, (expert + 1) * num_rows)))


def _interleaved(gguf: GgufFile, gate: GgufTensor, up: GgufTensor) -> Iterator[Values]:
    """Per expert [hidden, 2 * expert_mlp]: gate and up alternate."""
    for gate_rows, up_rows in zip(_experts(gguf, gate), _experts(gguf, up), strict=True):
        yield np.stack([gate_rows.T, up_rows.T], axis=-1)


def write_safetensors(path: Path, tensors: list[Output], dtype: str) -> None:
    """Writes the checkpoint as float32, float16 or bfloat16. Raises `GgufError` for values that float16 cannot
    hold."""
    code = _SAFETENSORS_TYPES[dtype][0]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + tensor.num_bytes(dtype)
        header[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for values in tensor.values():
                file.write(_encode(np.ascontiguousarray(values), dtype, tensor.name).data)
        file.flush()
        os.fsync(file.fileno())


def _encode(values: Values, dtype: str, name: str) -> NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]:
    if dtype == "float32":
        return values
    if dtype == "float16":
        if np.abs(values).max() > np.finfo(np.float16).max:
            raise GgufError(f"its tensor {name} holds values that float16 cannot; use bfloat16 or float32")
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype(np.uint16)
