"""Dense attention of packed prompts, for every head of a layer in one launch of the kernels of `range_attention`.

    causal       the query at position i of its prompt sees key j where j <= i, and i - j < window where there is one
    not causal   every query sees all keys of its prompt: they lie before its first query

out = softmax(scale q k^T) v over the keys seen; shapes, log-sum-exp and carry are those of `range_attention`.

Counted from the end of a block of rows, all blocks of all prompts and heads see the same keys, the near ones first,
until their prompt begins. So one list of runs serves all of them, and only the records of the tiles of queries, made
here on the host, are a prompt's own. What is prepared holds for every layer of the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longbatch_kernels import range_attention_hopper as hopper
from longbatch_kernels.range_attention import WIDEST_PAIR, Carry, Prepared, range_attention
from longbatch_kernels.range_columns import TILE, Columns
from longbatch_kernels.range_index import RECORD, ROWS, RUN, PackedPrompt, RangeIndex

# Runs of a tile of keys.
RUNS = TILE // RUN
# Every key of a run, for both blocks of a pair.
ALL_BITS = -1
# What a tile of queries costs beside its tiles of keys, in those.
OVERHEAD = 2


class _Walk(NamedTuple):
    """Distances of runs from the end of a block, ascending: those that need a mask, and the others, in whole tiles."""

    masked: np.ndarray
    whole: np.ndarray


def dense_attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prompts: Sequence[PackedPrompt],
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same in plain torch, in the precision of its arguments; queries of no prompt give 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=q.dtype, device=q.device)
    for prompt in prompts:
        rows = slice(prompt.first_query, prompt.first_query + prompt.num_queries)
        keys = slice(prompt.first_key, prompt.first_key + prompt.num_keys)
        key, value = (x[keys].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], key) * scale
        if causal:
            place = torch.arange(prompt.num_queries, device=q.device) + prompt.q_offset
            away = place[:, None] - torch.arange(prompt.num_keys, device=q.device)
            scores.masked_fill_((away < 0) | (away >= (window or prompt.num_keys)), -math.inf)
        lse[:, rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
    return out, lse


def prepare_dense(
    prompts: Sequence[PackedPrompt], k: Tensor, *, num_heads: int, causal: bool = True, window: int | None = None
) -> tuple[Prepared, ...]:
    """Make ready for any queries of these prompts, of `num_heads` heads, over keys like k [Tk, Hkv, D] in shape of
    heads, type and device. One launch each: short prompts are another kernel's than long ones on some chips.

    A window counts for `causal` prompts only. Each prompt has queries and keys; a causal one's last query stands before
    the end of its keys.
    """
    window = None if window is None or window >= max(prompt.num_keys for prompt in prompts) else window
    parts: dict[bool, list[PackedPrompt]] = {}
    for prompt in prompts:
        parts.setdefault(hopper.serves(k, prompt.num_keys), []).append(prompt)
    return tuple(_prepared(found, k, num_heads, causal, window, on_hopper) for on_hopper, found in parts.items())


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prepared: Sequence[Prepared],
    *,
    scale: float,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    carry: Carry | None = None,
    carry_out: bool = False,
) -> tuple[Tensor, Tensor] | Carry:
    """(out, lse), or a `Carry` where `carry_out`; the rows of queries that were not prepared keep what these hold.

    carry: a state over other keys to go on from; it is updated in place where `carry_out`.
    """
    out = torch.empty_like(q) if out is None else out
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device) if lse is None else lse
    for part in prepared:
        found = range_attention(q, k, v, part, scale=scale, out=out, lse=lse, carry=carry, carry_out=carry_out)
        carry = found if isinstance(found, Carry) else carry
    return (out, lse) if not carry_out or carry is None else carry


def _prepared(
    prompts: list[PackedPrompt], k: Tensor, num_heads: int, causal: bool, window: int | None, on_hopper: bool
) -> Prepared:
    num_kv, dim = k.shape[1:]
    group = num_heads // num_kv
    heads_per_tile = 2 if group % 2 == 0 and dim <= WIDEST_PAIR else 1
    # Where no two heads share a tile, two blocks of rows do.
    paired = on_hopper and heads_per_tile == 1
    units = _units(prompts, 2 * ROWS if paired else ROWS, causal)
    # So that most lists are the same ones.
    reach = 1 << int(units[:, 1].max() - 1).bit_length()
    walk = _walk(causal, window, paired, reach)
    items = _records(units, walk, num_kv, group // heads_per_tile, heads_per_tile, window)
    if on_hopper:
        # The programs of this kernel stay, and take every so-manieth tile.
        processors = torch.cuda.get_device_properties(k.device).multi_processor_count
        items = items[balanced(items[:, 14] + items[:, 15] + OVERHEAD, processors)]
    index = _index(causal, window, paired, reach, dim, k.dtype, k.device)
    on_device = torch.from_numpy(items).to(k.device, non_blocking=True)
    nothing = index.windows.new_empty((0, 3))
    return Prepared(index, nothing, tuple(prompts), (), heads_per_tile, on_hopper, on_device)


def _units(prompts: Sequence[PackedPrompt], per: int, causal: bool) -> np.ndarray:
    """Tiles of queries of one job, int64 [U, 6]: row of q minus position, end of the (first) block, first position and
    the one after the last, first key, keys. Prompt by prompt; the last rows first, for they see the most keys."""
    first_query, num_queries, q_offset, first_key, num_keys = np.array(prompts, dtype=np.int64).T
    # Rows that see all keys stand behind them.
    low = q_offset if causal else num_keys
    high, place = low + num_queries, first_query - low
    start = low // per * per if causal else low
    counts = -(-(high - start) // per)
    which = np.repeat(np.arange(len(counts)), counts)
    # From the start of its prompt; descending there.
    moved = (np.cumsum(counts)[which] - 1 - np.arange(len(which))) * per
    begin = start[which] + moved
    first, last = np.maximum(begin, low[which]), np.minimum(begin + per, high[which])
    # Each block of these as if it were the first one behind the keys.
    back = 0 if causal else moved
    columns = place[which] + back, begin - back + ROWS, first - back, last - back, first_key[which], num_keys[which]
    return np.stack(columns, axis=1)


def _walk(causal: bool, window: int | None, paired: bool, reach: int) -> _Walk:
    """For blocks whose end lies up to `reach` rows after their prompt's first key.

    The row r of the block that ends at e sees keys up to r: those of runs at distances from 80 on are before all rows
    of the block. It sees keys after r - window: all of those of runs at distances up to the window are.
    """
    # Where all keys lie before the rows, they begin at the block's first row; the second block's own keys lie behind
    # the first one's end.
    first = ROWS + RUN if not causal else RUN - ROWS if paired else RUN
    near = np.arange(first, first + TILE, RUN)
    if window is None or not causal:
        num_tiles = max(0, -(-(reach + RUN - near[-1]) // TILE))
        return _Walk(near, np.arange(num_tiles * RUNS) * RUN + first + TILE)
    every = np.arange(first, -(-(window + ROWS - 1) // RUN) * RUN + 1, RUN)
    whole = every[(every >= first + TILE) & (every <= window - (ROWS if paired else 0))]
    whole = whole[: len(whole) // RUNS * RUNS]
    return _Walk(np.setdiff1d(every, whole), whole)


def _records(
    units: np.ndarray, walk: _Walk, num_kv: int, jobs: int, heads_per_tile: int, window: int | None
) -> np.ndarray:
    """What `range_index.records` describes, int32 [W, RECORD]: for each K/V head all tiles of queries, and for each of
    these the jobs of that head side by side, so that they find its keys in the cache."""
    place, end, low, high, first_key, num_keys = units.T
    num_masked = np.maximum(1, -(-np.searchsorted(walk.masked, end + RUN) // RUNS))
    num_whole = -(-np.searchsorted(walk.whole, end + RUN) // RUNS)
    crossing = np.zeros_like(end)
    if len(walk.whole):
        last = walk.whole[np.maximum(num_whole * RUNS - 1, 0)]
        crossing = ((num_whole > 0) & (last > end)).astype(np.int64) << 1
    items = np.zeros((num_kv, len(units), jobs, RECORD), dtype=np.int32)
    head = np.arange(num_kv * jobs).reshape(num_kv, 1, jobs) * heads_per_tile
    items[..., 0], items[..., 1] = head, head + heads_per_tile - 1
    items[..., 3] = np.arange(num_kv)[:, None, None]
    after_masked = -(-len(walk.masked) // RUNS) * RUNS
    items[..., 11] = after_masked
    items[..., 12:14] = after_masked + len(walk.whole)
    for number, values in (
        (2, end),
        (4, place),
        (5, low),
        (6, high),
        (7, first_key),
        (8, num_keys),
        (14, num_masked),
        (15, num_whole),
        (21, crossing),
    ):
        items[..., number] = values[None, :, None]
    items[..., 20] = window or 0
    return items.reshape(-1, RECORD)


def balanced(work: np.ndarray, num_programs: int) -> np.ndarray:
    """An order of tasks in which programs that each take every num_programs-th of them have about equal work: only
    those that are begun at the same time change places, the longest going to the program that had the least so far."""
    order = np.arange(len(work))
    done = np.zeros(num_programs, dtype=np.int64)
    # The last round has not enough for all, and those that get nothing then may have more before.
    if rest := len(work) % num_programs:
        done[:rest] = work[-rest:].mean()
    for start in range(0, len(work), num_programs):
        here = order[start : start + num_programs].copy()
        programs = np.argsort(done[: len(here)], kind="stable")
        longest = here[np.argsort(-work[here], kind="stable")]
        order[start + programs] = longest
        done[programs] += work[longest]
    return order


@lru_cache(maxsize=32)
def _index(
    causal: bool, window: int | None, paired: bool, reach: int, dim: int, dtype: torch.dtype, device: torch.device
) -> RangeIndex:
    """The list of runs on the device, without columns."""
    walk = _walk(causal, window, paired, reach)
    after_masked = -(-len(walk.masked) // RUNS) * RUNS
    last = after_masked + len(walk.whole)
    # A length that is always a multiple of 16 is one kind less to compile for.
    runs = np.zeros((1, -(-last // 16) * 16, 2), dtype=np.int32)
    for start, distances in ((0, walk.masked), (after_masked, walk.whole)):
        runs[0, start : start + len(distances), 0] = distances
        runs[0, start : start + len(distances), 1] = ALL_BITS

    def numbers(*values: int) -> Tensor:
        return torch.tensor([values], dtype=torch.int32).to(device, non_blocking=True)

    nothing = torch.zeros(1, TILE, dim, dtype=dtype, device=device)
    no_bits, clean = numbers(*[0] * (TILE // 32)), torch.zeros(1, 1, dtype=torch.int8, device=device)
    columns = Columns(numbers(*[2**31 - 1] * TILE), nothing, nothing, no_bits, clean)
    return RangeIndex(
        paired=paired,
        runs=torch.from_numpy(runs).to(device, non_blocking=True),
        classes=numbers(0, after_masked, last, last, last),
        columns=columns,
        windows=numbers(window or 0)[0],
        places=numbers(0, reach, 0, 0, 0, 0),
    )
