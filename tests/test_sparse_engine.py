"""Sparse prefill in the engine: against dense, against a plain reference, alone, packed, chunked and resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_rows import new_engine, random_ids, request, run_rows, tiny_decoder, word_tokenizer
from sparse_reference import logprobs_and_density

from longbatch.attention import SparseLayer
from longbatch.core import Prompt, Request, Result
from longbatch.engine import Engine, EngineAttention, Spill
from longbatch.engine.verification import VerifyingEngine
from longbatch.models.decoder import Decoder
from longbatch.prompt import Tokenizer
from longbatch.sparsity import LayerPatterns, PatternSpec

Row = tuple[Request, Prompt]
EVERYTHING = [
    "a_shape:sinks=0,window=4096",
    "tri_shape:sinks=4,window=4096,last=10",
    "vertical_slash:vertical=4096,slash=4096",
    "block_sparse:top_k=1000",
]
SOME = [
    "a_shape:sinks=3,window=40",
    "tri_shape:sinks=3,window=40,last=20",
    "vertical_slash:vertical=40,slash=110",
    "block_sparse:top_k=2",
    "antidiagonal:stride=8,threshold=0.6,block=64",
]
MIXED = ["a_shape:sinks=3,window=40", "dense", "vertical_slash:vertical=35,slash=120", "block_sparse:top_k=2"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return word_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Decoder]:
    made: dict[str, Decoder] = {}

    def get(case: str) -> Decoder:
        if case not in made:
            made[case] = tiny_decoder(tmp_path_factory.mktemp(case), case)
        return made[case]

    return get


@pytest.fixture
def model(models: Callable[[str], Decoder]) -> Decoder:
    return models("llama")


def patterns_of(model: Decoder, *texts: str, shared: bool = False) -> list[LayerPatterns]:
    """The same patterns in every layer, one text for each selection, repeated where there are too few."""
    found = []
    for layer in model.spec.layers:
        number = layer.num_kv_heads if shared else layer.num_heads
        found.append(LayerPatterns(tuple(PatternSpec.parse(texts[i % len(texts)]) for i in range(number)), shared))
    return found


def sparse_engine(
    model: Decoder, tokenizer: Tokenizer, *texts: str, min_length: int = 0, shared: bool = False, **limits: Any
) -> Engine:
    engine = new_engine(model, tokenizer, **limits)
    engine.attention = EngineAttention.of(model.spec, patterns_of(model, *texts, shared=shared), min_length)
    return engine


def score(row: int, length: int) -> Row:
    ids = random_ids(length, row)
    return request(row, "score"), Prompt(ids, scored=(1, length))


def logprobs(result: Result) -> np.ndarray:
    assert result.error is None
    return np.array([entry.logprob for entry in result.logprobs or ()])


def only(results: dict[Any, Result]) -> Result:
    (result,) = results.values()
    return result


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


# ------------------------------------------------------------------------------------------------ the gap


def verified(engine: Engine, rows: list[Row]) -> dict[Any, Result]:
    return {result.key: result for result in VerifyingEngine(engine).run([rows])}


def test_the_gap_is_that_of_the_log_probabilities(model: Decoder, tokenizer: Tokenizer) -> None:
    """Scored tokens, the tokens of an answer under both, and the sums of labels."""
    prompt = random_ids(200, 3)
    branches = (np.array([5], np.int32), np.array([6, 7], np.int32))
    rows = [
        score(0, 150),
        (request(1, max_tokens=5), Prompt(prompt)),
        (request(2, "classify", labels=("w5", "w6 w7")), Prompt(prompt, branches=branches)),
        (request(3, "embed"), Prompt(prompt)),
    ]
    found = verified(sparse_engine(model, tokenizer, SOME[0]), rows)
    with_logprobs = [(replace(r, sampling=replace(r.sampling, logprobs=0)), p) for r, p in rows]
    sparse = [next(iter(run_rows(sparse_engine(model, tokenizer, SOME[0]), [row]).values())) for row in with_logprobs]
    answer = np.array([entry.id for entry in sparse[1].logprobs or ()], dtype=np.int32)
    given = request(1, "score"), Prompt(np.concatenate([prompt, answer]), scored=(200, 205))
    dense_rows = [rows[0], given, rows[2]]
    dense = [next(iter(run_rows(new_engine(model, tokenizer), [row]).values())) for row in dense_rows]
    for (own, _), one, other in zip(rows, sparse, dense, strict=False):
        gap = np.abs(logprobs(one) - logprobs(other)).mean()
        assert gap > 1e-3
        assert found[own.key].attention_gap == pytest.approx(gap, abs=1e-6)
    assert found[rows[3][0].key].attention_gap is None
    for result in found.values():
        assert (result.text, result.label, result.embedding, result.logprobs) == (None, None, None, None)
        assert result.attention_mode == "sparse"


def test_a_gap_does_not_depend_on_what_else_is_measured(model: Decoder, tokenizer: Tokenizer) -> None:
    """Rows that begin alike are measured each by itself."""
    beginning, text = random_ids(128, 1), "vertical_slash:vertical=10,slash=70"
    rows = [(request(i), Prompt(np.concatenate([beginning, random_ids(70 + i, 50 + i)]))) for i in range(3)]
    together = verified(sparse_engine(model, tokenizer, text), rows)
    for row in rows:
        alone = only(verified(sparse_engine(model, tokenizer, text), [row]))
        assert together[row[0].key].attention_gap == alone.attention_gap
        assert together[row[0].key].usage.cached_tokens == 0


def test_everything_selected_has_no_gap(model: Decoder, tokenizer: Tokenizer) -> None:
    rows = [score(0, 150), (request(1, max_tokens=20), Prompt(random_ids(70, 1)))]
    for result in verified(sparse_engine(model, tokenizer, EVERYTHING[2]), rows).values():
        assert (result.attention_gap or 0) < 1e-5


def test_long_rotations_go_by_the_length_that_the_row_might_have_had(
    models: Callable[[str], Decoder], tokenizer: Tokenizer
) -> None:
    """The answer ends below the length at which the frequencies change, the row could have gone beyond it."""
    model = models("phi3-longrope-long")
    rows = [(request(0, max_tokens=60, stop_token_ids=tuple(range(3, 200))), Prompt(random_ids(100, 1)))]
    result = only(verified(sparse_engine(model, tokenizer, EVERYTHING[0]), rows))
    assert result.usage.completion_tokens < 28
    assert (result.attention_gap or 0) < 1e-5


def test_a_stop_gives_no_half_measured_row(model: Decoder, tokenizer: Tokenizer) -> None:
    for allowed in range(4):
        asked = iter([False] * allowed + [True] * 9)
        engine = VerifyingEngine(sparse_engine(model, tokenizer, SOME[0]))
        results = list(engine.run([[score(0, 100)]], lambda asked=asked: next(asked)))
        assert [result.attention_gap is not None for result in results] == [True] * len(results)
        assert len(results) == (allowed >= 2)


def test_a_row_that_fails_dense_is_an_error(
    model: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sparse_engine(model, tokenizer, SOME[0])
    steps = 0

    def failing(*arguments: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if engine.attention is None:
            raise RuntimeError("a fault of the dense run")
        return prefill(*arguments)

    from longbatch.engine.prefill import prefill

    monkeypatch.setattr("longbatch.engine.engine.prefill", failing)
    result = only(verified(engine, [score(0, 100)]))
    assert result.error is not None
    assert (result.error.type, result.attention_gap) == ("internal", None)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "texts", [MIXED, SOME[:1], SOME[1:2], SOME[3:4]], ids=["mixed", "ranges", "two-rows", "blocks"]
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
    texts = [*MIXED, "tri_shape:sinks=5,window=600,last=90", "vertical_slash:vertical=1000,slash=500"]
    heads = tuple(PatternSpec.parse(texts[i % len(texts)]) for i in range(2 if shared else 8))
    sparse = SparseLayer(LayerPatterns(heads, shared), 8, 2, 128**-0.5)
    half = [x.to(dtype) for x in (q, k, v)]
    last = min(64, length)
    selection = sparse.select(half[0][-last:], *half[1:], q_offset=length - last, rows=(0, length))
    for start in range(0, length, 4096):
        part = half[0][start : start + 4096]
        found = sparse.attend(part, *half[1:], selection, q_offset=start)
        blocks = sparse._selected_blocks(part, half[1], selection, start)
        exact = [x.float() for x in half]
        for low in range(start, min(start + 4096, length), 512):
            rows = slice(low - start, low - start + 512)
            ranges = next((one for one in selection.ranges if one[0].rows[0] <= low < one[0].rows[1]), None)
            if ranges is not None and ranges[0].rows[1] < min(low + 512, length):
                continue
            state = sparse._with_masks(exact[0][low : low + 512], *exact[1:], ranges, blocks, low)
            error = (found.out[rows].float() - state.out).norm() / state.out.norm()
            assert error < 4e-3
            torch.testing.assert_close(found.lse[:, rows], state.lse, atol=2e-2, rtol=0)
