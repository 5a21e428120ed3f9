"""GPTQ checkpoints (AutoGPTQ, GPTQModel): 4 or 8 bits, groups of inputs in any order.

For a weight [out, in] of b bits: `qweight` [in * b / 32, out], int32, its fields successive inputs, lowest first;
`scales` [G, out]; `qzeros` [G, out * b / 32], its fields successive outputs; `g_idx` [in], the group of each input, in
order unless `desc_act`. weight = scale * (stored - zero). The format `gptq` keeps zero - 1, modulo 2^b, which AutoGPTQ
counts up again; `gptq_v2` keeps the zero itself. AutoGPTQ also stores a bias of zeros for modules that have none.
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


@dataclass(frozen=True, slots=True)
class Gptq:
    """group_size: inputs that share a scale, None for all. ordered: groups follow one another. zero_offset: what is
    added to a stored zero."""

    bits: int
    group_size: int | None
    ordered: bool
    zero_offset: int

    @property
    def title(self) -> str:
        return f"GPTQ, {self.bits} bits, {grouped(self.group_size)}{'' if self.ordered else ', reordered'}"

    def parts(self, shape: tuple[int, int]) -> tuple[Part, ...]:
        outputs, inputs = shape
        values, groups = 32 // self.bits, blocks(inputs, self.group_size)
        return (
            Part(("qweight",), ("I32",), ((blocks(inputs, values), outputs),)),
            Part(("qzeros",), ("I32",), ((groups, blocks(outputs, values)),)),
            Part(("scales",), SCALE_DTYPES, ((groups, outputs),)),
            Part(("g_idx",), ("I32",), ((inputs,),), optional=self.ordered),
        )

    def weight(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        outputs, inputs = shape
        values = unpack(parts["qweight"].t(), self.bits, inputs)
        zeros = unpack(parts["qzeros"], self.bits, outputs).add_(self.zero_offset).bitwise_and_((1 << self.bits) - 1)
        return in_groups(values, parts["scales"].t(), zeros.t(), parts.get("g_idx"), self.group_size)


def read_gptq(config: Config) -> Gptq:
    """`quant_method` gptq."""
    layout = word(config, "checkpoint_format", "format", default="gptq")
    if layout not in ("gptq", "gptq_v2") or config.flag("is_marlin_format", False):
        raise refusal(f"gptq in the format {layout if layout not in ('gptq', 'gptq_v2') else 'marlin'}")
    if word(config, "pack_dtype", default="int32") != "int32":
        raise refusal("gptq packed in " + word(config, "pack_dtype"))
    dynamic = config.section("dynamic").values if config.has("dynamic") else {}
    # Rules that begin with a minus leave modules as they are; others give some their own bits or groups.
    if any(not str(rule).startswith("-:") for rule in dynamic):
        raise refusal("gptq with settings of their own for some modules (dynamic)")
    return Gptq(
        bits=bits_of(config, "bits", "gptq", (4, 8)),
        group_size=group_size_of(config, 128),
        ordered=not config.flag("desc_act", False),
        zero_offset=1 if layout == "gptq" else 0,
    )
