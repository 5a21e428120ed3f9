"""A decoder built from its spec and its tensors. It computes and holds weights; the engine decides what runs when.

Methods take packed tokens and are meant to be called under `torch.inference_mode`. The residual stream is
updated in place: `out` and `mlp` add to the x that they are given and return it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from longbatch.models.blocks import Attention, DenseMlp, rms_norm
from longbatch.models.fp8 import Rows, Weight
from longbatch.models.linear import linear
from longbatch.models.moe import MoeMlp
from longbatch.models.parameters import PRODUCTS, parameters
from longbatch.models.rope import Rope, RopeValues
from longbatch.models.spec import LayerSpec, ModelSpec, RopeSpec


class Layer:
    """One decoder layer, driven tile by tile:

        n = layer.norm(x)
        q, k, v = layer.qkv(n, rope)        or q and kv apart
        x = layer.out(x, attention)         # adds in place
        x = layer.mlp(x)                    # adds in place

    rope_index: which of `Decoder.ropes` it rotates by, None for none. sinks: attention sink logits [H] or None.
    products: the matrices that may be quantized, then n is too. weights: the other tensors.
    """

    def __init__(
        self,
        spec: LayerSpec,
        norm_eps: float,
        weights: Mapping[str, Tensor],
        products: Mapping[str, Weight],
        rope_index: int | None = None,
    ) -> None:
        self.spec = spec
        self.rope_index = rope_index
        self._eps = norm_eps
        self._input_norm = weights["input_norm"]
        self._mlp_out_norm = weights.get("mlp_out_norm")
        self._attention = Attention(spec, norm_eps, weights, products)
        self._mlp = (DenseMlp if spec.moe is None else MoeMlp)(spec, norm_eps, weights, products)

    @property
    def sinks(self) -> Tensor | None:
        """Attention sink logits [H], where the family has them."""
        return self._attention.sinks

    @property
    def can_be_captured(self) -> bool:
        """Whether it may be part of a CUDA graph."""
        return self._mlp.can_be_captured

    def norm(self, x: Tensor) -> Rows:
        """The normed tokens [T, hidden] that q, kv and qkv take."""
        return self._attention.norm(x, self._input_norm)

    def q(self, n: Rows, rope: RopeValues | None) -> Tensor:
        """Queries [T, H, D], normed and rotated."""
        return self._attention.q(n, rope)

    def kv(self, n: Rows, rope: RopeValues | None) -> tuple[Tensor, Tensor]:
        """Keys, normed and rotated, and values: both [T, Hkv, D]; values are a strided view."""
        return self._attention.kv(n, rope)

    def qkv(self, n: Rows, rope: RopeValues | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values in one matrix product."""
        return self._attention.qkv(n, rope)

    def out(self, x: Tensor, attention: Tensor) -> Tensor:
        """x + o_proj(attention [T, H, D]), written into x [T, hidden]."""
        return self._attention.out(x, attention)

    def mlp(self, x: Tensor) -> Tensor:
        """x + mlp(norm(x)), written into x [T, hidden]."""
        if self._mlp_out_norm is None:
            return self._mlp.add_to(x)
        return x.add_(rms_norm(self._mlp(x), self._mlp_out_norm, self._eps))


def build_layer(spec: ModelSpec, index: int, tensors: Mapping[str, Weight]) -> Layer:
    """A layer of its tensors, by their keys."""
    weights: dict[str, Tensor] = {}
    products: dict[str, Weight] = {}
    for key, tensor in tensors.items():
        if key in PRODUCTS:
            products[key] = tensor
        else:
            assert isinstance(tensor, Tensor)
            weights[key] = tensor
    layer = spec.layers[index]
    rope_index = None if layer.rope is None else _distinct_ropes(spec).index(layer.rope)
    return Layer(layer, spec.norm_eps, weights, products, rope_index)


def _distinct_ropes(spec: ModelSpec) -> list[RopeSpec]:
    distinct: list[RopeSpec] = []
    for layer in spec.layers:
        if layer.rope is not None and layer.rope not in distinct:
            distinct.append(layer.rope)
    return distinct


class Decoder:
    """Embedding, layers, final norm and vocabulary projection.

    tensors: one for each of `parameters(spec)`, by name; norms already hold `norm_offset`; the matrices of the layers
    may be quantized. layers: where the layers bring their weights themselves, as `StreamedLayers` do; then tensors has
    the others only. ropes: the distinct rotations of the layers; the engine asks each once per tile and hands a layer
    the values of its `rope_index`. num_bytes: of the tensors.

    `layers` is drawn one at a time, in order or by number: a layer may be used until the next one is drawn.
    """

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, Weight], layers: Sequence[Layer] | None = None) -> None:
        self.spec = spec
        own: dict[str, Tensor] = {}
        inner: list[dict[str, Weight]] = [{} for _ in spec.layers]
        for parameter in parameters(spec):
            if parameter.layer is None:
                tensor = tensors[parameter.name]
                assert isinstance(tensor, Tensor)
                own[parameter.key] = tensor
            elif layers is None:
                inner[parameter.layer][parameter.key] = tensors[parameter.name]
        self._embed = own["embed"]
        self._head = own.get("head", self._embed)
        self._final_norm = own["final_norm"]
        self.dtype: torch.dtype = self._embed.dtype
        self.device: torch.device = self._embed.device
        # The scale is rounded to the weights' dtype, as Gemma was trained.
        self._embed_scale = float(torch.tensor(spec.embed_scale, dtype=self.dtype))
        self.ropes = tuple(Rope.build(rope, self.device) for rope in _distinct_ropes(spec))
        self.layers: Sequence[Layer] = (
            tuple(build_layer(spec, index, weights) for index, weights in enumerate(inner))
            if layers is None
            else layers
        )
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())

    @property
    def can_be_captured(self) -> bool:
        """Whether a forward may be a CUDA graph: the weights stay where they are, and no size comes from the device."""
        return isinstance(self.layers, tuple) and all(layer.can_be_captured for layer in self.layers)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [T, hidden] of token ids [T], int32 or int64."""
        x = F.embedding(ids, self._embed)
        return x if self.spec.embed_scale == 1.0 else x.mul_(self._embed_scale)

    def final_norm(self, x: Tensor) -> Tensor:
        """The hidden state [T, hidden] that `logits` takes."""
        return rms_norm(x, self._final_norm, self.spec.norm_eps)

    def logits(self, h: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits [T, vocab] in float32 of final-normed states h [T, hidden], the final soft-cap applied; in `out`, if
        it is given."""
        logits = linear(h, self._head)
        logits = logits.to(torch.float32) if out is None else out.copy_(logits)
        cap = self.spec.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
