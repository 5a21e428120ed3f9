"""What an engine may do at once, how it attends, and what it has done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longbatch.attention import SparseLayer
from longbatch.models.spec import ModelSpec

if TYPE_CHECKING:
    from longbatch.sparsity import LayerPatterns


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """step_tokens: most tokens in one prefill step. tile_rows: rows per tile of a layer. decode_rows: most sequences
    decoded together. max_tokens: answers of rows that set no limit. run_seed: seed of rows that set none. row_seconds:
    longest time of a row, None for any. chunk_tokens: most tokens in one step of a row that is prefilled alone, None
    for step_tokens."""

    step_tokens: int
    tile_rows: int
    decode_rows: int
    max_tokens: int
    run_seed: int = 0
    row_seconds: float | None = None
    chunk_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EngineAttention:
    """How an engine prefills long rows sparse.

    layers: the patterns of each layer, None for those that stay dense. min_length: tokens from which a prompt, as
    a whole, is long. patterns: `NUMBER PATTERN`, how many heads of layers without a window run which
    pattern, most first.
    """

    layers: tuple[SparseLayer | None, ...]
    min_length: int
    patterns: tuple[str, ...]

    @classmethod
    def of(cls, spec: ModelSpec, patterns: Sequence[LayerPatterns], min_length: int) -> EngineAttention:
        """patterns: of every layer of the model; those of layers with a window or capped scores are not used."""
        layers: list[SparseLayer | None] = []
        names: Counter[str] = Counter()
        for layer, chosen in zip(spec.layers, patterns, strict=True):
            layers.append(None)
            if layer.window is not None:
                continue
            if not layer.is_plain or chosen.is_dense:
                names["dense"] += layer.num_heads
                continue
            layers[-1] = SparseLayer(chosen, layer.num_heads, layer.num_kv_heads, layer.scale)
            for head in chosen.heads:
                names[head.name] += layer.num_heads // len(chosen.heads)
        return cls(tuple(layers), min_length, tuple(f"{count} {name}" for name, count in names.most_common()))


@dataclass(slots=True)
class Counters:
    """Totals so far. busy_seconds: wall time in which the device worked for rows; failed attempts do not count."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def busy_seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds
