"""What work costs: operations and bytes of a model, divided by a device's measured rates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from longbatch.device import Rates
from longbatch.models.spec import ModelSpec

if TYPE_CHECKING:
    from longbatch.plan.sparse_rows import SparseRows


@dataclass(frozen=True)
class CostModel:
    """Seconds on one device. weight_bytes, kv_bytes: bytes of one parameter, on average, and of one cache entry.
    sparse: what rows that are prefilled sparse cost, None where none are. products_speed: of the products with the
    layers' matrices, relative to the measured rate. stream_seconds: in which the weights of all layers reach the device
    once, 0 where they stay there or nothing is known of it."""

    spec: ModelSpec
    rates: Rates
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    sparse: SparseRows | None = None
    products_speed: float = 1.0
    stream_seconds: float = 0.0

    def prefill(self, prompt: np.ndarray, branch_tokens: np.ndarray | None = None) -> np.ndarray:
        """Seconds for reading each prompt: float64 [rows], for int [rows] prompts of whole waves.

        branch_tokens: tokens of each row's branches, every one of which attends to the whole prompt.
        """
        is_sparse = prompt >= self.sparse.min_length if self.sparse is not None else np.zeros(len(prompt), dtype=bool)
        return self._prefill(prompt, is_sparse, branch_tokens)

    def _prefill(
        self, prompt: np.ndarray, is_sparse: np.ndarray, branch_tokens: np.ndarray | None = None
    ) -> np.ndarray:
        rates = self.rates
        length = prompt.astype(np.float64)
        branch = np.zeros_like(length) if branch_tokens is None else branch_tokens.astype(np.float64)
        projections = self._layer_flops * (length + branch) + self._head_flops * (1 + branch)
        attention = np.zeros_like(length)
        for window, flops in self._attention_flops.items():
            pairs = _causal_pairs(length, window)
            if window is None:
                pairs[is_sparse] = 0.0
            attention += flops * (pairs + branch * np.minimum(length, window or np.inf))
        seconds: np.ndarray = projections / rates.gemm_flops + attention / rates.attention_flops
        if self.sparse is not None and is_sparse.any():
            seconds[is_sparse] += self.sparse.seconds(length[is_sparse])
        return seconds

    def decode(self, prompt: np.ndarray, generated: np.ndarray, kv_tokens: int) -> float:
        """Seconds for sampling `generated` tokens after each prompt, if every row uses all of them.

        Each step reads the weights once for all rows that decode together, as many as kv_tokens holds; where they are
        streamed, it takes as long as their way to the device.
        """
        rows = generated > 0
        if not rows.any():
            return 0.0
        before, steps = prompt[rows].astype(np.float64), generated[rows].astype(np.float64)
        together = max(1.0, kv_tokens / float((before + steps).mean()))
        num_steps = max(float(steps.max()), float(steps.sum()) / together)
        once = max(self.spec.num_parameters * self.weight_bytes / self.rates.bandwidth, self.stream_seconds)
        reading = num_steps * once
        computing = float(steps.sum()) * (self._layer_flops + self._head_flops) / self.rates.gemm_flops
        entries = self.spec.kv_entries_per_token * float((steps * before + steps**2 / 2).sum())
        return max(reading, computing) + entries * self.kv_bytes / self.rates.bandwidth

    def chunk_tokens(self, longest: int, seconds: float, unit: int) -> int:
        """Most tokens whose prefill takes at most `seconds` even at the end of a prompt of `longest` tokens: `unit`
        times a power of two, so that rates measured a little differently cut rows in the same places."""
        sizes = unit * 2 ** np.arange(max(1, longest // unit).bit_length())
        sizes = sizes[sizes <= longest]
        is_sparse = self.sparse is not None and longest >= self.sparse.min_length
        whole = self._prefill(np.array([longest]), np.array([is_sparse]))
        took = whole - self._prefill(longest - sizes, np.full(len(sizes), is_sparse))
        return int(sizes[took <= seconds].max(initial=unit))

    def waves(self, seconds: np.ndarray, num_steps: np.ndarray) -> np.ndarray:
        """Seconds of waves, float64 [waves], that take `seconds` with weights in place: each of their steps waits for
        the layers, where these are streamed and it is short."""
        longest: np.ndarray = np.maximum(seconds, num_steps * self.stream_seconds)
        return longest

    @property
    def break_even_tokens(self) -> int | None:
        """Tokens of a step from which a layer computes longer than the next one is on its way; None where nothing is
        streamed."""
        if not self.stream_seconds:
            return None
        return ceil(self.stream_seconds * self.rates.gemm_flops / self._layer_flops)

    @cached_property
    def _layer_flops(self) -> float:
        """Operations of the layers' matrices for one token, in those of the measured rate."""
        return self.spec.matmul_flops_per_token / self.products_speed

    @cached_property
    def _head_flops(self) -> float:
        """Operations of the vocabulary projection for one position."""
        return 2.0 * self.spec.hidden_size * self.spec.vocab_size

    @cached_property
    def _attention_flops(self) -> dict[int | None, float]:
        """Operations for each (query, key) pair, by the layers' windows."""
        flops: dict[int | None, float] = {}
        for layer in self.spec.layers:
            flops[layer.window] = flops.get(layer.window, 0.0) + 4.0 * layer.num_heads * layer.head_dim
        return flops


def products_speed(weights_dtype: str, dtype: str, capability: tuple[int, int]) -> float:
    """How much faster than in dtype the layers' products are estimated to be with weights_dtype. capability: of CUDA.

    Chips that multiply e4m3 numbers do twice as many a second as bfloat16's by their data sheets; the rate is not
    measured. Others multiply them widened, which is counted at the full rate, though widening takes time too.
    """
    return 2.0 if weights_dtype == "fp8" and dtype == "bfloat16" and multiplies_fp8(capability) else 1.0


def multiplies_fp8(capability: tuple[int, int]) -> bool:
    """Whether a chip multiplies e4m3 numbers. capability: of CUDA, (0, 0) for a CPU."""
    return capability >= (8, 9)


def _causal_pairs(length: np.ndarray, window: int | None) -> np.ndarray:
    """How many keys all queries of a prompt see together."""
    if window is None:
        window = int(length.max(initial=0))
    seen = np.minimum(length, window)
    pairs: np.ndarray = seen * (seen + 1) / 2 + (length - seen) * window
    return pairs
