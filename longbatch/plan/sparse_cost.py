"""What a pattern costs at a length: the share of the causal area that it selects, and seconds on a measured device.

The share of `vertical_slash` depends on where a head's keys lie and not on its budgets alone. They are placed as in
trained models: a quarter of the distances form one local band, the others lie in clusters of 64 to 256 at log-uniform
distances. A profile's densities are not asked: each is one number for documents of several lengths together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from longbatch.models.spec import LayerSpec
from longbatch.plan.sparse_rates import SparseRates
from longbatch.sparsity import PATTERNS, LayerPatterns, PatternSpec

BLOCK = 64
# Neighbouring distances in a cluster, on average.
CLUSTER = 160
# Lengths that `break_even` looks at: from the first one up to the last, twelve to each doubling.
SHORTEST, LONGEST, STEPS = 256, 1 << 24, 12


def causal_pairs(length: int) -> int:
    """(query, key) pairs of a whole prompt under dense causal attention."""
    return length * (length + 1) // 2


def window_pairs(length: int, window: float) -> float:
    """Pairs where each query sees at most `window` keys, itself included."""
    seen = min(length, window)
    return seen * (seen + 1) / 2 + (length - seen) * seen


@lru_cache(maxsize=1 << 14)
def density(spec: PatternSpec, length: int) -> float:
    """Share of the causal pairs that a pattern selects at a length, above 0 and at most 1, as it is predicted. Raises
    KeyError for a pattern that no model is known of."""
    return max(1.0 / length, min(1.0, _SHARES[spec.name](spec, length)))


def selection_seconds(
    spec: PatternSpec,
    length: int,
    head_dim: int,
    rates: SparseRates,
    *,
    heads: int = 1,
    shared: bool = False,
    share: float | None = None,
) -> float:
    """Seconds that one selection of a sparse layer adds at a length: estimate and attention of the `heads` query heads
    that use it. shared: they are a kv group's and run together. share: density, where it is known."""
    share = density(spec, length) if share is None else share
    flops = rates.shared_flops if shared else rates.ranges_flops
    if PATTERNS[spec.name].kind == "blocks":
        flops = rates.blocks_flops
    attention = heads * 4 * head_dim * share * causal_pairs(length) / flops
    return attention + _estimate_seconds(spec, length, head_dim, rates, heads, shared)


def dense_seconds(length: int, layer: LayerSpec, rates: SparseRates) -> float:
    """Seconds of dense attention of a layer; its window counts."""
    pairs = window_pairs(length, length if layer.window is None else layer.window)
    return layer.num_heads * 4 * layer.head_dim * pairs / rates.dense_flops


def layer_seconds(
    patterns: LayerPatterns,
    length: int,
    layer: LayerSpec,
    rates: SparseRates,
    shares: Sequence[float] | None = None,
) -> float:
    """Seconds of a layer's attention under its patterns; a layer of dense heads takes the dense path. shares: density
    of each selection at this length, where they are known."""
    if patterns.is_dense:
        return dense_seconds(length, layer, rates)
    heads = layer.num_heads // layer.num_kv_heads if patterns.shared else 1
    total = rates.layer_seconds
    for index, spec in enumerate(patterns.heads):
        share = None if shares is None else shares[index]
        total += selection_seconds(
            spec, length, layer.head_dim, rates, heads=heads, shared=patterns.shared, share=share
        )
    return total


def break_even(layers: Sequence[tuple[LayerSpec, LayerPatterns]], rates: SparseRates) -> int | None:
    """The shortest length from which on attention under the patterns is predicted to be faster than dense attention;
    None where it never is, up to 16M tokens. Layers whose heads are all dense do not count."""
    sparse = [(layer, patterns) for layer, patterns in layers if not patterns.is_dense]
    steps = int(STEPS * math.log2(LONGEST / SHORTEST))
    lengths = [round(SHORTEST * 2 ** (step / STEPS)) for step in range(steps + 1)]
    found = None
    for length in reversed(lengths) if sparse else ():
        taken = sum(layer_seconds(patterns, length, layer, rates) for layer, patterns in sparse)
        if taken >= sum(dense_seconds(length, layer, rates) for layer, _ in sparse):
            break
        found = length
    return found


# --------------------------------------------------------------------------------------------- shares


def _window_share(length: int, keys: float) -> float:
    return window_pairs(length, keys) / causal_pairs(length)


def _tri_shape(spec: PatternSpec, length: int) -> float:
    keys, last = spec["sinks"] + spec["window"], min(int(spec["last"]), length)
    before = length - last
    return (window_pairs(before, keys) + causal_pairs(length) - causal_pairs(before)) / causal_pairs(length)


def _vertical_slash(spec: PatternSpec, length: int) -> float:
    columns, distances = spec["vertical"], spec["slash"]
    if columns >= length or distances >= length:
        return 1.0
    band = max(100.0, distances / 4)
    if band + BLOCK >= length:
        return 1.0
    clusters = max(0.0, distances - band) / CLUSTER
    # Steps of equal ratio, so that a cluster is equally likely in each; length - t pairs lie at distance t.
    edges = np.geomspace(band + BLOCK / 2, length, 129)
    middle, width = np.sqrt(edges[1:] * edges[:-1]), np.diff(edges)
    hit = clusters * (CLUSTER + BLOCK - 1) / (middle * math.log(length / band))
    seen = 1 - np.exp(-hit) * (1 - columns / length)
    near = window_pairs(length, float(edges[0]))
    return float(near + np.sum((length - middle) * width * seen)) / causal_pairs(length)


def _block_sparse(spec: PatternSpec, length: int) -> float:
    most = _window_share(length, spec["top_k"] * spec["block"])
    # How many blocks hold a softmax mass is the data's business; a head that wants it this way spreads out little.
    return most if not spec["mass"] else most * spec["mass"] / 2


def _antidiagonal(spec: PatternSpec, length: int) -> float:
    return float(spec["threshold"]) / 3 + _window_share(length, spec["block"])


def _strided(spec: PatternSpec, length: int) -> float:
    return _window_share(length, spec["local"] * spec["block"]) + 1 / spec["stride"]


def _stripes(spec: PatternSpec, length: int) -> float:
    # How many keys are worth more than a small weight is the data's business. Roughly what heads of trained models need
    # at 4K tokens; longer prompts need a smaller share.
    keys = 0.08 - 0.09 * math.log(max(1 - float(spec["mass"]), 1e-5))
    return _window_share(length, spec["window"]) + keys * float(min(1.0, (4096 / length) ** 0.25))


_SHARES: dict[str, Callable[[PatternSpec, int], float]] = {
    "dense": lambda spec, length: 1.0,
    "a_shape": lambda spec, length: _window_share(length, spec["sinks"] + spec["window"]),
    "tri_shape": _tri_shape,
    "vertical_slash": _vertical_slash,
    "block_sparse": _block_sparse,
    "antidiagonal": _antidiagonal,
    "strided": _strided,
    "stripes": _stripes,
}


def _estimate_seconds(
    spec: PatternSpec, length: int, head_dim: int, rates: SparseRates, heads: int, shared: bool
) -> float:
    if spec.name == "vertical_slash":
        return heads * length * (rates.shared_estimate_seconds if shared else rates.estimate_seconds)
    if spec.name == "block_sparse":
        return heads * (length / BLOCK) ** 2 / 2 * rates.pooled_seconds
    if spec.name == "stripes":
        return heads * 4 * head_dim * causal_pairs(length) / spec["step"] / rates.sampled_flops
    if spec.name == "antidiagonal":
        return heads * causal_pairs(length) * 2 * head_dim / spec["stride"] / rates.antidiagonal_flops
    return 0.0
