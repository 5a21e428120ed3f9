"""From a row to what runs: the families of its task, the readers of its hidden states, and its finished result."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from longbatch.cache.pages import PAGE_TOKENS, PagePool, pages_for
from longbatch.core import Prompt, Request, Result, TokenLogprob
from longbatch.engine.packing import Branch, Family
from longbatch.engine.readout import LastReader, MeanReader, Reader, ScoreReader, Scores
from longbatch.engine.sampler import row_seed
from longbatch.engine.sequence import Sequence
from longbatch.engine.stopping import StopRule
from longbatch.errors import RowError
from longbatch.models.decoder import Decoder
from longbatch.prompt import Tokenizer


@dataclass(slots=True)
class Owner:
    """Who a branch belongs to and who reads its hidden states."""

    sequence: Sequence
    reader: Reader


def open_sequence(
    request: Request, prompt: Prompt, tokenizer: Tokenizer, *, eos_ids: frozenset[int], run_seed: int, max_tokens: int
) -> Sequence:
    """The engine's state for one row. max_tokens: for rows that set none."""
    seed = row_seed(run_seed, request.key, request.sampling)
    sequence = Sequence(request, prompt, Result(request.key, request.row), seed)
    result, sampling = sequence.result, request.sampling
    result.carried, result.fingerprint = request.carried, request.fingerprint
    result.usage.prompt_tokens = len(prompt.ids)
    if request.task.decodes:
        sequence.max_tokens = sampling.max_tokens or max_tokens
        ids = eos_ids | frozenset(sampling.stop_token_ids)
        sequence.stop = StopRule(ids, sampling.stop, sequence.max_tokens, tokenizer)
    return sequence


def pages_needed(sequence: Sequence, *, chunked: bool) -> int:
    """Pages that the row holds: for its answer when it decodes, for its own later chunks when `chunked`."""
    if not sequence.request.task.decodes and not chunked:
        return 0
    prompt = len(sequence.prompt.ids)
    if sequence.request.task.branches:
        trunk = _trunk_length(prompt)
        tails = sum(pages_for(prompt - trunk + len(label)) for label in sequence.prompt.branches)
        return trunk // PAGE_TOKENS + tails
    return pages_for(prompt + sequence.max_tokens)


def family_of(sequence: Sequence, model: Decoder, pool: PagePool, *, chunked: bool) -> Family[Owner]:
    """The tokens of a row as trunk and branches, with its pages taken from the pool where it needs some."""
    ids, task = sequence.prompt.ids, sequence.request.task
    held = pages_needed(sequence, chunked=chunked)
    pages = pool.allocate(held) if held else None
    sequence.pages = pages
    if task.branches:
        return _label_family(sequence, pages)
    reads = _reads(sequence)
    rope_length = len(ids) + sequence.max_tokens
    branch = Branch(Owner(sequence, _reader(sequence, model)), ids, reads, rope_length, pages)
    return Family([branch])


def shared_family(sequences: list[Sequence], trunk: int, pool: PagePool) -> Family[Owner]:
    """Rows that generate from prompts whose first `trunk` tokens (whole pages) are equal."""
    shared = pool.allocate(trunk // PAGE_TOKENS)
    branches = []
    for number, sequence in enumerate(sequences):
        ids = sequence.prompt.ids
        own = pool.allocate(pages_for(len(ids) - trunk + sequence.max_tokens))
        if number:
            pool.retain(shared)
            sequence.result.usage.cached_tokens = trunk
        sequence.pages = np.concatenate([shared, own])
        branches.append(
            Branch(
                Owner(sequence, LastReader()),
                ids[trunk:],
                ((len(ids) - 1, len(ids)),),
                len(ids) + sequence.max_tokens,
                sequence.pages,
            )
        )
    return Family(branches, sequences[0].prompt.ids[:trunk], shared)


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
            tail = pages_for(len(text))
            table = np.concatenate([pages[:shared], pages[at : at + tail]])
            at += tail
        owner = Owner(sequence, ScoreReader(text, trunk))
        branches.append(Branch(owner, text[:-1], ((len(ids) - 1, len(ids) - 1 + len(label)),), rope_length, table))
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
        return ScoreReader(sequence.prompt.ids, 0)
    if request.task.reads == "all" and request.pooling == "mean":
        return MeanReader(model)
    return LastReader()


def conclude(sequence: Sequence, readers: list[Reader], model: Decoder, tokenizer: Tokenizer) -> None:
    """Fill in the result of a row that does not decode, from its readers (one for each label, or one)."""
    request, result = sequence.request, sequence.result
    if request.task.branches:
        _classify(sequence, readers)
    elif request.task.reads == "scored":
        result.logprobs = [entry for reader in readers for entry in _token_logprobs(reader, tokenizer)]
        if any(entry.logprob is None or not np.isfinite(entry.logprob) for entry in result.logprobs):
            sequence.fail(nonfinite())
    else:
        vector = _embedding(readers[0], model)
        if not np.isfinite(vector).all():
            sequence.fail(nonfinite())
        else:
            result.embedding = vector
    sequence.result.timing.total = time.monotonic() - sequence.started


def _classify(sequence: Sequence, readers: list[Reader]) -> None:
    """The label whose tokens are the most likely continuation; `logprobs` holds each label's sum."""
    scores = []
    for reader in readers:
        assert isinstance(reader, ScoreReader)
        scores.append(float(sum(found.logprobs.sum(dtype=np.float64) for found in reader.found)))
    if not np.isfinite(scores).all():
        sequence.fail(nonfinite())
        return
    labels = sequence.request.labels
    sequence.result.label = labels[int(np.argmax(scores))]
    sequence.result.logprobs = [
        TokenLogprob(number, label, score) for number, (label, score) in enumerate(zip(labels, scores, strict=True))
    ]


def _token_logprobs(reader: Reader, tokenizer: Tokenizer) -> Iterator[TokenLogprob]:
    assert isinstance(reader, ScoreReader)
    for scores in reader.found:
        yield from entries(scores, tokenizer)


def entries(scores: Scores, tokenizer: Tokenizer) -> Iterator[TokenLogprob]:
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
        assert isinstance(reader, LastReader) and reader.hidden is not None
        vector = model.final_norm(reader.hidden)[0].float()
    return torch.nn.functional.normalize(vector, dim=0).cpu().numpy()


def nonfinite() -> RowError:
    return RowError(
        "nonfinite_logits",
        "the model gave NaN or infinite values for this row; try --dtype float32, or check the weights",
    )
