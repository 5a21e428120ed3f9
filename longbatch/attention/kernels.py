"""The kernels that run a tile's dense attention at once: longbatch's own, and FlashAttention in torch or in a package.

Each takes queries [n, H, D] of the whole tile and gives a `State` of all of its dense pieces; rows of other pieces are
undefined. FlashAttention's find each piece's queries and keys by lists of lengths, and see the causal mask from its
lower right corner: the last query beside the last key that is counted.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longbatch.attention.choice import FLASH_2, FLASH_3, OWN, has_flash_3
from longbatch.attention.packed import Batch, Part, ReadKeys, TileWork
from longbatch.attention.state import State, aten, merge


def packed_kernels() -> list[str]:
    """Names of those that can be tried on a GPU here."""
    own = [OWN] if importlib.util.find_spec("triton") is not None else []
    return [*own, FLASH_2, *([FLASH_3] if has_flash_3() else [])]


def attend_tile(name: str, q: Tensor, work: TileWork, read: ReadKeys, *, scale: float) -> State:
    """Dense attention of a tile's work by one of `packed_kernels`."""
    if name == OWN:
        return _own(q, work, read, scale)
    return _by_lengths({FLASH_2: _flash_2, FLASH_3: _flash_3}[name], q, work, read, scale)


# ------------------------------------------------------------------------------------------ longbatch's own


def _own(q: Tensor, work: TileWork, read: ReadKeys, scale: float) -> State:
    """Keys before the tile's segments go into a carry, from which the launches over the others go on."""
    from longbatch_kernels.dense_attention import dense_attention
    from longbatch_kernels.range_attention import Carry

    carry = None
    for batch in work.before:
        k, v = read(batch.reads)
        ready = _ready(batch, q, k, None)
        found = dense_attention(q, k, v, ready, scale=scale, carry=carry, carry_out=True)
        assert isinstance(found, Carry)
        carry = found
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    for batch in work.own:
        k, v = read(batch.reads)
        dense_attention(q, k, v, _ready(batch, q, k, work.window), scale=scale, out=out, lse=lse, carry=carry)
    return State(out, lse)


def _ready(batch: Batch, q: Tensor, k: Tensor, window: int | None) -> Any:
    from longbatch_kernels.dense_attention import prepare_dense
    from longbatch_kernels.range_index import PackedPrompt

    if OWN not in batch.prepared:
        prompts = [PackedPrompt(*part) for part in batch.parts]
        batch.prepared[OWN] = prepare_dense(prompts, k, num_heads=q.shape[1], causal=batch.causal, window=window)
    return batch.prepared[OWN]


# ------------------------------------------------------------------------------------------ FlashAttention


class _Lengths(NamedTuple):
    """Parts whose queries follow one another, rows `rows` of the tile. starts_q, starts_k int32 [B + 1]: where the
    queries of each begin among these rows, and its keys. num_keys int32 [B]: keys of each that are counted."""

    rows: slice
    parts: tuple[Part, ...]
    starts_q: Tensor
    starts_k: Tensor
    num_keys: Tensor
    most_queries: int
    most_keys: int


# (q of the rows, k, v, their lengths, scale, causal, window) -> State of the rows.
_Kernel = Callable[[Tensor, Tensor, Tensor, _Lengths, float, bool, int | None], State]


def _by_lengths(kernel: _Kernel, q: Tensor, work: TileWork, read: ReadKeys, scale: float) -> State:
    total: State | None = None
    for batch in (*work.own, *work.before):
        k, v = read(batch.reads)
        window = work.window if batch.causal else None
        for lengths in _all_lengths(batch, q.device):
            rows = lengths.rows
            found = kernel(q[rows], k, v, lengths, scale, batch.causal, window)
            if total is None and rows == slice(0, q.shape[0]):
                total = found
                continue
            if total is None:
                lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
                total = State(torch.empty(q.shape, dtype=q.dtype, device=q.device), lse)
            if not batch.causal:
                found = merge([State(total.out[rows], total.lse[:, rows]), found])
            total.out[rows], total.lse[:, rows] = found
    assert total is not None
    return total


def _all_lengths(batch: Batch, device: torch.device) -> tuple[_Lengths, ...]:
    if FLASH_2 not in batch.prepared:
        batch.prepared[FLASH_2] = tuple(_lengths(parts, batch.causal, device) for parts in _runs(batch.parts))
    found: tuple[_Lengths, ...] = batch.prepared[FLASH_2]
    return found


def _runs(parts: tuple[Part, ...]) -> Iterator[tuple[Part, ...]]:
    """Parts whose queries follow one another."""
    run: list[Part] = []
    for part in parts:
        if run and run[-1].first_query + run[-1].num_queries != part.first_query:
            yield tuple(run)
            run = []
        run.append(part)
    yield tuple(run)


def _lengths(parts: tuple[Part, ...], causal: bool, device: torch.device) -> _Lengths:
    first, last = parts[0].first_query, parts[-1].first_query + parts[-1].num_queries
    num_keys = [part.q_offset + part.num_queries if causal else part.num_keys for part in parts]
    starts_k = [part.first_key for part in parts]

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)

    return _Lengths(
        slice(first, last),
        parts,
        numbers([*(part.first_query - first for part in parts), last - first]),
        # Where keys of several parts are the same ones, starts do not ascend; their number says where they end.
        numbers([*starts_k, starts_k[-1] + num_keys[-1]]),
        numbers(num_keys),
        max(part.num_queries for part in parts),
        max(num_keys),
    )


def _flash_2(
    q: Tensor, k: Tensor, v: Tensor, lengths: _Lengths, scale: float, causal: bool, window: int | None
) -> State:
    """torch's own build of FlashAttention-2 (arXiv 2307.08691)."""
    out, lse = aten._flash_attention_forward(
        q,
        k,
        v,
        lengths.starts_q,
        lengths.starts_k,
        lengths.most_queries,
        lengths.most_keys,
        0.0,
        causal,
        False,
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=-1 if window is None else 0,
        seqused_k=lengths.num_keys,
    )[:2]
    return State(out, lse)


def _flash_3(
    q: Tensor, k: Tensor, v: Tensor, lengths: _Lengths, scale: float, causal: bool, window: int | None
) -> State:
    """FlashAttention-3 (arXiv 2407.08608) by the package flash_attn_3, github.com/Dao-AILab/flash-attention/hopper."""
    flash = importlib.import_module("flash_attn_interface")
    options = {
        "softmax_scale": scale,
        "causal": causal,
        "window_size": (-1, -1) if window is None else (window - 1, 0),
        "return_attn_probs": True,
    }
    if len(lengths.parts) == 1:
        # One prompt needs no lists, and its work is shared out without them.
        keys = slice(lengths.parts[0].first_key, lengths.parts[0].first_key + lengths.most_keys)
        out, lse = flash.flash_attn_func(q[None], k[None, keys], v[None, keys], **options)
        return State(out[0], lse[0])
    out, lse = flash.flash_attn_varlen_func(
        q,
        k,
        v,
        lengths.starts_q,
        lengths.starts_k,
        lengths.most_queries,
        lengths.most_keys,
        seqused_k=lengths.num_keys,
        **options,
    )
    return State(out, lse)
