"""Rotary position embeddings: the frequencies of every scaling kind, and the rotation itself.

    angle(p, i) = p * frequency(i)            i = 0 .. dim/2 - 1
    (x1, x2)   -> (x1 cos - x2 sin, x2 cos + x1 sin)      x1, x2: the two halves of the rotated dimensions

Formulas follow transformers' modeling_rope_utils. One rule differs on purpose: `dynamic` and `longrope` choose
their frequencies by the length of a token's own sequence and not by the longest sequence of the batch, so that a
row does not depend on its neighbours.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from longbatch.models.spec import RopeSpec


class RopeValues(NamedTuple):
    """Cosines and sines of one tile, the scaling's attention factor included. Both [T, dim/2], float32."""

    cos: Tensor
    sin: Tensor


class Rope:
    """The rotation of all layers that share one `RopeSpec`."""

    def __init__(self, spec: RopeSpec, frequencies: Tensor, long_frequencies: Tensor | None, factor: float) -> None:
        self.spec = spec
        self.attention_factor = factor
        self._frequencies = frequencies
        self._long_frequencies = long_frequencies

    @classmethod
    def build(cls, spec: RopeSpec, device: torch.device) -> Rope:
        """The rotation that `spec` describes, its tables on `device`."""
        # Tables are computed on the CPU, so that every device rotates by the same angles.
        frequencies, long_frequencies = _frequencies(spec)
        if long_frequencies is not None:
            long_frequencies = long_frequencies.to(device)
        return cls(spec, frequencies.to(device), long_frequencies, _attention_factor(spec))

    @property
    def needs_lengths(self) -> bool:
        """Whether frequencies depend on the length of a token's sequence."""
        return self.spec.kind in ("dynamic", "longrope")

    def cos_sin(self, positions: Tensor, lengths: Tensor | None = None) -> RopeValues:
        """Values for tokens at `positions` (int64 [T]). lengths (int64 [T]): tokens of each token's whole sequence,
        prompt and most tokens to come; read, and required, only where `needs_lengths`."""
        frequencies = self._frequencies
        if self.needs_lengths:
            if lengths is None:
                raise ValueError(f"{self.spec.kind} rope needs the sequence length of each token")
            frequencies = self._per_token(lengths)
        angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
        cos, sin = angles.cos(), angles.sin_()
        if self.attention_factor != 1.0:
            cos.mul_(self.attention_factor)
            sin.mul_(self.attention_factor)
        return RopeValues(cos, sin)

    def _per_token(self, lengths: Tensor) -> Tensor:
        """Frequencies [T, dim/2] chosen by each token's sequence length."""
        spec = self.spec
        if self._long_frequencies is not None:
            is_long = (lengths > spec.original_length).unsqueeze(-1)
            return torch.where(is_long, self._long_frequencies, self._frequencies)
        # dynamic: the base grows with the length beyond the trained one.
        factor = _number(spec, "factor")
        stretch = factor * lengths.clamp(min=spec.max_length).to(torch.float64) / spec.max_length - (factor - 1.0)
        base = (spec.theta * stretch ** (spec.dim / (spec.dim - 2))).to(torch.float32).unsqueeze(-1)
        return 1.0 / base ** _exponents(spec.dim, lengths.device)


def rotate(x: Tensor, rope: RopeValues) -> Tensor:
    """x [T, heads, D], any strides, rotated into a new contiguous tensor; dimensions past the rotated ones pass."""
    cos, sin = rope.cos.unsqueeze(1), rope.sin.unsqueeze(1)
    half = cos.shape[-1]
    rotated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = x[..., :half], x[..., half : 2 * half]
    torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[..., half : 2 * half]).addcmul_(first, sin)
    if 2 * half < x.shape[-1]:
        rotated[..., 2 * half :] = x[..., 2 * half :]
    return rotated


def _number(spec: RopeSpec, name: str) -> float:
    value = spec.parameters[name]
    assert not isinstance(value, list)
    return float(value)


def _exponents(dim: int, device: torch.device | None = None) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64, device=device).to(torch.float32) / dim


def _frequencies(spec: RopeSpec) -> tuple[Tensor, Tensor | None]:
    """Frequencies [dim/2] in float32, and those of long sequences where the kind has a second set."""
    powers = spec.theta ** _exponents(spec.dim)
    if spec.kind == "linear":
        return 1.0 / powers / _number(spec, "factor"), None
    if spec.kind == "yarn":
        return _yarn(spec, powers), None
    if spec.kind == "llama3":
        return _llama3(spec, 1.0 / powers), None
    if spec.kind == "longrope":
        short = torch.tensor(spec.parameters["short_factor"], dtype=torch.float32)
        long = torch.tensor(spec.parameters["long_factor"], dtype=torch.float32)
        return 1.0 / (short * powers), 1.0 / (long * powers)
    return 1.0 / powers, None  # default, and dynamic within the trained length


def _llama3(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by the factor, short ones kept, those between interpolated."""
    factor = _number(spec, "factor")
    low, high = _number(spec, "low_freq_factor"), _number(spec, "high_freq_factor")
    wavelengths = 2 * math.pi / frequencies
    smooth = ((spec.original_length / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


def _yarn(spec: RopeSpec, powers: Tensor) -> Tensor:
    """YaRN (arXiv:2309.00071): interpolation and extrapolation mixed by a ramp over the dimensions."""
    factor, half = _number(spec, "factor"), spec.dim // 2

    def dimension(rotations: float) -> float:
        return spec.dim * math.log(spec.original_length / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(_number(spec, "beta_fast")), dimension(_number(spec, "beta_slow"))
    if spec.parameters["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(half, dtype=torch.float32) - low) / width).clamp(0, 1)
    return interpolated / (factor * powers) + (1 - interpolated) / powers


def _attention_factor(spec: RopeSpec) -> float:
    """Factor on cosines and sines: given, or the paper's choice for yarn and longrope."""
    given = spec.parameters.get("attention_factor")
    if given is not None:
        return _number(spec, "attention_factor")
    if spec.kind == "yarn":
        factor = _number(spec, "factor")
        if spec.parameters.get("mscale") and spec.parameters.get("mscale_all_dim"):
            return _mscale(factor, _number(spec, "mscale")) / _mscale(factor, _number(spec, "mscale_all_dim"))
        return _mscale(factor, 1.0)
    if spec.kind == "longrope":
        factor = _number(spec, "factor")
        return math.sqrt(1 + math.log(factor) / math.log(spec.original_length)) if factor > 1.0 else 1.0
    return 1.0


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
