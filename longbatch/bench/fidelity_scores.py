"""Every token of a document scored, dense or by patterns, and how far the two are apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longbatch.engine.layer_pass import Document, LayerPass, SparsePass
from longbatch.models.decoder import Decoder
from longbatch.models.spec import ModelSpec
from longbatch.plan.sparse_cost import dense_seconds, layer_seconds
from longbatch.plan.sparse_rates import SparseRates
from longbatch.sparsity import LayerPatterns

# Numbers in one tile of logits.
LOGITS = 1 << 26


@dataclass(frozen=True, slots=True)
class Scored:
    """logprobs float32 [N - 1] of each token after the first, given those before it; best int64 [N - 1], the most
    likely token there; both on the CPU. shares: density of each selection of each layer, None for a dense layer."""

    logprobs: Tensor
    best: Tensor
    shares: tuple[tuple[float, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class Gap:
    """nats: mean |difference of log-probability| of a token. agreement: share of positions with the same best token.
    density: executed share of the causal pairs of all heads of layers without a window of their own. seconds: predicted
    for these layers' attention; dense_seconds: were they dense."""

    nats: float
    agreement: float
    density: float
    seconds: float
    dense_seconds: float


@torch.inference_mode()
def score(model: Decoder, ids: Sequence[int], patterns: Sequence[LayerPatterns] | None, tile_rows: int) -> Scored:
    """Prefill layer by layer. patterns: of each layer; None: all dense."""
    tokens = torch.tensor(list(ids), device=model.device)
    document = Document(model.embed(tokens))
    shares = tuple(
        _advance(LayerPass(model, index, document, tile_rows), None if patterns is None else patterns[index])
        for index in range(len(model.layers))
    )
    logprobs, best = [], []
    rows = max(1, LOGITS // model.spec.vocab_size)
    for low in range(0, len(tokens) - 1, rows):
        high = min(low + rows, len(tokens) - 1)
        logits = model.logits(model.final_norm(document.hidden[low:high]))
        chosen = logits.gather(1, tokens[low + 1 : high + 1, None])[:, 0]
        logprobs.append((chosen - logits.logsumexp(-1)).cpu())
        best.append(logits.argmax(-1).cpu())
    return Scored(torch.cat(logprobs), torch.cat(best), shares)


def compare(
    dense: Scored, sparse: Scored, patterns: Sequence[LayerPatterns], spec: ModelSpec, rates: SparseRates
) -> Gap:
    """The gap of one document. Shares that were measured here price the patterns."""
    length = len(dense.logprobs) + 1
    selected = heads = seconds = whole = 0.0
    for layer, own, shares in zip(spec.layers, patterns, sparse.shares, strict=True):
        if layer.window is not None:
            continue
        heads += layer.num_heads
        whole += dense_seconds(length, layer, rates)
        selected += layer.num_heads * (1.0 if shares is None else sum(shares) / len(shares))
        seconds += layer_seconds(own, length, layer, rates, shares)
    return Gap(
        nats=float((dense.logprobs - sparse.logprobs).abs().double().mean()),
        agreement=float((dense.best == sparse.best).double().mean()),
        density=selected / heads,
        seconds=seconds,
        dense_seconds=whole,
    )


def mean(gaps: Iterable[Gap]) -> Gap:
    """The mean over documents of equal length."""
    found = list(gaps)
    return Gap(**{name: sum(getattr(gap, name) for gap in found) / len(found) for name in Gap.__dataclass_fields__})


def _advance(run: LayerPass, patterns: LayerPatterns | None) -> tuple[float, ...] | None:
    """One layer over the document in place; the density of each selection."""
    if patterns is None or patterns.is_dense:
        run.advance(None)
        return None
    sparse = SparsePass(run, patterns)
    for rows in run.tiles():
        attention = sparse.attend(rows, run.queries(rows))
        run.document.hidden[rows] = run.layer.mlp(run.layer.out(run.hidden(rows), attention))
    return tuple(sparse.shares())
