"""Which kernel runs dense attention: what was measured on a device, and remembered. Torch-free.

The fastest depends on the chip, on the heads and on lengths, so all that there are were timed at a few shapes of tiles
(`longbatch.attention.measure`), and each tile takes the one that was fastest at the shape nearest to its own.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from longbatch.device import DeviceInfo, kernels_key
from longbatch.folders import write_table

CHOICES_FILE = "dense-kernels.json"
# Names of kernels: longbatch's own; torch's, piece by piece (cuDNN where it serves); torch's FlashAttention-2, packed.
OWN, TORCH, FLASH_2, FLASH_3 = "longbatch", "torch", "torch FlashAttention-2", "FlashAttention-3"
# Queries of each piece of a tile, and keys before the end of each: many short prompts, some longer ones, one, the end
# of a long one; many short ends of one prompt; and last queries alone.
POINTS = ((128, 128), (1024, 1024), (8192, 8192), (8192, 65536), (128, 8192), (1, 8192))


class DenseLayer(Protocol):
    """What is asked of a layer; `longbatch.models.spec.LayerSpec` is one."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def window(self) -> int | None: ...
    @property
    def softcap(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class DenseShape:
    """What a kernel's speed depends on beside lengths. window: keys a query sees, None for all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None

    @classmethod
    def of(cls, layer: DenseLayer) -> DenseShape | None:
        """The layer's; None where its scores are capped, which no kernel here does."""
        if layer.softcap is not None:
            return None
        return cls(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.window)

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        return heads if self.window is None else f"{heads}, window {self.window:,}"


@dataclass(frozen=True)
class DenseChoice:
    """points: queries and keys of the pieces of tiles that were timed. seconds: of a tile at each point, by each kernel
    that computes it right."""

    points: tuple[tuple[int, int], ...]
    seconds: Mapping[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        if not self.points or not all(len(point) == 2 and min(point) > 0 for point in self.points):
            raise ValueError(f"points must be pairs of positive numbers, not {self.points!r}")
        if TORCH not in self.seconds:
            raise ValueError(f"{TORCH}, which runs on every device, was not measured")
        for name, values in self.seconds.items():
            if len(values) != len(self.points) or not all(0 < value < math.inf for value in values):
                raise ValueError(f"{name} needs a positive number for each of {len(self.points)} points: {values!r}")

    def pick(self, num_queries: float, num_keys: float) -> str:
        """The kernel for a tile whose pieces have so many queries and keys, on average."""

        def distance(place: int) -> float:
            queries, keys = self.points[place]
            return abs(math.log2(num_queries / queries)) + abs(math.log2(num_keys / keys))

        nearest = min(range(len(self.points)), key=distance)
        return min(self.seconds, key=lambda name: self.seconds[name][nearest])

    def describe(self) -> str:
        """One line for a person: which kernel runs pieces of how many queries, of how many keys."""
        found: dict[str, list[str]] = {}
        for queries, keys in self.points:
            text = f"{queries:,}" if queries == keys else f"{queries:,} of {keys:,}"
            found.setdefault(self.pick(queries, keys), []).append(text)
        return "; ".join(f"{name} for {' | '.join(texts)}" for name, texts in found.items())

    def as_json(self) -> dict[str, Any]:
        """JSON values for `from_json`."""
        return {"points": self.points, "seconds": dict(self.seconds)}

    @classmethod
    def from_json(cls, values: Any) -> DenseChoice:
        """What `as_json` described. Raises ValueError, TypeError, KeyError or AttributeError for anything else."""
        points = tuple((int(queries), int(keys)) for queries, keys in values["points"])
        return cls(points, {name: tuple(map(float, times)) for name, times in values["seconds"].items()})


@dataclass(frozen=True)
class DenseKernels:
    """The choices for the layers of a model. A layer that is not among them runs by torch, piece by piece."""

    choices: Mapping[DenseShape, DenseChoice]

    def of(self, shape: DenseShape | None) -> DenseChoice | None:
        """The choice for layers of one shape."""
        return None if shape is None else self.choices.get(shape)


def shapes_of(layers: Iterable[DenseLayer]) -> list[DenseShape]:
    """The distinct shapes among layers, in order."""
    return [*dict.fromkeys(shape for layer in layers if (shape := DenseShape.of(layer)) is not None)]


def has_flash_3() -> bool:
    """Whether FlashAttention-3's package is there."""
    return importlib.util.find_spec("flash_attn_interface") is not None


def choices_key(info: DeviceInfo, dtype: str) -> str:
    """What choices depend on: device, dtype, and the versions of everything that brings a kernel."""
    return kernels_key(info, dtype, "torch", "triton", *(["flash_attn_3"] if has_flash_3() else []))


def read_choices(folder: Path, key: str) -> dict[str, DenseChoice]:
    """Remembered choices by shape, as text; what is missing or damaged is left out, and measuring mends it."""
    found = {}
    of_key = _read(folder).get(key)
    for shape, values in of_key.items() if isinstance(of_key, dict) else ():
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            found[shape] = DenseChoice.from_json(values)
    return found


def remember_choices(folder: Path, key: str, choices: Mapping[str, DenseChoice]) -> None:
    """Add choices to the file; those of other devices and versions stay."""
    merged = {**read_choices(folder, key), **choices}
    table = {**_read(folder), key: {shape: choice.as_json() for shape, choice in merged.items()}}
    write_table(folder / CHOICES_FILE, table)


def _read(folder: Path) -> dict[str, Any]:
    """The whole file; nothing where there is none, or no table."""
    with suppress(OSError, ValueError):
        table = json.loads((folder / CHOICES_FILE).read_text(encoding="utf-8"))
        if isinstance(table, dict):
            return table
    return {}
