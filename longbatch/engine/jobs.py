"""From a row to what runs: the families of its task, the readers of its hidden states, and its finished result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from longbatch.attention import Executed
from longbatch.cache.pages import PAGE_TOKENS, PagePool, pages_for
from longbatch.core import Prompt, Request, Result, TokenLogprob
from longbatch.engine.faults import nonfinite
from longbatch.engine.ladder import Ladder, Shape
from longbatch.engine.limits import EngineAttention
from longbatch.engine.packing import Branch, Family
from longbatch.engine.readout import LastReader, MeanReader, Reader, ScoreReader, Scores
from longbatch.engine.sampler import row_seed
from longbatch.engine.sequence import Sequence
from longbatch.engine.sharing import group
from longbatch.engine.stopping import StopRule
from longbatch.models import ModelSpec
from longbatch.models.decoder import Decoder
from longbatch.prompt import Tokenizer


@dataclass(slots=True)
class Owner:
    """Who a branch belongs to and who reads its hidden states."""

    sequence: Sequence
    reader: Reader


def open_sequence(
    request: Request,
    prompt: Prompt,
    tokenizer: Tokenizer,
    ladder: Ladder,
    eos_ids: frozenset[int],
    shape: Shape | None = None,
) -> Sequence:
    """The engine's state for one row. shape: of its prefill alone, for a row that is on its way down the ladder."""
    limits, num_tokens = ladder.limits, _num_tokens(request, prompt)
    seed = row_seed(limits.run_seed, request.key, request.sampling)
    descending = shape is not None
    shape = shape or ladder.shape(num_tokens)
    sequence = Sequence(request, prompt, Result(request.key, request.row), seed, shape, num_tokens=num_tokens)
    result, sampling = sequence.result, request.sampling
    result.carried, result.fingerprint = request.carried, request.fingerprint
    result.usage.prompt_tokens = len(prompt.ids)
    if request.task.decodes:
        sequence.max_tokens = limits.max_tokens if sampling.max_tokens is None else sampling.max_tokens
        ids = eos_ids | frozenset(sampling.stop_token_ids)
        sequence.stop = StopRule(ids, sampling.stop, sequence.max_tokens, tokenizer)
    sequence.chunked = num_tokens > shape.step_tokens
    sequence.alone = sequence.chunked or descending
    sequence.num_pages = _num_pages(sequence)
    return sequence


def _num_tokens(request: Request, prompt: Prompt) -> int:
    """Tokens that the row's prefill runs: each label repeats the prompt's end behind the trunk."""
    length = len(prompt.ids)
    if not request.task.branches:
        return length
    trunk = _trunk_length(length)
    return trunk + sum(length - trunk + len(label) - 1 for label in prompt.branches)


def _num_pages(sequence: Sequence) -> int:
    """Pages that the row holds: for its answer when it decodes, for its own later chunks when it is chunked."""
    if not sequence.request.task.decodes and not sequence.chunked:
        return 0
    prompt = len(sequence.prompt.ids)
    if not sequence.request.task.branches:
        return pages_for(prompt + sequence.max_tokens)
    trunk = _trunk_length(prompt)
    tails = sum(pages_for(prompt - trunk + len(label) - 1) for label in sequence.prompt.branches)
    return trunk // PAGE_TOKENS + tails


def families_of(
    sequences: list[Sequence],
    model: Decoder,
    pool: PagePool,
    tile_rows: int,
    attention: EngineAttention | None = None,
    *,
    share: bool = True,
) -> Iterator[Family[Owner]]:
    """The token sequences to run: beginnings that rows share are taken once, unless `share` is False.

    In float32 whole tiles are shared, so that a row's attention is summed up in the same pieces as when it is alone,
    and gives the same bits. A sparse row and a dense one share nothing: one beginning attends in one way.
    """

    def is_long(sequence: Sequence) -> bool:
        return attention is not None and len(sequence.prompt.ids) >= attention.min_length

    unit = math.lcm(PAGE_TOKENS, tile_rows) if model.dtype == torch.float32 else PAGE_TOKENS
    # Where frequencies depend on a row's length, equal tokens do not have equal keys.
    shareable = share and not any(rope.needs_lengths for rope in model.ropes)
    for trunk, rows in group(sequences, unit, is_long) if shareable else [(0, sequences)]:
        if trunk:
            yield _with_attention(shared_family(rows, trunk, pool), is_long(rows[0]))
        else:
            for sequence in rows:
                yield _with_attention(family_of(sequence, model, pool), is_long(sequence))


def _with_attention(family: Family[Owner], sparse: bool) -> Family[Owner]:
    """Let a family run sparse, its trunk and each of its branches. Nothing is counted where all of it is dense."""
    if sparse:
        family.trunk_executed = Executed(True)
        for branch in family.branches:
            branch.executed = Executed(True)
    return family


def report_attention(families: list[Family[Owner]], attention: EngineAttention | None) -> None:
    """Write into each row's result how its prefill attended; a shared trunk counts for all of its rows. Waits for the
    device."""
    found: dict[int, tuple[Sequence, list[Executed]]] = {}
    for family in families:
        for branch in family.branches:
            sequence, parts = found.setdefault(id(branch.owner.sequence), (branch.owner.sequence, []))
            for part in (family.trunk_executed, branch.executed):
                if part is not None and not any(part is one for one in parts):
                    parts.append(part)
    for sequence, parts in found.values():
        result = sequence.result
        causal = sum(part.causal for part in parts)
        if attention is None or not causal or not any(part.sparse for part in parts):
            result.attention_mode, result.attention_density = "dense", 1.0
        else:
            result.attention_mode = "sparse"
            result.attention_density = sum(float(part.selected) for part in parts) / causal
            result.attention_patterns = attention.patterns


def work_of(family: Family[Owner], spec: ModelSpec) -> Iterator[tuple[Sequence, float]]:
    """Floating-point operations of each branch, and its part of the trunk's: matrix products, and attention over
    what each token sees."""
    per_key = sum(4 * layer.num_heads * layer.head_dim for layer in spec.layers)
    trunk = len(family.trunk)
    attended = per_key * _density(family.trunk_executed) * trunk * trunk / 2
    shared = (spec.matmul_flops_per_token * trunk + attended) / len(family.branches)
    for branch in family.branches:
        own = len(branch.ids)
        attended = per_key * _density(branch.executed) * own * (trunk + own / 2)
        yield branch.owner.sequence, shared + spec.matmul_flops_per_token * own + attended


def _density(executed: Executed | None) -> float:
    """Share of the causal pairs that was computed."""
    return 1.0 if executed is None or not executed.causal else float(executed.selected) / executed.causal


def family_of(sequence: Sequence, model: Decoder, pool: PagePool) -> Family[Owner]:
    """The tokens of a row as trunk and branches, with its pages taken from the pool where it needs some."""
    pages = sequence.take(pool)
    if sequence.request.task.branches:
        return _label_family(sequence, pages)
    rope_length = len(sequence.prompt.ids) + sequence.max_tokens + sequence.prompt.reserved
    owner = Owner(sequence, _reader(sequence, model))
    reads, open_block = _reads(sequence), sequence.open_block
    return Family([Branch(owner, sequence.prompt.ids, reads, rope_length, pages, open_block=open_block)])


def shared_family(sequences: list[Sequence], trunk: int, pool: PagePool) -> Family[Owner]:
    """Rows that generate from prompts whose first `trunk` tokens (whole pages) are equal."""
    first = sequences[0]
    pages = first.take(pool)
    assert pages is not None
    shared = pages[: trunk // PAGE_TOKENS]
    branches = []
    for sequence in sequences:
        if sequence is not first:
            sequence.take(pool, shared)
            sequence.result.usage.cached_tokens = trunk
        ids, owner = sequence.prompt.ids, Owner(sequence, LastReader())
        rope_length = len(ids) + sequence.max_tokens
        reads, open_block = _reads(sequence), sequence.open_block
        branches.append(Branch(owner, ids[trunk:], reads, rope_length, sequence.pages, open_block=open_block))
    return Family(branches, first.prompt.ids[:trunk], shared)


def _label_family(sequence: Sequence, pages: np.ndarray | None) -> Family[Owner]:
    """The prompt once, then each label's tokens (all but the last, which is only scored) as a branch."""
    ids = sequence.prompt.ids
    trunk = _trunk_length(len(ids))
    shared = trunk // PAGE_TOKENS
    rope_length = len(ids) + max(map(len, sequence.prompt.branches))
    branches, at = [], shared
    for label in sequence.prompt.branches:
        text = np.concatenate([ids[trunk:], label])
        table = None
        if pages is not None:
            tail = pages_for(len(text) - 1)
            table = np.concatenate([pages[:shared], pages[at : at + tail]])
            at += tail
        owner = Owner(sequence, ScoreReader(text, trunk))
        reads = ((len(ids) - 1, len(ids) - 1 + len(label)),)
        branches.append(Branch(owner, text[:-1], reads, rope_length, table))
    return Family(branches, ids[:trunk], None if pages is None else pages[:shared])


def _trunk_length(prompt_tokens: int) -> int:
    """Whole pages before the last prompt token, whose hidden state each branch reads."""
    return (prompt_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS


def _reads(sequence: Sequence) -> tuple[tuple[int, int], ...]:
    length = len(sequence.prompt.ids)
    request = sequence.request
    if request.task.reads == "scored":
        start, stop = sequence.prompt.scored
        return ((start - 1, stop - 1),) if stop > start else ()
    if request.task.reads == "all" and request.pooling == "mean":
        return ((0, length),)
    return ((length - 1, length),)


def _reader(sequence: Sequence, model: Decoder) -> Reader:
    request = sequence.request
    if request.task.reads == "scored":
        return ScoreReader(sequence.prompt.ids, num_top=request.sampling.logprobs or 0)
    if request.task.reads == "all" and request.pooling == "mean":
        return MeanReader(model)
    return LastReader()


def conclude(sequence: Sequence, readers: list[Reader], model: Decoder, tokenizer: Tokenizer) -> None:
    """Fill in the result of a row that does not decode, from its readers (one for each label, or one)."""
    request, result = sequence.request, sequence.result
    scores = [reader.found for reader in readers if isinstance(reader, ScoreReader)]
    if scores:
        finite = all(np.isfinite(part.logprobs).all() for found in scores for part in found)
    else:
        vector = _embedding(readers[0], model)
        finite = bool(np.isfinite(vector).all())
    if not finite:
        sequence.fail(nonfinite())
    elif request.task.branches:
        _classify(result, request.labels, scores)
    elif scores:
        result.logprobs = [entry for part in scores[0] for entry in _entries(part, tokenizer)]
    else:
        result.embedding = vector


def _classify(result: Result, labels: tuple[str, ...], scores: list[list[Scores]]) -> None:
    """The label whose tokens are the most likely continuation; `logprobs` holds each label's sum."""
    sums = [float(sum(part.logprobs.sum(dtype=np.float64) for part in found)) for found in scores]
    result.label = labels[int(np.argmax(sums))]
    result.logprobs = [
        TokenLogprob(number, label, total) for number, (label, total) in enumerate(zip(labels, sums, strict=True))
    ]


def _entries(scores: Scores, tokenizer: Tokenizer) -> Iterator[TokenLogprob]:
    """One output entry for each scored token."""
    for i, (token, value) in enumerate(zip(scores.targets.tolist(), scores.logprobs.tolist(), strict=True)):
        top = zip(scores.top_ids[i].tolist(), scores.top_logprobs[i].tolist(), strict=True)
        yield TokenLogprob(
            token, tokenizer.token_text(token), value, tuple((t, tokenizer.token_text(t), p) for t, p in top)
        )


def _embedding(reader: Reader, model: Decoder) -> np.ndarray:
    """Unit vector float32 [hidden]."""
    if isinstance(reader, MeanReader):
        assert reader.total is not None
        vector = reader.total / reader.count
    else:
        assert isinstance(reader, LastReader)
        assert reader.hidden is not None
        vector = model.final_norm(reader.hidden)[0].float()
    return torch.nn.functional.normalize(vector, dim=0).cpu().numpy()
