"""What a pattern's class offers, and the arithmetic that several of them share.

Selections are numbered like query heads, or like key/value heads where they are shared; `selections` says which of the
layer's a call is for (None: all, in order), and `specs` has one entry for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from longbatch.attention.selection import Blocks, Ranges, Runs
from longbatch.sparsity import PatternSpec


class RangesPattern(Protocol):
    """A pattern whose last queries decide for every row.

    LAST_QUERIES: how many of them it asks for; 0 when positions alone decide.
    """

    LAST_QUERIES: int

    def select(
        self,
        q_last: Tensor,
        k: Tensor,
        specs: Sequence[PatternSpec],
        *,
        shared: bool,
        scale: float,
        q_offset: int,
        rows: tuple[int, int],
        selections: Sequence[int] | None = None,
    ) -> tuple[Ranges, ...]:
        """Selections for rows rows[0]..rows[1]-1, in disjoint intervals that cover them.

        q_last: [m, H, D], queries at positions q_offset..q_offset+m-1, at most LAST_QUERIES of them and the last of
        the rows. k: [N, Hkv, D], keys of positions 0..N-1, where N is rows[1].
        """
        ...


class TilePattern(Protocol):
    """A pattern that decides for each block, or each run, of queries of a tile.

    UNIFORM: parameters in which all specs of a call must agree.
    """

    UNIFORM: tuple[str, ...]

    def summarize(self, k: Tensor, specs: Sequence[PatternSpec]) -> Tensor | None:
        """What `select` wants to know of the keys, whatever the queries and selections: once for many tiles."""
        ...

    def select(
        self,
        q: Tensor,
        k: Tensor,
        specs: Sequence[PatternSpec],
        *,
        shared: bool,
        scale: float,
        q_offset: int,
        selections: Sequence[int] | None = None,
        summary: Tensor | None = None,
    ) -> Blocks | Runs:
        """Selections for a tile of queries [n, H, D] at positions q_offset..q_offset+n-1.

        k: [N, Hkv, D], keys of positions 0..N-1; those after the tile make no difference beyond the tile's last
        block. summary: what `summarize` gave for k and specs of the same block size, or None. Blocks and runs end at
        the same positions whatever the tile: the first one of the answer holds the tile's first query, even if the tile
        begins inside it.
        """
        ...


def served(num_heads: int, num_kv: int, selections: Sequence[int] | None, shared: bool) -> tuple[range, list[int]]:
    """The key/value heads that hold the selections, and each selection's place among the selections of those."""
    group = num_heads // num_kv
    if selections is None:
        return range(num_kv), list(range(num_kv if shared else num_heads))
    per = 1 if shared else group
    kv_heads = range(min(selections) // per, max(selections) // per + 1)
    return kv_heads, [selection - kv_heads.start * per for selection in selections]


def queries_of(q: Tensor, kv_heads: range, num_kv: int) -> Tensor:
    """The query heads of some key/value heads, as a view."""
    group = q.shape[1] // num_kv
    return q[:, kv_heads.start * group : kv_heads.stop * group]


def keys_of(k: Tensor, kv_heads: range) -> Tensor:
    """Some key/value heads, as a view."""
    return k[:, kv_heads.start : kv_heads.stop]


def picked(scores: Tensor, places: Sequence[int]) -> Tensor:
    """Some entries of the first axis, without a copy where they are all."""
    if list(places) == list(range(scores.shape[0])):
        return scores
    return scores[on_device(places, scores.device)]


def on_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A few numbers, nested as they are, on the device, which is not waited for."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
