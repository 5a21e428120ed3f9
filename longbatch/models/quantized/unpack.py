"""The arithmetic of all schemes: fields out of 32-bit words, and scales spread over the values that share them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def unpack(words: Tensor, bits: int, size: int, fields: Sequence[int] = ()) -> Tensor:
    """Unsigned values [..., size] in int32 out of int32 words [..., W].

    fields: which field of a word holds its first value, its second and so on; without it, the lowest first.
    """
    shifts = words.new_tensor([bits * field for field in fields or range(32 // bits)])
    # The shift of a negative word fills with ones from above, which the mask takes away.
    values = (words.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1)
    return values.flatten(-2)[..., :size]


def spread(grid: Tensor, block: tuple[int | None, int | None], shape: tuple[int, int]) -> Tensor:
    """One number for each block, [rows, columns], as float32 that broadcasts to a weight of the shape.

    block: rows and columns of a block, None for all. The last block of an axis may be shorter.
    """
    grid = grid.float()
    for axis, (extent, size) in enumerate(zip(block, shape, strict=True)):
        if extent is not None and grid.shape[axis] > 1:
            grid = grid.repeat_interleave(extent, axis).narrow(axis, 0, size)
    return grid


def in_groups(values: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None, size: int | None) -> Tensor:
    """(values - zeros) * scales, in float32: a weight [out, in] whose inputs share scales in groups.

    scales, zeros: [out, G], or [1, G]. groups: the group of each input [in]; without it they follow one another in
    groups of `size` inputs. Raises `ValueError` if groups names one that is not there.
    """
    out, inputs = values.shape
    if groups is not None:
        groups = groups.long()
        if int(groups.min()) < 0 or int(groups.max()) >= scales.shape[1]:
            raise ValueError(f"g_idx must name groups 0 to {scales.shape[1] - 1}")

    def of_each(grid: Tensor) -> Tensor:
        return spread(grid, (None, size), (out, inputs)) if groups is None else grid.float()[:, groups]

    weight = values.float()
    if zeros is not None:
        weight = weight.sub_(of_each(zeros))
    return weight.mul_(of_each(scales))
