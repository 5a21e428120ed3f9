"""Sparse prefill in the engine: against dense, against a plain reference, alone, packed, chunked and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_rows import new_engine, random_ids, request, run_rows
from sparse_engines import (
    EVERYTHING,
    KINDS,
    MIXED,
    SOME,
    logprobs,
    model,
    models,
    only,
    patterns_of,
    score,
    sparse_engine,
    tokenizer,
)
from sparse_reference import logprobs_and_density

from longbatch.attention import SparseLayer
from longbatch.core import Prompt
from longbatch.engine import Engine, Spill
from longbatch.models.decoder import Decoder
from longbatch.prompt import Tokenizer
from longbatch.sparsity import LayerPatterns, PatternSpec

__all__ = ["model", "models", "tokenizer"]


@pytest.mark.parametrize("case", ["llama", "gemma3-scaled-capped", "gpt_oss", "qwen2-window"])
@pytest.mark.parametrize("text", EVERYTHING)
def test_a_selection_of_everything_is_dense(
    case: str, text: str, models: Callable[[str], Decoder], tokenizer: Tokenizer
) -> None:
    model, rows = models(case), [score(i, length) for i, length in enumerate((1, 2, 63, 64, 65, 130, 300))]
    dense = run_rows(new_engine(model, tokenizer), rows)
    sparse = run_rows(sparse_engine(model, tokenizer, text), rows)
    for key, result in dense.items():
        np.testing.assert_allclose(logprobs(sparse[key]), logprobs(result), atol=1e-5)
        assert (result.attention_mode, result.attention_density) == ("dense", 1.0)
        assert sparse[key].attention_mode == "sparse"
        assert sparse[key].attention_density == pytest.approx(1.0)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("texts", [*[(text,) for text in SOME], MIXED], ids=lambda texts: texts[0].partition(":")[0])
def test_chunks_equal_the_reference(texts: tuple[str, ...], shared: bool, model: Decoder, tokenizer: Tokenizer) -> None:
    """Whole, and in chunks, each of which selects anew from its own last queries."""
    row = score(0, 600)
    patterns = patterns_of(model, *texts, shared=shared)
    for step_tokens in (4096, 256):
        engine = sparse_engine(model, tokenizer, *texts, shared=shared, step_tokens=step_tokens)
        result = only(run_rows(engine, [row]))
        expected, _ = logprobs_and_density(model, row[1].ids.tolist(), patterns, step_tokens, tile=64)
        np.testing.assert_allclose(logprobs(result), expected, atol=2e-5)
        assert 0 < (result.attention_density or 0) < 0.9


def test_density_is_what_was_computed(model: Decoder, tokenizer: Tokenizer) -> None:
    """Counted against masks; the last layer computes only the positions that are read, all but the last one here."""
    row, layers = score(0, 300), len(model.layers)
    for texts in (("a_shape:sinks=3,window=40",), MIXED):
        patterns = patterns_of(model, *texts)
        result = only(run_rows(sparse_engine(model, tokenizer, *texts), [row]))
        _, density = logprobs_and_density(model, row[1].ids.tolist(), patterns, 4096, tile=64)
        assert result.attention_density == pytest.approx(density, abs=0.01)
    names = {text.partition(":")[0] for text in MIXED}
    assert set(result.attention_patterns or ()) == {f"{layers} {name}" for name in names}


@pytest.mark.parametrize("case", ["gemma3-scaled-capped", "gpt_oss", "qwen2-window"])
def test_layers_with_a_window_stay_as_they_are(
    case: str, models: Callable[[str], Decoder], tokenizer: Tokenizer
) -> None:
    model, row = models(case), score(0, 300)
    text = "a_shape:sinks=3,window=40"
    patterns = [
        None if layer.window is not None else found
        for layer, found in zip(model.spec.layers, patterns_of(model, text), strict=True)
    ]
    result = only(run_rows(sparse_engine(model, tokenizer, text), [row]))
    expected, density = logprobs_and_density(model, row[1].ids.tolist(), patterns, 4096, tile=64)
    np.testing.assert_allclose(logprobs(result), expected, atol=2e-5)
    assert result.attention_density == pytest.approx(density, abs=0.01)
    heads = sum(layer.num_heads for layer in model.spec.layers if layer.window is None)
    assert result.attention_patterns == (f"{heads} a_shape",)


def test_only_long_rows_of_a_wave_are_sparse(model: Decoder, tokenizer: Tokenizer) -> None:
    lengths = (300, 40, 199, 200, 7)
    rows = [score(i, length) for i, length in enumerate(lengths)]
    rows.append((request(9), Prompt(random_ids(250, 9))))

    def engine() -> Engine:
        return sparse_engine(model, tokenizer, *MIXED, min_length=200)

    together = run_rows(engine(), rows)
    for row in rows:
        (key, alone) = next(iter(run_rows(engine(), [row]).items()))
        result = together[key]
        long = len(row[1].ids) >= 200
        assert result.attention_mode == ("sparse" if long else "dense")
        assert result.attention_density == (pytest.approx(alone.attention_density) if long else 1.0)
        assert (result.attention_patterns is not None) == long
        assert result.text == alone.text
        assert [entry.logprob for entry in result.logprobs or ()] == [entry.logprob for entry in alone.logprobs or ()]
    dense = run_rows(new_engine(model, tokenizer), rows)
    assert [key for key in dense if dense[key].logprobs == together[key].logprobs and dense[key].logprobs] == [
        rows[i][0].key for i in (1, 2, 4)
    ]


def test_rows_that_share_a_beginning_are_sparse_by_their_prompts(model: Decoder, tokenizer: Tokenizer) -> None:
    """Neither the beginning of 192 tokens nor any rest reaches the length, but every prompt does."""
    beginning, text = random_ids(192, 1), "a_shape:sinks=3,window=40"
    rows = [(request(i), Prompt(np.concatenate([beginning, random_ids(20 + i, 50 + i)]))) for i in range(3)]
    shared = run_rows(sparse_engine(model, tokenizer, text, min_length=212), rows)
    assert sorted(result.usage.cached_tokens for result in shared.values()) == [0, 192, 192]
    for row in rows:
        # The pattern goes by positions alone, so that sharing changes nothing.
        alone = only(run_rows(sparse_engine(model, tokenizer, text, min_length=212), [row]))
        assert (shared[row[0].key].attention_mode, shared[row[0].key].text) == ("sparse", alone.text)
        assert shared[row[0].key].attention_density == pytest.approx(alone.attention_density, abs=0.03)
    short = run_rows(sparse_engine(model, tokenizer, text, min_length=215), rows)
    assert {result.attention_mode for result in short.values()} == {"dense"}
    assert sorted(result.usage.cached_tokens for result in short.values()) == [0, 192, 192]


def test_long_and_short_rows_share_no_beginning(model: Decoder, tokenizer: Tokenizer) -> None:
    beginning = random_ids(192, 1)
    rows = [(request(i), Prompt(np.concatenate([beginning, random_ids(10 + 5 * i, 50 + i)]))) for i in range(4)]
    found = run_rows(sparse_engine(model, tokenizer, SOME[0], min_length=212), rows)
    by_row = [found[row[0].key] for row in rows]
    assert [result.attention_mode for result in by_row] == ["dense", "dense", "sparse", "sparse"]
    assert [result.usage.cached_tokens for result in by_row] == [0, 192, 0, 192]
    dense = run_rows(new_engine(model, tokenizer), rows)
    assert [found[row[0].key].text == dense[row[0].key].text for row in rows[:2]] == [True, True]


@pytest.mark.parametrize("text", [*SOME, *EVERYTHING])
def test_short_rests_of_a_shared_beginning(text: str, model: Decoder, tokenizer: Tokenizer) -> None:
    """Rests of fewer queries than a pattern looks at select by those that they have."""
    beginning = random_ids(128, 1)
    rows = [(request(i), Prompt(np.concatenate([beginning, random_ids(1 + 30 * i, 50 + i)]))) for i in range(3)]
    found = run_rows(sparse_engine(model, tokenizer, text, min_length=100), rows)
    dense = run_rows(new_engine(model, tokenizer), rows)
    for key, result in found.items():
        assert result.attention_mode == "sparse"
        assert 0 < (result.attention_density or 0) <= 1.0 + 1e-9
        if text in EVERYTHING:
            assert result.text == dense[key].text


def test_labels_are_sparse_by_the_prompt(model: Decoder, tokenizer: Tokenizer) -> None:
    """The beginning of whole pages, 256 of 300 tokens, does not reach the length; the prompt does."""
    prompt = Prompt(random_ids(300, 2), branches=(np.array([5], np.int32), np.array([6, 7], np.int32)))
    row = request(0, "classify", labels=("w5", "w6 w7")), prompt
    for least, mode in ((300, "sparse"), (301, "dense")):
        assert only(run_rows(sparse_engine(model, tokenizer, SOME[0], min_length=least), [row])).attention_mode == mode


def test_labels_continue_a_sparse_prompt(model: Decoder, tokenizer: Tokenizer) -> None:
    labels = ("w5", "w6 w7")
    prompt = Prompt(random_ids(300, 2), branches=(np.array([5], np.int32), np.array([6, 7], np.int32)))
    row = request(0, "classify", labels=labels), prompt
    dense = only(run_rows(new_engine(model, tokenizer), [row]))
    whole = only(run_rows(sparse_engine(model, tokenizer, EVERYTHING[2]), [row]))
    np.testing.assert_allclose(logprobs(whole), logprobs(dense), atol=1e-5)
    for tokens in (4096, 64):
        engine = sparse_engine(model, tokenizer, SOME[0], min_length=100, step_tokens=tokens)
        part = only(run_rows(engine, [row]))
        assert part.attention_mode == "sparse"
        assert 0.1 < (part.attention_density or 0) < 0.7


@pytest.mark.parametrize("text", [*SOME, "dense"])
def test_tiles_make_no_difference(text: str, model: Decoder) -> None:
    layer = model.spec.layers[0]
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(300, 4, 16, generator=generator)
    k, v = torch.randn(300, 2, 16, generator=generator), torch.randn(300, 2, 16, generator=generator)
    sparse = SparseLayer(LayerPatterns((PatternSpec.parse(text),) * 4, False), 4, 2, layer.scale)
    last = sparse.last_queries
    found = []
    for tile in (300, 128):
        selection = sparse.select(q[300 - last :] if last else None, k, v, q_offset=300 - last, rows=(0, 300))
        states = [sparse.attend(q[i : i + tile], k, v, selection, q_offset=i) for i in range(0, 300, tile)]
        found.append((torch.cat([s.out for s in states]), torch.cat([s.lse for s in states], 1), selection.pairs))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_bounded_mask_makes_no_difference(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(200, heads, 16, generator=generator) for heads in (4, 2, 2))
    sparse = SparseLayer(LayerPatterns((PatternSpec.parse(SOME[0]),) * 4, False), 4, 2, 0.25)
    selection = sparse.select(None, k, v, q_offset=200, rows=(0, 200))
    whole = sparse.attend(q, k, v, selection, q_offset=0)
    monkeypatch.setattr("longbatch.attention.sparse.MASK_ENTRIES", 1000)
    pieces = sparse.attend(q, k, v, selection, q_offset=0)
    torch.testing.assert_close(whole, pieces, atol=1e-6, rtol=1e-6)


def test_a_resumed_row_is_like_one_that_never_stopped(model: Decoder, tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = score(0, 300)
    limits = {"step_tokens": 128, "num_pages": 32}
    expected = only(run_rows(sparse_engine(model, tokenizer, *MIXED, **limits), [row]))
    stopped = sparse_engine(model, tokenizer, *MIXED, **limits)
    stopped.spill = Spill(tmp_path, "model")
    asked = iter([False, False, True])
    assert list(stopped.run([[row]], lambda: next(asked))) == []
    resumed = sparse_engine(model, tokenizer, *MIXED, **limits)
    resumed.spill = Spill(tmp_path, "model")
    result = only(run_rows(resumed, [row]))
    assert result.notes == ["resumed at token 256"]
    assert result.logprobs == expected.logprobs
    assert result.attention_density == expected.attention_density


def test_a_failed_row_says_how_it_attended(model: Decoder, tokenizer: Tokenizer) -> None:
    engine = sparse_engine(model, tokenizer, SOME[0], row_seconds=1e-9)
    result = only(run_rows(engine, [(request(0), Prompt(random_ids(100, 0)))]))
    assert result.error is not None
    assert result.error.type == "row_timeout"
    assert result.attention_mode == "sparse"


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "texts",
    [MIXED, SOME[:1], SOME[1:2], SOME[3:4], SOME[5:], [*KINDS, SOME[1]]],
    ids=["mixed", "ranges", "two-rows", "blocks", "runs", "kinds"],
)
def test_the_kernels_are_asked_the_same(texts: list[str], shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer's way through the kernels, interpreted: a tile in the middle and one at the end, in chunks."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(150, 4, 64, generator=generator)
    k, v = torch.randn(150, 2, 64, generator=generator), torch.randn(150, 2, 64, generator=generator)
    heads = tuple(PatternSpec.parse(texts[i % len(texts)]) for i in range(2 if shared else 4))
    sparse = SparseLayer(LayerPatterns(heads, shared), 4, 2, 0.125)
    found = []
    for has_kernels in (False, True):
        monkeypatch.setattr("longbatch.attention.sparse._has_kernels", lambda x, answer=has_kernels: answer)
        q_last = q[-64:] if sparse.last_queries else None
        selection = sparse.select(q_last, k, v, q_offset=86, rows=(64, 150))
        found.append([sparse.attend(q[i:j], k, v, selection, q_offset=i) for i, j in ((64, 128), (128, 150))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.out, other.out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(one.lse, other.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [70, 3001, 20_000])
def test_the_kernels_compute_what_the_masks_do(length: int, dtype: torch.dtype, shared: bool) -> None:
    """One selection of a mixed layer, in tiles: kernels in half precision beside masks in float32."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(length, heads, 128, generator=generator, device="cuda") for heads in (8, 2, 2))
    texts = [
        "stripes:mass=0.3,rows=512",
        *MIXED,
        "tri_shape:sinks=5,window=600,last=90",
        "vertical_slash:vertical=1000,slash=500",
        "stripes:mass=0.1,rows=128,window=30",
    ]
    heads = tuple(PatternSpec.parse(texts[i % len(texts)]) for i in range(2 if shared else 8))
    sparse = SparseLayer(LayerPatterns(heads, shared), 8, 2, 128**-0.5)
    half = [x.to(dtype) for x in (q, k, v)]
    last = min(64, length)
    selection = sparse.select(half[0][-last:], *half[1:], q_offset=length - last, rows=(0, length))
    for start in range(0, length, 4096):
        part = half[0][start : start + 4096]
        found = sparse.attend(part, *half[1:], selection, q_offset=start)
        tiles = sparse._selected_tile(part, half[1], selection, start)
        exact = [x.float() for x in half]
        for low in range(start, min(start + 4096, length), 512):
            rows = slice(low - start, low - start + 512)
            ranges = next((one for one in selection.ranges if one[0].rows[0] <= low < one[0].rows[1]), None)
            if ranges is not None and ranges[0].rows[1] < min(low + 512, length):
                continue
            state = sparse._with_masks(exact[0][low : low + 512], *exact[1:], ranges, tiles, low)
            error = (found.out[rows].float() - state.out).norm() / state.out.norm()
            assert error < 4e-3
            torch.testing.assert_close(found.lse[:, rows], state.lse, atol=2e-2, rtol=0)
