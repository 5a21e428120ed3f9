"""AWQ checkpoints of the gemm layout (AutoAWQ): 4 bits, zero points, groups of successive inputs.

For a weight [out, in]: `qweight` [in, out / 8], int32, the fields of a word, from the lowest, holding its outputs 0, 2,
4, 6, 1, 3, 5, 7; `qzeros` [G, out / 8], packed alike; `scales` [G, out]. weight = scale * (stored - zero). The layouts
gemv, gemv_fast, exllama and marlin pack otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longbatch.models.families.config import Config
from longbatch.models.quantized.scheme import (
    SCALE_DTYPES,
    Part,
    bits_of,
    blocks,
    group_size_of,
    grouped,
    refusal,
    word,
)
from longbatch.models.quantized.unpack import in_groups, unpack

if TYPE_CHECKING:
    from torch import Tensor

_BITS = 4
# Output i of a word is in this field: the inverse of the order above.
_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class Awq:
    """group_size: inputs that share a scale, None for all."""

    group_size: int | None

    @property
    def title(self) -> str:
        return f"AWQ, {_BITS} bits, {grouped(self.group_size)}"

    def parts(self, shape: tuple[int, int]) -> tuple[Part, ...]:
        outputs, inputs = shape
        words, groups = blocks(outputs, len(_FIELDS)), blocks(inputs, self.group_size)
        return (
            Part(("qweight",), ("I32",), ((inputs, words),)),
            Part(("qzeros",), ("I32",), ((groups, words),)),
            Part(("scales",), SCALE_DTYPES, ((groups, outputs),)),
        )

    def weight(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        values, zeros = (unpack(parts[name], _BITS, shape[0], _FIELDS).t() for name in ("qweight", "qzeros"))
        return in_groups(values, parts["scales"].t(), zeros, None, self.group_size)


def read_awq(config: Config) -> Awq:
    """`quant_method` awq."""
    layout = word(config, "version", "format", "checkpoint_format", default="gemm")
    if layout != "gemm":
        raise refusal(f"awq in the layout {layout}")
    bits_of(config, "w_bit" if config.has("w_bit") else "bits", "awq", (_BITS,))
    if not config.flag("zero_point", True):
        raise refusal("awq without zero points")
    if config.has("q_group_size"):
        config = Config({**config.values, "group_size": config.values["q_group_size"]}, config.where)
    return Awq(group_size_of(config, 128))
