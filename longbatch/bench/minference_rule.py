"""MInference's way of choosing a pattern for each head, as its code has it, to stand beside a profile.

`search_pattern` in minference/modules/minference_forward.py (github.com/microsoft/MInference, commit fb56c91; arXiv
2407.02490): one long example, dense layers before, a fixed menu. The entry that keeps the most softmax mass, averaged
over the queries from 2,500 on, wins; what it costs does not count. A winning A-shape is then run as vertical-slash
(100, 800), a winning block-sparse as (1000, 6096).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longbatch.engine.layer_pass import Document, LayerPass
from longbatch.models.decoder import Decoder

A_SHAPE = (100, 800)
VERTICAL_SLASH = ((30, 800), (100, 750), (500, 700), (3500, 100))
BLOCK, BLOCK_SHARE = 32, 8
REWRITTEN = {"a_shape": (100, 800), "block_sparse": (1000, 6096)}
FIRST_QUERY = 2500
LAST_QUERIES, TILE_ROWS = 64, 1024
FORCED_COLUMNS, FORCED_DISTANCES = 30, 30  # of the search; prefill forces 100 distances
# Scores of at most so many pairs are held at once.
PAIRS = 1 << 24


@torch.inference_mode()
def choose(model: Decoder, ids: Sequence[int], first_query: int = FIRST_QUERY) -> list[list[tuple[int, int]] | None]:
    """(vertical, slash) of every head of every layer, None for a layer with a window or a soft-cap of its own.

    ids: one example, longer than `first_query`.
    """
    document = Document(model.embed(torch.tensor(list(ids), device=model.device)))
    found: list[list[tuple[int, int]] | None] = []
    for index in range(len(model.layers)):
        run = LayerPass(model, index, document, TILE_ROWS)
        spec = run.layer.spec
        if spec.is_plain:
            q, group = run.queries(slice(0, document.length)), spec.num_heads // spec.num_kv_heads
            heads = []
            for head in range(spec.num_heads):
                kept = mass_kept(q[:, head], run.k[:, head // group], spec.scale, first_query)
                name, budget = max(kept, key=lambda entry: kept[entry])
                heads.append(REWRITTEN.get(name, budget))
            found.append(heads)
        else:
            found.append(None)
        run.advance(None)
    return found


def mass_kept(q: Tensor, k: Tensor, scale: float, first_query: int) -> dict[tuple[str, tuple[int, int]], float]:
    """Softmax mass that each entry of the menu keeps of a head, mean over the queries from `first_query` on.
    q, k [N, D]."""
    length, device = q.shape[0], q.device
    masks = [(("a_shape", A_SHAPE), _from(A_SHAPE[0], length, device), _from(A_SHAPE[1] + 1, length, device))]
    columns, distances = _last_query_sums(q[-LAST_QUERIES:], k, scale)
    for vertical, slash in VERTICAL_SLASH:
        entry = ("vertical_slash", (vertical, slash))
        masks.append((entry, _highest(columns, vertical), _highest(distances, slash)))
    blocks = _block_map(q, k)
    kept = dict.fromkeys([*(entry for entry, _, _ in masks), ("block_sparse", (BLOCK_SHARE, 1))], 0.0)
    keys = torch.arange(length, device=device)
    rows = max(1, PAIRS // length)
    for low in range(first_query, length, rows):
        high = min(low + rows, length)
        distance = torch.arange(low, high, device=device)[:, None] - keys[:high]
        scores = (q[low:high].float() @ k[:high].float().T) * scale
        mass = scores.masked_fill_(distance < 0, float("-inf")).softmax(-1)
        distance.clamp_(min=0)
        for entry, column_mask, distance_mask in masks:
            kept[entry] += float((mass * (column_mask[:high] | distance_mask[distance])).sum())
        queries = torch.arange(low, high, device=device) // BLOCK
        kept["block_sparse", (BLOCK_SHARE, 1)] += float((mass * blocks[queries][:, keys[:high] // BLOCK]).sum())
    return {entry: total / (length - first_query) for entry, total in kept.items()}


def _last_query_sums(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of the last queries q [m, D], summed by key and by distance, both float32 [N], with what is forced."""
    count, length = q.shape[0], k.shape[0]
    rows = torch.arange(length - count, length, device=k.device)[:, None]
    distance = rows - torch.arange(length, device=k.device)
    scores = (q.float() @ k.float().T) * scale
    mass = scores.masked_fill_(distance < 0, float("-inf")).softmax(-1)
    columns, distances = mass.sum(0), torch.zeros(length, device=k.device)
    distances.scatter_add_(0, distance.clamp(min=0).flatten(), mass.flatten())
    columns[:FORCED_COLUMNS] = float("inf")
    distances[:FORCED_DISTANCES] = float("inf")
    return columns, distances


def _block_map(q: Tensor, k: Tensor) -> Tensor:
    """bool [blocks, blocks]: the eighth of the key blocks with the highest product of means, unscaled."""
    num_blocks = -(-q.shape[0] // BLOCK)
    pad = (0, 0, 0, num_blocks * BLOCK - q.shape[0])
    means = [torch.nn.functional.pad(x.float(), pad).view(num_blocks, BLOCK, -1).mean(1) for x in (q, k)]
    scores = means[0] @ means[1].T
    later = torch.ones_like(scores, dtype=torch.bool).triu_(1)
    scores.masked_fill_(later, torch.finfo(scores.dtype).min)
    chosen = scores.topk(num_blocks // BLOCK_SHARE, dim=-1).indices
    return torch.zeros_like(later).scatter_(1, chosen, True)


def _from(count: int, length: int, device: torch.device) -> Tensor:
    """bool [length]: the first `count`."""
    return torch.arange(length, device=device) < count


def _highest(values: Tensor, count: int) -> Tensor:
    """bool, like values: the `count` highest."""
    chosen = values.topk(min(count, len(values))).indices
    return torch.zeros_like(values, dtype=torch.bool).index_fill_(0, chosen, True)
