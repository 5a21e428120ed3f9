"""Which tensors a decoder holds, and which checkpoint tensors make each of them. Torch-free.

A decoder fuses what a checkpoint keeps apart (q, k and v; gate and up; the experts of a layer), so that each is
one matrix product. A family says how its checkpoint names the parts (`ModelSpec.weight_names`); the shapes follow
from the spec, so a checkpoint can be checked tensor by tensor before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from longbatch.models.spec import LayerSpec, ModelSpec, MoeSpec

# The matrices that each token of a layer goes through, but for a mixture's router: what `--weights-dtype` is about.
PRODUCTS = frozenset({"qkv", "out", "gate_up", "down", "expert_gate_up", "expert_down"})


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the decoder.

    key: its name in `ModelSpec.weight_names`. layer: layer number, None outside the layers. shape: as held by the
    decoder; a matrix is [out, in], the matrices of all experts [experts, out, in]. parts: output rows of the
    checkpoint tensors that are stacked to make it, together the output rows of `shape`. role: matrix, norm, bias
    or sinks. transposed: the checkpoint keeps [.., in, out]. alternating: it keeps gate and up output by output.
    """

    key: str
    layer: int | None
    shape: tuple[int, ...]
    parts: tuple[int, ...]
    role: str = "matrix"
    transposed: bool = False
    alternating: bool = False

    @property
    def name(self) -> str:
        """Its name in the decoder, such as `layers.3.qkv`."""
        return self.key if self.layer is None else f"layers.{self.layer}.{self.key}"

    @property
    def is_product(self) -> bool:
        """Whether it is one of the matrices that may be quantized."""
        return self.key in PRODUCTS


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor and where its numbers go: `parameter[index]`. shape: as the checkpoint keeps it."""

    name: str
    shape: tuple[int, ...]
    parameter: Parameter
    index: tuple[int | slice, ...]


def parameters(spec: ModelSpec) -> Iterator[Parameter]:
    """Every tensor of the decoder, in the order of use."""
    hidden = spec.hidden_size
    yield Parameter("embed", None, (spec.vocab_size, hidden), (spec.vocab_size,))
    for number, layer in enumerate(spec.layers):
        yield from _attention(number, layer, hidden)
        yield _norm("mlp_norm", number, hidden)
        if layer.moe is None:
            yield from _dense(number, layer, hidden)
        else:
            yield from _experts(number, layer.moe, hidden)
        if layer.sandwich:
            yield _norm("mlp_out_norm", number, hidden)
    yield _norm("final_norm", None, hidden)
    if not spec.tied_embeddings:
        yield Parameter("head", None, (spec.vocab_size, hidden), (spec.vocab_size,))


def weight_bytes(spec: ModelSpec, width: int, weights_dtype: str) -> int:
    """Bytes of the decoder's matrices, embeddings included, with `width` bytes for each number that is not quantized.

    weights_dtype: as in `Settings`. One e4m3 number is a byte, and each row of a matrix has a float32 scale.
    """
    if weights_dtype != "fp8":
        return spec.num_parameters * width
    total = 0
    for parameter in parameters(spec):
        if parameter.role == "matrix":
            size = prod(parameter.shape)
            total += size + 4 * (size // parameter.shape[-1]) if parameter.is_product else size * width
    return total


def _norm(key: str, layer: int | None, size: int) -> Parameter:
    return Parameter(key, layer, (size,), (size,), role="norm")


def _attention(number: int, layer: LayerSpec, hidden: int) -> Iterator[Parameter]:
    heads, groups = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    qkv = (heads, groups, groups)
    yield _norm("input_norm", number, hidden)
    yield Parameter("qkv", number, (sum(qkv), hidden), qkv)
    if layer.qkv_bias:
        yield Parameter("qkv_bias", number, (sum(qkv),), qkv, role="bias")
    if layer.qk_norm:
        yield _norm("q_norm", number, layer.head_dim)
        yield _norm("k_norm", number, layer.head_dim)
    if layer.sinks:
        yield Parameter("sinks", number, (layer.num_heads,), (layer.num_heads,), role="sinks")
    yield Parameter("out", number, (hidden, heads), (hidden,))
    if layer.out_bias:
        yield Parameter("out_bias", number, (hidden,), (hidden,), role="bias")
    if layer.sandwich:
        yield _norm("attention_out_norm", number, hidden)


def _dense(number: int, layer: LayerSpec, hidden: int) -> Iterator[Parameter]:
    size = layer.intermediate_size
    yield Parameter("gate_up", number, (2 * size, hidden), (size, size))
    if layer.mlp_bias:
        yield Parameter("gate_up_bias", number, (2 * size,), (size, size), role="bias")
    yield Parameter("down", number, (hidden, size), (hidden,))
    if layer.mlp_bias:
        yield Parameter("down_bias", number, (hidden,), (hidden,), role="bias")


def _experts(number: int, moe: MoeSpec, hidden: int) -> Iterator[Parameter]:
    experts, size = moe.num_experts, moe.intermediate_size
    special = moe.style == "gpt_oss"
    yield Parameter("router", number, (experts, hidden), (experts,))
    if special:
        yield Parameter("router_bias", number, (experts,), (experts,), role="bias")
    yield Parameter(
        "expert_gate_up", number, (experts, 2 * size, hidden), (size, size), transposed=special, alternating=special
    )
    if special:
        yield Parameter("expert_gate_up_bias", number, (experts, 2 * size), (size, size), role="bias", alternating=True)
    yield Parameter("expert_down", number, (experts, hidden, size), (hidden,), transposed=special)
    if special:
        yield Parameter("expert_down_bias", number, (experts, hidden), (hidden,), role="bias")


def sources(parameter: Parameter, spec: ModelSpec) -> Iterator[Source]:
    """The checkpoint tensors that make a parameter. One name stands for the whole of it, several for its parts."""
    names = spec.weight_names[parameter.key]
    if len(names) == 1:
        rows = [slice(None)]
    else:
        rows = [slice(end - size, end) for size, end in zip(parameter.parts, accumulate(parameter.parts), strict=True)]
    for name, part in zip(names, rows, strict=True):
        if "{expert}" in name:
            for expert in range(parameter.shape[0]):
                yield _source(parameter, name.format(layer=parameter.layer, expert=expert), (expert, part))
        elif parameter.key.startswith("expert_"):
            yield _source(parameter, name.format(layer=parameter.layer), (slice(None), part))
        else:
            yield _source(parameter, name.format(layer=parameter.layer), (part,))


def _source(parameter: Parameter, name: str, index: tuple[int | slice, ...]) -> Source:
    shape = list(parameter.shape)
    for axis, part in enumerate(index):
        if isinstance(part, slice):
            shape[axis] = len(range(*part.indices(shape[axis])))
    kept = [size for axis, size in enumerate(shape) if axis >= len(index) or isinstance(index[axis], slice)]
    if parameter.transposed:
        kept[-2:] = kept[-1], kept[-2]
    return Source(name, tuple(kept), parameter, index)
