"""longbatch's forward and answers beside transformers' LlamaForCausalLM with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Errors of one rounding order against another's: how much larger ours may be than transformers' own.
MOST_ERROR = 1.25
# An answer's token may lie below the best one by so many of transformers' own errors: the largest difference of two
# errors among some 100,000 candidates.
MOST_GAP = 8.0
TILE_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Reference:
    """Both against transformers in float32.

    error, own_error: relative RMS error of the logits of one prompt, longbatch's and transformers' in the dtype of
    the run. agreement, own_agreement: share of positions with the same best token. prefixes: tokens of each answer
    until it differs from transformers' `generate`. exact: share of answer tokens that float32 ranks first, after the
    same tokens. gap: how far the worst answer token lies below the best, in transformers' own errors.
    """

    error: float
    own_error: float
    agreement: float
    own_agreement: float
    prefixes: list[int]
    exact: float
    gap: float

    @property
    def logits_hold(self) -> bool:
        """Whether the logits are as close to float32 as transformers' own."""
        return self.error <= MOST_ERROR * self.own_error

    @property
    def answers_hold(self) -> bool:
        """Whether every answer token is the best one, or as good as the best for this dtype."""
        return self.gap <= MOST_GAP


def compare_model(
    folder: Path,
    device_name: str,
    dtype_name: str,
    probe: Sequence[int],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> Reference:
    """Compare the logits of `probe`, and greedy answers that a run gave to `prompts`. Needs memory for the weights in
    float32 and in the dtype."""
    import torch
    from transformers import LlamaForCausalLM

    place, dtype = torch.device(device_name), getattr(torch, dtype_name)

    def tensor(ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(ids)], device=place)

    with torch.inference_mode():
        ours = _our_logits(folder, place, dtype, probe)
        model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        model.to(place)
        theirs = model(tensor(probe)).logits[0].float()
        prefixes = []
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = tensor(prompt)
            mask = torch.ones_like(ids)
            output = model.generate(ids, attention_mask=mask, max_new_tokens=len(answer), do_sample=False)
            prefixes.append(_common(answer, output[0, len(prompt) :].tolist()))
        model.float()
        exact = model(tensor(probe)).logits[0]
        noise = _rms(theirs - exact)
        firsts: list[torch.Tensor] = []
        gaps: list[torch.Tensor] = []
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = tensor([*prompt, *answer[:-1]])
            logits = model(ids, logits_to_keep=len(answer)).logits[0]
            chosen = logits.gather(1, tensor(answer).T)[:, 0]
            gaps.append(logits.amax(-1) - chosen)
            firsts.append(gaps[-1] <= 0)
        size, best = _rms(exact), exact.argmax(-1)
        return Reference(
            error=_rms(ours - exact) / size,
            own_error=noise / size,
            agreement=_share(ours.argmax(-1) == best),
            own_agreement=_share(theirs.argmax(-1) == best),
            prefixes=prefixes,
            exact=_share(torch.cat(firsts)),
            gap=float(torch.cat(gaps).max()) / noise,
        )


def _our_logits(folder: Path, device: torch.device, dtype: torch.dtype, ids: Sequence[int]) -> torch.Tensor:
    """float32 [len(ids), vocab] from longbatch's prefill, in tiles as a run has them."""
    import numpy as np
    import torch

    from longbatch.cache import PAGE_TOKENS, KVCache
    from longbatch.engine.packing import Branch, Family, pack
    from longbatch.engine.prefill import prefill
    from longbatch.models import load

    model = load(folder, dtype, device)
    length = len(ids)
    num_pages = -(-length // PAGE_TOKENS)
    shapes = [(layer.num_kv_heads, layer.head_dim) for layer in model.spec.layers]
    cache = KVCache(shapes, num_pages, dtype=dtype, device=device)
    branch = Branch(0, np.array(ids, dtype=np.int32), ((0, length),), length, cache.pool.allocate(num_pages))
    logits = []
    for packed in pack([Family([branch])], step_tokens=length, tile_rows=TILE_ROWS, device=device):
        hidden = prefill(model, cache, packed.step)
        logits.append(model.logits(model.final_norm(hidden)))
    return torch.cat(logits)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens until the two differ."""
    same = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        same += 1
    return same


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def _share(flags: torch.Tensor) -> float:
    return float(flags.float().mean())
