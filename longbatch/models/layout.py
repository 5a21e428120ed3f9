"""Where the weights of a layer lie in one flat buffer of bytes, so that a layer moves in one copy. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod

from longbatch.models.parameters import Parameter, parameters
from longbatch.models.spec import ModelSpec

# Every tensor starts at a multiple of this, as an allocator would place it: kernels load whole vectors.
ALIGNMENT = 256
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter in the buffer. width: bytes of a number. start: its first byte. scale_start: that of the float32
    scales of its rows, None where it is not quantized."""

    parameter: Parameter
    width: int
    start: int
    scale_start: int | None = None

    @property
    def stop(self) -> int:
        """The byte after its numbers."""
        return self.start + self.width * prod(self.parameter.shape)

    @property
    def scale_stop(self) -> int:
        """The byte after its scales."""
        assert self.scale_start is not None
        return self.scale_start + _SCALE_BYTES * prod(self.parameter.shape[:-1])


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """All of a layer's parameters, and the size of its buffer in bytes."""

    places: tuple[Place, ...]
    num_bytes: int


def layer_layouts(spec: ModelSpec, width: int, weights_dtype: str) -> tuple[LayerLayout, ...]:
    """Each layer's layout, with `width` bytes for a number that is not quantized. weights_dtype: as in `Settings`."""
    inside = (parameter for parameter in parameters(spec) if parameter.layer is not None)
    return tuple(
        _layout(spec, group, width, weights_dtype) for _, group in groupby(inside, lambda parameter: parameter.layer)
    )


def number_bytes(spec: ModelSpec, parameter: Parameter, width: int) -> int:
    """Bytes of one number of a parameter that is not quantized. Norms stored with an offset stay in float32: bfloat16
    would round 1 + w."""
    return 4 if parameter.role == "norm" and spec.norm_offset else width


def _layout(spec: ModelSpec, group: Iterator[Parameter], width: int, weights_dtype: str) -> LayerLayout:
    places = []
    end = 0
    for parameter in group:
        if weights_dtype == "fp8" and parameter.is_product:
            numbers = Place(parameter, 1, end)
            place = Place(parameter, 1, end, _aligned(numbers.stop))
            end = _aligned(place.scale_stop)
        else:
            place = Place(parameter, number_bytes(spec, parameter, width), end)
            end = _aligned(place.stop)
        places.append(place)
    return LayerLayout(tuple(places), end)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
