"""Prefill, layer by layer over a whole step: layer 0 for every token, then layer 1, and so on.

Within a layer: K and V of all tokens first; then, tile by tile, Q, attention, output projection and MLP. Neither
the queries nor the attention output of a whole prompt ever exist at once. The last layer runs only the positions
that somebody reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longbatch.attention import Step
from longbatch.cache import KVCache
from longbatch.engine.layer_attention import LayerAttention
from longbatch.models.decoder import Decoder, Layer
from longbatch.models.rope import RopeValues


@torch.inference_mode()
def prefill(model: Decoder, cache: KVCache, step: Step) -> Tensor:
    """Run a step; K/V go where the step says. Returns hidden states [R, hidden] of the positions read, in the
    order of segments and positions, before the final norm."""
    x = model.embed(step.ids)
    ropes = RopeTable(model, step.positions, step.rope_lengths)
    last = len(model.layers) - 1
    for index, layer in enumerate(model.layers):
        if index < last:
            _run_layer(layer, index, x, ropes, cache, step)
        else:
            x = _run_last(layer, index, x, ropes, cache, step)
    return x


class RopeTable:
    """Cosines and sines of every distinct rotation of a model, for all tokens of a step; computed once."""

    def __init__(self, model: Decoder, positions: Tensor, lengths: Tensor) -> None:
        self._values = [rope.cos_sin(positions, lengths) for rope in model.ropes]

    def of(self, layer: Layer, rows: slice | Tensor | None = None) -> RopeValues | None:
        """The values that a layer takes for some packed rows, or for all of them."""
        if layer.rope_index is None:
            return None
        values = self._values[layer.rope_index]
        return values if rows is None else RopeValues(values.cos[rows], values.sin[rows])


def _run_layer(layer: Layer, index: int, x: Tensor, ropes: RopeTable, cache: KVCache, step: Step) -> None:
    """One layer for every token, in place in x [T, hidden]."""

    def queries(rows: slice) -> Tensor:
        return layer.q(layer.norm(x[rows]), ropes.of(layer, rows))

    if len(step.tiles) == 1:
        q, k, v = layer.qkv(layer.norm(x), ropes.of(layer))
        _store(cache, index, step, k, v)
        attention = LayerAttention(layer, index, (k, v), cache, step, queries)
        layer.mlp(layer.out(x, attention.tile(q, step.tiles[0])))
        return
    k, v = _keys_and_values(layer, x, ropes, step)
    _store(cache, index, step, k, v)
    attention = LayerAttention(layer, index, (k, v), cache, step, queries)
    for tile in step.tiles:
        rows = tile.rows
        assert rows is not None
        layer.mlp(layer.out(x[rows], attention.tile(queries(rows), tile)))


def _run_last(layer: Layer, index: int, x: Tensor, ropes: RopeTable, cache: KVCache, step: Step) -> Tensor:
    """The last layer: K and V of every token if they are kept or attended to, the rest only where it is read.
    Writes into x where the positions read are consecutive."""
    k, v = _keys_and_values(layer, x, ropes, step)
    _store(cache, index, step, k, v)

    def queries(rows: slice | Tensor) -> Tensor:
        return layer.q(layer.norm(x[rows]), ropes.of(layer, rows))

    attention = LayerAttention(layer, index, (k, v), cache, step, queries, only_reads=True)
    outs = [x.new_empty((0, x.shape[1]))]
    for tile in step.read_tiles():
        rows: slice | Tensor | None = tile.rows
        if rows is None:
            rows = torch.cat([torch.arange(p.rows.start, p.rows.stop, device=x.device) for p in tile.pieces])
        q = queries(rows)
        outs.append(layer.mlp(layer.out(x[rows], attention.tile(q, tile))))
    return torch.cat(outs)


def _keys_and_values(layer: Layer, x: Tensor, ropes: RopeTable, step: Step) -> tuple[Tensor, Tensor]:
    """K and V [T, kv_heads, head_dim] of every token."""
    shape = (x.shape[0], layer.spec.num_kv_heads, layer.spec.head_dim)
    k, v = x.new_empty(shape), x.new_empty(shape)
    for tile in step.tiles:
        rows = tile.rows
        assert rows is not None
        k[rows], v[rows] = layer.kv(layer.norm(x[rows]), ropes.of(layer, rows))
    return k, v


def _store(cache: KVCache, index: int, step: Step, k: Tensor, v: Tensor) -> None:
    if step.writes is not None:
        cache.write(index, step.writes, k, v)
