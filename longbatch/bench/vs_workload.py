"""Vertical-slash selections for kernel benchmarks: the budgets that MInference published, distances in clusters.

The cost of a vertical-slash head depends on how its distances cluster, not on its budget alone: 6,096 distances spread
evenly over a million keys touch a third of the causal area, in clusters, as trained models have them, some 3 percent.
Random queries and keys would therefore time a nearly dense head. The density is printed beside every time.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import numpy as np

FORCED_SLASH = 100  # distances 0..99 are always kept
FORCED_VERTICAL = 30  # so are the first columns, the attention sinks
ROWS = 64  # rows that one slash range serves together
# (vertical, slash) of each class of heads, by the digits below.
CLASSES = ((1000, 6096), (30, 800), (100, 800), (3500, 100), (500, 700))
# The class of every head of every layer: MInference's published file for Llama-3-8B-Instruct-262k (MIT, Microsoft).
LAYERS = (
    "00000000000000001110000000003333",
    "11011111202101001111110011110010",
    "10102001112121201110000111111111",
    "00001111111100201111000000101112",
    "22211101000011120100201011110221",
    "10111000000011112001000004101111",
    "12222101111111111211001100002020",
    "11121100110110220000230220011100",
    "00001110002001000000111100000000",
    "00000000111100200000000020230010",
    "00000000210100021000000004020220",
    "00002000001000001411000000003331",
    "10410000210211041411111411411114",
    "00000002000000000000002012200100",
    "00000000111100000000020000102303",
    "10001011411210000002000000000001",
    "30224042002314412200001003201111",
    "00023032220114002123432033020020",
    "20000221001041420000200011120200",
    "02000202102022001010202201000002",
    "00001002000003200000024002002100",
    "00001211311032332302000004000000",
    "33000003022200001111000011120023",
    "42120000023000331404023203201111",
    "02232200111134223330003000004113",
    "33003333212230332232111112211111",
    "02000100210230303403222300200323",
    "24113030111100120200003301440100",
    "31211111213103003232341300104222",
    "22112221320211113023000011110033",
    "03232231031000000002032130232300",
    "11111112111011013312332111112330",
)
NUM_SEEDS = 8  # different selections of one class and length


def layers() -> list[list[tuple[int, int]]]:
    """(vertical, slash) of the 32 heads of each of the 32 layers, as published."""
    return [[CLASSES[int(digit)] for digit in layer] for layer in LAYERS]


def shared_layers(group: int = 4) -> list[list[tuple[int, int]]]:
    """The same mix with one class for each K/V group of `group` heads.

    A layer gets as many groups of a class as it has heads of it over `group`; what does not divide is carried to the
    next layer, so that the sums over all layers are those published, rounded to whole groups.
    """
    owed = dict.fromkeys(CLASSES, 0.0)
    found = []
    for heads in layers():
        for budget, count in Counter(heads).items():
            owed[budget] += count / group
        layer = []
        for _ in range(len(heads) // group):
            budget = max(CLASSES, key=lambda each: owed[each])
            owed[budget] -= 1
            layer.append(budget)
        found.append(sorted(layer, key=CLASSES.index))
    return found


@lru_cache(maxsize=NUM_SEEDS * len(CLASSES))
def vertical(n: int, budget: int, seed: int = 0) -> np.ndarray:
    """Sorted int32 columns [budget] in [0, n): the first 30, the rest uniform."""
    rng = np.random.default_rng([seed, 1, n, budget])
    sinks = np.arange(min(FORCED_VERTICAL, budget, n))
    rest = rng.choice(np.arange(len(sinks), n), size=min(budget, n) - len(sinks), replace=False)
    return np.sort(np.concatenate([sinks, rest])).astype(np.int32)


@lru_cache(maxsize=NUM_SEEDS * len(CLASSES))
def slash(n: int, budget: int, seed: int = 0) -> np.ndarray:
    """Sorted int32 distances [budget] in [0, n): a local band of a quarter of the budget, the rest in clusters of 64
    to 256 neighbours at log-uniform distances."""
    rng = np.random.default_rng([seed, 2, n, budget])
    if budget >= n:
        return np.arange(n, dtype=np.int32)
    band = min(max(FORCED_SLASH, budget // 4), budget)
    chosen = np.zeros(n, dtype=bool)
    chosen[:band] = True
    left = budget - band
    while left > 0:
        centre = int(np.exp(rng.uniform(np.log(band + 1), np.log(n))))
        width = min(int(rng.integers(64, 257)), left)
        start = min(centre, n - width)
        new = np.flatnonzero(~chosen[start : start + width]) + start
        chosen[new] = True
        left -= len(new)
    return np.flatnonzero(chosen).astype(np.int32)


def selected(columns: np.ndarray, distances: np.ndarray, row: int, num_keys: int) -> np.ndarray:
    """int64 [n]: the keys that the block of 64 rows which holds `row` selects, causality within the block apart.

    From the definition and nothing else: for rows that end at e, distance t selects keys e-t-64..e-t-1.
    """
    end = (row // ROWS + 1) * ROWS
    mask = np.zeros(end, dtype=bool)
    near = distances[distances < end]
    # Neighbours at most 64 apart touch, so that a cluster is marked at once.
    for cluster in np.split(near, np.flatnonzero(np.diff(near) > ROWS) + 1):
        if len(cluster):
            mask[max(end - int(cluster[-1]) - ROWS, 0) : end - int(cluster[0])] = True
    mask[columns[columns < end]] = True
    return np.flatnonzero(mask[:num_keys])
