"""What every quantization scheme answers: the stored tensors that make a weight, and their sum. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from longbatch.errors import UsageError
from longbatch.models.families.config import Config

if TYPE_CHECKING:
    from torch import Tensor

SCALE_DTYPES = ("F32", "F16", "BF16")
_HINT = (
    "use the unquantized (bfloat16 or float16) version of the model; quantized ones are read in fp8, in GPTQ and "
    "compressed-tensors with 4 or 8 bits, and in AWQ (gemm)"
)


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a quantized weight.

    suffixes: what may follow the module's name; the first is the part's name here. dtypes: safetensors' names.
    shapes: those that it may have.
    """

    suffixes: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    optional: bool = False


class Scheme(Protocol):
    """How the matrices of one checkpoint are quantized."""

    @property
    def title(self) -> str:
        """The method and its numbers, for people."""

    def parts(self, shape: tuple[int, int]) -> tuple[Part, ...]:
        """The tensors that make a weight of shape [out, in]."""

    def weight(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        """The weight [out, in] in float32, of the parts by name. Raises `ValueError` saying which values are odd."""


def refusal(what: str, hint: str = _HINT) -> UsageError:
    """The error for a method, or a variant of one, that is not read."""
    return UsageError(f"the checkpoint is quantized with {what}, which cannot be loaded", hint=hint)


def word(config: Config, *keys: str, default: str = "") -> str:
    """The first of the settings that is given, in lower case."""
    return next((str(config.values[key]).lower() for key in keys if config.has(key)), default)


def bits_of(config: Config, key: str, method: str, known: tuple[int, ...]) -> int:
    """The bits of a value, refused by number unless known."""
    bits = config.integer(key)
    if bits not in known:
        raise refusal(f"{method} in {bits} bits")
    return bits


def group_size_of(config: Config, default: int) -> int | None:
    """Inputs that share a scale; None for all (-1 in a config)."""
    return None if config.values.get("group_size") == -1 else config.integer("group_size", default)


def blocks(size: int, block: int | None) -> int:
    """Blocks along an axis, the last one perhaps shorter; None is one block for all."""
    return 1 if block is None else -(-size // block)


def grouped(group_size: int | None) -> str:
    """Groups in words."""
    return "one group" if group_size is None else f"groups of {group_size}"
