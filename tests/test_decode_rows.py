"""Rows that only fill up a batch: they change no other row, write nowhere else, and block tables follow their rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_rows import new_cache, random_ids, request, tiny_decoder, word_tokenizer

from longbatch.cache import KVCache
from longbatch.cache.pages import pages_for
from longbatch.core import Prompt, Result
from longbatch.engine.decode import DecodeBatch
from longbatch.engine.graphs import StepShape, round_up
from longbatch.engine.ladder import Shape
from longbatch.engine.sequence import Sequence
from longbatch.engine.stopping import StopRule
from longbatch.models.decoder import Decoder


def sequences_of(cache: KVCache, lengths: list[int], folder: Path) -> list[Sequence]:
    """Rows that decode from their first token on, with room for `lengths` tokens."""
    tokenizer, found = word_tokenizer(folder), []
    for row, length in enumerate(lengths):
        asked = request(row, temperature=row % 2)
        sequence = Sequence(asked, Prompt(random_ids(0, 0)), Result(asked.key, row), row, Shape(1, 1), length)
        sequence.stop = StopRule(frozenset(), (), length, tokenizer)
        sequence.stop.push(row + 3)
        sequence.num_pages = pages_for(length)
        sequence.take(cache.pool)
        found.append(sequence)
    return found


def batch_of(model: Decoder, kv: str, lengths: list[int], folder: Path) -> DecodeBatch:
    cache = new_cache(model, 40, kv, num_open=8)
    for pool in (*cache.keys, *cache.values):
        for tensor in pool:
            tensor.zero_()
    batch = DecodeBatch(model, cache, 8)
    batch.join(sequences_of(cache, lengths, folder), [row + 3 for row in range(len(lengths))])
    return batch


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_rows_that_fill_up_change_nothing(tmp_path: Path, kv: str) -> None:
    """Three rows as three and as eight, through 150 tokens, which fill pages; one leaves on the way."""
    model = tiny_decoder(tmp_path / "model")
    plain, filled = (batch_of(model, kv, [200, 200, 200], tmp_path / "tokenizer") for _ in range(2))
    filled._size = lambda count: 8  # type: ignore[method-assign]
    filled._rows.put(0, 8, filled.sequences, [3, 4, 5])
    for step in range(150):
        expected = plain.forward()
        with torch.inference_mode():
            found = filled._forward(StepShape(8, 1))
        count = len(plain)
        torch.testing.assert_close(found[:count], expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(plain.draw(expected), filled.draw(found[:count]))
        if step == 70:
            for batch in (plain, filled):
                batch.keep([True, False, True])
    for ours, theirs in zip(filled._cache.keys, plain._cache.keys, strict=True):
        # All but the spare page; a number in float8 may be rounded to the other side.
        equal = torch.isclose(ours[0][: 40 * 64].float(), theirs[0][: 40 * 64].float(), rtol=1e-4, atol=1e-4)
        assert equal.float().mean() > 0.9999


def test_tables_follow_their_rows(tmp_path: Path) -> None:
    model = tiny_decoder(tmp_path / "model")
    batch = batch_of(model, "auto", [100, 300, 64, 1], tmp_path / "tokenizer")
    tables = [sequence.pages for sequence in batch.sequences]
    batch.keep([False, True, False, True])
    later = sequences_of(batch._cache, [130, 70], tmp_path / "tokenizer")
    batch.join(later, [50, 51])
    batch.keep([True, True, False, True])
    expected = [tables[1], tables[3], later[1].pages]
    for row, pages in enumerate(expected):
        assert pages is not None
        assert batch._rows.table[row, : len(pages)].tolist() == pages.tolist()
    assert [token for _, token in batch.park(3)] == [4, 6, 51]
    assert len(batch) == 0


def test_numbers_round_up_to_few() -> None:
    found = [round_up(count) for count in range(1, 2000)]
    assert sorted(set(found))[:10] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    counts = np.arange(1, 2000)
    assert (np.array(found) >= counts).all()
    assert (np.array(found) < counts * 1.5).all()
