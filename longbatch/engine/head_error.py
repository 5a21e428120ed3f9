"""The error that a head's attention makes under a pattern, on calibration documents.

    error of a head     = ||sparse - dense|| / ||dense||    over all rows of a document and the head's dimensions
    influence of a head = root mean square over rows of ||what it adds to the hidden state|| / ||the hidden state||

Their product tells how far the head's error moves the hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longbatch.engine.layer_pass import Document, LayerPass, SparsePass
from longbatch.models.decoder import Decoder
from longbatch.sparsity import LayerPatterns, PatternSpec

# Rows of a document, evenly spaced, that influence is taken from.
INFLUENCE_ROWS = 4096


@dataclass(slots=True)
class Outcome:
    """A trial of one selection. errors: of each query head that uses it, the worst document's. shares: density on each
    document, in order, up to the first one that it failed on."""

    errors: list[float]
    shares: list[float]


class Trials:
    """Candidates of a layer on all documents. Dense outputs are made once and kept on `storage`."""

    def __init__(
        self, model: Decoder, index: int, documents: Sequence[Document], tile_rows: int, storage: torch.device
    ) -> None:
        self._model, self._index = model, index
        self._documents, self._tile_rows = documents, tile_rows
        self._spec = model.spec.layers[index]
        self._dense: list[Tensor] = []
        self._norms: list[Tensor] = []
        for document in documents:
            run = LayerPass(model, index, document, tile_rows)
            shape = (document.length, self._spec.num_heads, self._spec.head_dim)
            outputs = torch.empty(shape, dtype=model.dtype, device=storage)
            norms = torch.zeros(self._spec.num_heads, dtype=torch.float64, device=model.device)
            for rows in run.tiles():
                dense = run.dense(rows, run.queries(rows))
                norms += _squares(dense)
                outputs[rows] = dense
            self._dense.append(outputs)
            self._norms.append(norms)

    def influences(self) -> list[float]:
        """The influence of each query head, on the document where it is largest."""
        most = torch.zeros(self._spec.num_heads, dtype=torch.float64)
        for document, dense in zip(self._documents, self._dense, strict=True):
            most = torch.maximum(most, self._influence(document, dense).cpu())
        found: list[float] = most.tolist()
        return found

    def _influence(self, document: Document, dense: Tensor) -> Tensor:
        """On one document: float64 [H]."""
        layer, device = self._model.layers[self._index], self._model.device
        number = min(document.length, INFLUENCE_ROWS)
        rows = torch.linspace(0, document.length - 1, number, dtype=torch.float64).long()
        hidden = document.hidden[rows.to(document.hidden.device)].to(device)
        outputs = dense[rows.to(dense.device)].to(device)
        # Onto zeros, so that a narrow number format does not swallow what a head adds.
        added = layer.out(torch.zeros_like(hidden), outputs).float()
        size = (hidden.float() + added).norm(dim=1).clamp(min=1e-30)
        found = torch.zeros(self._spec.num_heads, dtype=torch.float64, device=device)
        for head in range(self._spec.num_heads):
            others = outputs.clone()
            others[:, head] = 0
            own = added - layer.out(torch.zeros_like(hidden), others).float()
            found[head] = (own.norm(dim=1) / size).square().mean().sqrt()
        return found

    def run(self, wanted: Mapping[int, PatternSpec], *, shared: bool, limits: Sequence[float]) -> dict[int, Outcome]:
        """Try one candidate for each of some selections: query heads, or kv heads where `shared`. limits: largest error
        of each query head. A candidate whose error on a document is larger, or no number, is not tried on the next."""
        each = self._spec.num_heads // self._spec.num_kv_heads if shared else 1
        outcomes = {at: Outcome([], []) for at in wanted}
        left = dict(wanted)
        for document, dense, norms in zip(self._documents, self._dense, self._norms, strict=True):
            if not left:
                break
            run = LayerPass(self._model, self._index, document, self._tile_rows)
            for at, (errors, share) in self._try(run, dense, norms, left, shared).items():
                outcome = outcomes[at]
                outcome.shares.append(share)
                outcome.errors = [max(pair) for pair in zip(errors, outcome.errors or errors, strict=True)]
                if any(error > limit for error, limit in zip(errors, limits[at * each :], strict=False)):
                    del left[at]
        return outcomes

    def _try(
        self, run: LayerPass, dense: Tensor, norms: Tensor, wanted: Mapping[int, PatternSpec], shared: bool
    ) -> dict[int, tuple[list[float], float]]:
        """For each selection the errors of its query heads and its density, on one document."""
        each = self._spec.num_heads // self._spec.num_kv_heads
        ran = sorted(wanted)
        if shared:
            kv_heads, heads = ran, [kv * each + i for kv in ran for i in range(each)]
        elif self._model.device.type == "cpu":
            # A mask costs the same for every head, so that none runs beside those that are asked for.
            kv_heads, heads = [head // each for head in ran], ran
        else:
            kv_heads = sorted({head // each for head in ran})
            ran = heads = [kv * each + i for kv in kv_heads for i in range(each)]
        # A head that nothing is asked of runs what another one of its group runs.
        groups = {at // each: spec for at, spec in wanted.items()}
        patterns = LayerPatterns(tuple(wanted.get(at) or groups[at // each] for at in ran), shared)
        whole = len(heads) == self._spec.num_heads and len(kv_heads) == self._spec.num_kv_heads
        sparse = SparsePass(run, patterns, None if whole else heads, None if whole else kv_heads)
        sums = torch.zeros(len(heads), dtype=torch.float64, device=norms.device)
        for rows in run.tiles():
            out = sparse.attend(rows, run.queries(rows))
            exact = dense[rows] if whole else dense[rows][:, heads]
            sums += _squares(out.float().sub_(exact.to(out.device)))
        errors = dict(zip(heads, _relative(sums, norms[heads]), strict=True))
        shares = dict(zip(ran, sparse.shares(), strict=True))
        if shared:
            return {at: ([errors[at * each + i] for i in range(each)], shares[at]) for at in ran}
        return {at: ([errors[at]], shares[at]) for at in wanted}


def _squares(x: Tensor) -> Tensor:
    """Sum of squares of each head of [n, H, D]: float64 [H]."""
    return x.float().square().sum(dim=(0, 2), dtype=torch.float64)


def _relative(sums: Tensor, norms: Tensor) -> list[float]:
    """sqrt(sums / norms), both [H]; infinite where that is no number, 0 where both are 0."""
    ratios = (sums / norms.clamp(min=torch.finfo(torch.float64).tiny)).sqrt().tolist()
    return [ratio if math.isfinite(ratio) else math.inf for ratio in ratios]
