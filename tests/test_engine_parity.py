"""The engine's forward against transformers for every family: whole, chunked, as branches, and token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from engine_rows import new_cache, random_ids, request, word_tokenizer

from longbatch.cache.pages import pages_for
from longbatch.core import Prompt, Result
from longbatch.engine.decode import DecodeBatch
from longbatch.engine.ladder import Shape
from longbatch.engine.packing import Branch, Family, pack
from longbatch.engine.prefill import prefill
from longbatch.engine.sequence import Sequence
from longbatch.engine.stopping import StopRule
from longbatch.models import load
from longbatch.models.decoder import Decoder

NUM_TOKENS = 300
TOLERANCE = 1e-4
CPU = torch.device("cpu")


@pytest.fixture(params=sorted(tiny_models.CASES))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Decoder, torch.Tensor]:
    """Our decoder, and transformers' logits [300, vocab] of the test tokens."""
    reference = tiny_models.save(request.param, tmp_path)
    ids = torch.from_numpy(random_ids(NUM_TOKENS, 0).astype(np.int64))
    with torch.inference_mode():
        logits = reference(ids[None]).logits[0]
    return load(tmp_path, torch.float32, CPU), logits


def logits_of(model: Decoder, families: list[Family[int]], step_tokens: int, tile_rows: int) -> dict[int, torch.Tensor]:
    """Logits of every position read, by owner."""
    cache = new_cache(model)
    for family in families:
        if len(family.trunk):
            family.trunk_pages = cache.pool.allocate(pages_for(len(family.trunk)))
        for branch in family.branches:
            own = cache.pool.allocate(pages_for(len(branch.ids)))
            branch.pages = own if family.trunk_pages is None else np.concatenate([family.trunk_pages, own])
    found: dict[int, list[torch.Tensor]] = {}
    for packed in pack(families, step_tokens=step_tokens, tile_rows=tile_rows, device=CPU):
        hidden, low = prefill(model, cache, packed.step), 0
        for branch, start, stop in packed.reads:
            rows = hidden[low : low + stop - start]
            found.setdefault(branch.owner, []).append(model.logits(model.final_norm(rows)))
            low += stop - start
    return {owner: torch.cat(parts) for owner, parts in found.items()}


def whole(ids: np.ndarray, owner: int = 0) -> Family[int]:
    return Family([Branch(owner, ids, ((0, len(ids)),), NUM_TOKENS)])


@pytest.mark.parametrize(
    ("step_tokens", "tile_rows"),
    [
        pytest.param(4096, 4096, id="one-tile"),
        pytest.param(4096, 48, id="tiles"),
        pytest.param(128, 64, id="chunks"),
        pytest.param(37, 37, id="odd-chunks"),
    ],
)
def test_prefill(pair: tuple[Decoder, torch.Tensor], step_tokens: int, tile_rows: int) -> None:
    model, expected = pair
    found = logits_of(model, [whole(random_ids(NUM_TOKENS, 0))], step_tokens, tile_rows)[0]
    assert (found - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("step_tokens", [4096, 96])
def test_branches_of_one_trunk(pair: tuple[Decoder, torch.Tensor], step_tokens: int) -> None:
    """The tail of the prompt as one branch, between two other branches, over the first 192 tokens as a trunk."""
    model, expected = pair
    ids = random_ids(NUM_TOKENS, 0)
    others = [Branch(owner, random_ids(50, owner), ((192, 242),), NUM_TOKENS) for owner in (7, 8)]
    tail = Branch(0, ids[192:], ((192, NUM_TOKENS),), NUM_TOKENS)
    family = Family([others[0], tail, others[1]], ids[:192])
    found = logits_of(model, [whole(random_ids(30, 5), 9), family], step_tokens, 32)[0]
    assert (found - expected[192:]).abs().max() <= TOLERANCE


def test_cached_decode(pair: tuple[Decoder, torch.Tensor], tmp_path: Path) -> None:
    """Two rows of different lengths decode together, fed with known tokens; one is the reference's."""
    model, expected = pair
    ids, cache = random_ids(NUM_TOKENS, 0), new_cache(model)
    tokenizer = word_tokenizer(tmp_path / "tokenizer")
    sequences, families = [], []
    for row, prompt in enumerate([ids[:270], random_ids(90, 1)]):
        pages = cache.pool.allocate(pages_for(len(prompt) + 30))
        rule = StopRule(frozenset(), (), 31, tokenizer)
        result = Result(request(row).key, row)
        sequence = Sequence(request(row), Prompt(prompt), result, 0, Shape(64, 4096), 30, rule, pages)
        sequences.append(sequence)
        families.append(Family([Branch(row, prompt, ((len(prompt) - 1, len(prompt)),), len(prompt) + 30, pages)]))
    for packed in pack(families, step_tokens=4096, tile_rows=64, device=CPU):
        prefill(model, cache, packed.step)
    batch = DecodeBatch(model, cache, 2)
    batch.join(sequences, [int(ids[270]), 5])
    for position in range(270, NUM_TOKENS):
        for sequence in sequences:
            assert sequence.stop is not None
            sequence.stop.push(int(ids[position]))
        logits = batch.forward()
        assert (logits[0] - expected[position]).abs().max() <= TOLERANCE
        if position == 280:
            batch.keep([True, False])
            sequences = sequences[:1]
        if position + 1 < NUM_TOKENS:
            batch.feed(torch.tensor([int(ids[position + 1]), 5][: len(sequences)]))
