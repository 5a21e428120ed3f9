"""What `longbatch bench attention` runs on: queries, keys and values, and the selections of a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longbatch.bench import vs_workload

SEED = 20
SINKS = 4


@dataclass(frozen=True, slots=True)
class Inputs:
    """q [N, H, D], k and v [N, Hkv, D]."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def length(self) -> int:
        return self.q.shape[0]

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    @property
    def group(self) -> int:
        """Query heads of a K/V head."""
        return self.q.shape[1] // self.k.shape[1]


@dataclass(frozen=True, slots=True)
class Chosen:
    """One selection: sorted columns and sorted distances, int32, of one of the workload's seeds."""

    columns: np.ndarray
    distances: np.ndarray
    seed: int


def random_inputs(
    length: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Inputs:
    """Normally distributed numbers, the same each time. What is executed is given, so their values do not matter."""
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(heads: int) -> Tensor:
        return torch.randn(length, heads, head_dim, generator=generator, dtype=dtype, device=device)

    return Inputs(normal(num_heads), normal(num_kv_heads), normal(num_kv_heads))


def structured_inputs(length: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    """One K/V head whose queries look at what is near and at the first keys, as trained heads do: for rivals that can
    only choose by themselves, and would keep everything of random numbers.

    The score is a sum of cosines of the distance, of log-spaced frequencies as rotary embeddings have them, plus noise,
    plus a constant for the first keys.
    """
    generator = torch.Generator(device).manual_seed(SEED)
    quarter = head_dim // 4
    frequencies = torch.logspace(0, -5, quarter, device=device)
    angle = torch.arange(length, device=device)[:, None] * frequencies
    # At distance 0 the cosines add up to a score of 16, for whatever head dimension.
    height = math.sqrt(16 * math.sqrt(head_dim) / quarter)
    near = torch.cat([angle.cos(), angle.sin()], -1)[:, None] * height

    def rest(heads: int) -> Tensor:
        return torch.randn(length, heads, head_dim - 2 * quarter, generator=generator, device=device)

    q, k = (torch.cat([near.expand(-1, heads, -1), rest(heads)], -1) for heads in (num_heads, 1))
    strength = math.sqrt(14 * math.sqrt(head_dim))
    q[:, :, -1] = strength
    k[:, :, -1] = 0
    k[:SINKS, :, -1] = strength
    v = torch.randn(length, 1, head_dim, generator=generator, device=device)
    return Inputs(q.to(dtype), k.to(dtype), v.to(dtype))


def selections(budgets: Sequence[tuple[int, int]], length: int) -> list[Chosen]:
    """The clustered workload of each selection of a layer. Those of one class differ, but for the ninth of them."""
    found = []
    for number, (columns, distances) in enumerate(budgets):
        seed = number % vs_workload.NUM_SEEDS
        vertical, slash = vs_workload.vertical(length, columns, seed), vs_workload.slash(length, distances, seed)
        found.append(Chosen(vertical, slash, seed))
    return found


def scores_of(chosen: Sequence[Chosen], length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Estimates float32 [S, N] by key and by distance whose highest entries are the selections, above noise."""
    generator = torch.Generator(device).manual_seed(SEED)
    scores = []
    for lists in ([one.columns for one in chosen], [one.distances for one in chosen]):
        values = torch.rand(len(chosen), length, generator=generator, device=device).mul_(0.1)
        # All selections at once: a copy for each would take longer than what is measured.
        rows = np.repeat(np.arange(len(lists), dtype=np.int64), [len(each) for each in lists])
        places = torch.from_numpy(rows * length + np.concatenate(lists)).to(device)
        values.view(-1)[places] += 1
        scores.append(values)
    return scores[0], scores[1]
