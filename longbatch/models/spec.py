"""What a decoder is, in numbers and names: the torch-free description that every model family fills in.

The plan reads it to price a run, the loader to find weights, the decoder to build its blocks. A family is one
file in `longbatch/models/families/` with a function `describe(config: dict) -> ModelSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of one kind of layer (rotate-half convention unless `interleaved`).

    kind: default, linear, dynamic, yarn, llama3, longrope (transformers' names). dim: rotated dimensions, at
    most the head dimension. original_length: positions seen in training before the scaling, where used.
    parameters: the scaling's own numbers, as in the model's config.
    """

    kind: str
    theta: float
    dim: int
    original_length: int
    max_length: int
    parameters: dict[str, float | list[float] | bool] = field(default_factory=dict)
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """One stream of cache entries that a layer writes for each token. window: tokens kept, None for all."""

    name: str
    heads: int
    dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Sparse mixture of experts. score: softmax_then_topk or topk_then_softmax. renormalize: divide the chosen
    weights by their sum. style: `swiglu`, or `gpt_oss` (biased; gate and up clamped at `limit`, the gate's sigmoid
    steepened by `alpha`; checkpoints keep the experts transposed, gate and up columns alternating)."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    score: str
    renormalize: bool
    style: str
    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer.

    window: keys a query sees, itself included; None for all. scale: factor on q.k before the softmax.
    softcap: tanh cap of attention scores. sinks: a learned logit per head joins the softmax's sum.
    qk_norm: RMSNorm over the head dimension of q and k before RoPE. sandwich: Gemma's norms after attention
    and MLP as well as before. activation: silu or gelu_tanh. moe: None for a dense MLP.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    sandwich: bool = False
    activation: str = "silu"
    intermediate_size: int = 0
    moe: MoeSpec | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a query sees every key before it, by an uncapped softmax: what sparse patterns can replace."""
        return self.window is None and self.softcap is None

    @property
    def streams(self) -> tuple[StreamSpec, ...]:
        """The cache streams of this layer."""
        return (
            StreamSpec("k", self.num_kv_heads, self.head_dim, self.window),
            StreamSpec("v", self.num_kv_heads, self.head_dim, self.window),
        )


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole decoder. norm_offset: 1.0 where weights are stored as (w - 1), as in Gemma. embed_scale: factor
    on the embeddings. max_length: longest sequence the config allows.

    How a checkpoint names its tensors: renames are (regular expression, replacement) pairs applied to every
    name in turn; ignored are regular expressions of (renamed) tensors that carry no weights of ours (rotary
    buffers, vision towers); weight_names maps each parameter of `longbatch.models.parameters` to the checkpoint
    tensors that are stacked to make it, with places for {layer} and {expert}.
    """

    family: str
    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_length: int
    tied_embeddings: bool
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    final_softcap: float | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    renames: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    weight_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def kv_entries_per_token(self) -> int:
        """Numbers that one token adds to the cache over all layers, windows disregarded."""
        return sum(stream.heads * stream.dim for layer in self.layers for stream in layer.streams)

    @property
    def num_parameters(self) -> int:
        """Parameters of the decoder, embeddings included."""
        total = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        for layer in self.layers:
            q = layer.num_heads * layer.head_dim
            kv = layer.num_kv_heads * layer.head_dim
            total += self.hidden_size * (2 * q + 2 * kv)
            if layer.moe is None:
                total += 3 * self.hidden_size * layer.intermediate_size
            else:
                expert = 3 * self.hidden_size * layer.moe.intermediate_size
                total += layer.moe.num_experts * (expert + self.hidden_size)
        return total

    @property
    def matmul_flops_per_token(self) -> int:
        """Floating-point operations of the matrix products of all layers for one token, attention and the
        vocabulary projection left out."""
        total = 0
        for layer in self.layers:
            q = layer.num_heads * layer.head_dim
            kv = layer.num_kv_heads * layer.head_dim
            total += self.hidden_size * (2 * q + 2 * kv)
            if layer.moe is None:
                total += 3 * self.hidden_size * layer.intermediate_size
            else:
                expert = 3 * self.hidden_size * layer.moe.intermediate_size
                total += layer.moe.experts_per_token * expert + self.hidden_size * layer.moe.num_experts
        return 2 * total
