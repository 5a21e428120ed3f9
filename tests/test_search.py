"""The search for patterns: errors against explicit masks, whole searches."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_rows import new_cache, random_ids, tiny_decoder

from longbatch.attention import Segment, Step
from longbatch.engine import search as search_module
from longbatch.engine.head_error import Trials
from longbatch.engine.head_search import DENSE, Pricing
from longbatch.engine.layer_pass import Document, LayerPass
from longbatch.engine.limits import EngineAttention
from longbatch.engine.prefill import prefill
from longbatch.engine.search import LayerFound, Search
from longbatch.engine.search_state import SearchState
from longbatch.models.decoder import Decoder
from longbatch.models.spec import LayerSpec
from longbatch.plan.sparse_cost import causal_pairs
from longbatch.plan.sparse_rates import REFERENCE
from longbatch.sparsity import PATTERNS, LayerPatterns, PatternSpec

LAYER = LayerSpec(8, 2, 64, None, 0.125)
# An estimate costs nothing, so that short documents can afford one.
CHEAP = replace(REFERENCE, estimate_seconds=1e-15, shared_estimate_seconds=1e-15, pooled_seconds=1e-15)
A_SHAPE = PatternSpec.make("a_shape", sinks=16, window=64)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("llama"))


def spec_of(text: str) -> PatternSpec:
    return PatternSpec.parse(text)


# ------------------------------------------------------------------------------------------------ errors


def explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    """Masked attention of one head in float64."""
    scores = (q.double() @ k.double().T * scale).masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ v.double()


@pytest.mark.parametrize("shared", [False, True])
def test_errors_and_densities_are_those_of_explicit_masks(decoder: Decoder, shared: bool) -> None:
    length, sinks, window = 300, 5, 40
    wide = PatternSpec.make("a_shape", sinks=sinks, window=window)
    narrow = PatternSpec.make("a_shape", sinks=1, window=7)
    with torch.inference_mode():
        documents = [Document(decoder.embed(torch.from_numpy(random_ids(n, 3)).long())) for n in (length, 90)]
        trials = Trials(decoder, 1, documents, 64, torch.device("cpu"))
        wanted = {0: wide, 1: narrow} if shared else {0: wide, 3: narrow}
        outcomes = trials.run(wanted, shared=shared, limits=[10.0] * 8)
        run = LayerPass(decoder, 1, documents[0], 512)
        q = run.queries(slice(0, length))
    rows, keys = torch.arange(length)[:, None], torch.arange(length)[None]
    for at, spec in wanted.items():
        seen = ((rows - keys < spec["window"]) | (keys < spec["sinks"])) & (keys <= rows)
        heads = range(2 * at, 2 * at + 2) if shared else [at]
        outcome = outcomes[at]
        assert len(outcome.errors) == len(heads)
        assert outcome.shares[0] == pytest.approx(float(seen.sum()) / causal_pairs(length))
        for head, error in zip(heads, outcome.errors, strict=True):
            arguments = q[:, head], run.k[:, head // 2], run.v[:, head // 2]
            exact = explicit(*arguments, keys <= rows, run.layer.spec.scale)
            sparse = explicit(*arguments, seen, run.layer.spec.scale)
            expected = float((sparse - exact).norm() / exact.norm())
            # The longer document is the worse one here.
            assert error == pytest.approx(expected, rel=1e-4)


def test_a_failed_candidate_is_not_tried_on_the_next_document(decoder: Decoder) -> None:
    with torch.inference_mode():
        documents = [Document(decoder.embed(torch.from_numpy(random_ids(n, 1)).long())) for n in (200, 150)]
        trials = Trials(decoder, 0, documents, 64, torch.device("cpu"))
        outcomes = trials.run({0: A_SHAPE, 2: DENSE}, shared=False, limits=[1e-6] * 8)
    assert len(outcomes[0].shares) == 1
    assert outcomes[0].errors[0] > 1e-6
    assert outcomes[2].shares == [1.0, 1.0]
    assert outcomes[2].errors[0] < 1e-6


@pytest.mark.parametrize("name", [name for name in PATTERNS if name != "dense"])
def test_every_pattern_can_be_tried(decoder: Decoder, name: str) -> None:
    with torch.inference_mode():
        documents = [Document(decoder.embed(torch.from_numpy(random_ids(330, 2)).long()))]
        trials = Trials(decoder, 0, documents, 128, torch.device("cpu"))
        spec = PatternSpec.make(name, **({"block": 64} if name == "antidiagonal" else {}))
        for shared in (False, True):
            outcome = trials.run({1: spec}, shared=shared, limits=[10.0] * 8)[1]
            assert all(0 <= error < 2 for error in outcome.errors)
            assert 0 < outcome.shares[0] <= 1


@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_influence_is_what_a_head_adds_to_the_hidden_states(tmp_path: Path, case: str) -> None:
    """Gemma norms the sum of the heads before it is added, so that a head cannot be projected by itself."""
    model = tiny_decoder(tmp_path, case)
    with torch.inference_mode():
        documents = [Document(model.embed(torch.from_numpy(random_ids(n, 5)).long())) for n in (120, 60)]
        trials = Trials(model, 0, documents, 64, torch.device("cpu"))
        expected = torch.zeros(4)
        for document in documents:
            run = LayerPass(model, 0, document, 512)
            rows = slice(0, document.length)
            dense = run.dense(rows, run.queries(rows))
            whole = run.layer.out(document.hidden.clone(), dense)
            for head in range(4):
                without = dense.clone()
                without[:, head] = 0
                change = (whole - run.layer.out(document.hidden.clone(), without)).norm(dim=1) / whole.norm(dim=1)
                expected[head] = max(expected[head], change.square().mean().sqrt())
        assert trials.influences() == pytest.approx(expected.tolist(), rel=1e-4)


# ---------------------------------------------------------------------------------------- whole searches


def new_search(
    model: Decoder, state: SearchState, *, tolerance: float = 0.3, lengths: tuple[int, ...] = (420, 200)
) -> Search:
    return Search(model, [random_ids(length, length) for length in lengths], tolerance, CHEAP, state)


def state_in(folder: Path, **identity: str) -> SearchState:
    return SearchState.open(folder / "profile.json", identity, {"created": "now"})


def test_a_search_keeps_every_head_within_the_tolerance(decoder: Decoder, tmp_path: Path) -> None:
    found = list(new_search(decoder, state_in(tmp_path)).run())
    assert len(found) == len(decoder.layers)
    names = {head.spec.name for layer in found for head in layer.choices.heads}
    assert names - {"dense"}
    with torch.inference_mode():
        documents = [Document(decoder.embed(torch.from_numpy(random_ids(n, n)).long())) for n in (420, 200)]
        for index, layer in enumerate(found):
            choices, patterns = layer.choices, layer.choices.patterns
            assert layer.seconds <= layer.dense_seconds
            trials = Trials(decoder, index, documents, 64, torch.device("cpu"))
            wanted = dict(enumerate(patterns.heads))
            again = trials.run(wanted, shared=patterns.shared, limits=[1.0] * 8)
            for at, head in enumerate(choices.heads):
                assert head.error is not None
                assert head.error == pytest.approx(max(again[at].errors), rel=1e-3, abs=1e-6)
                assert head.error <= 0.3
            for document in documents:
                LayerPass(decoder, index, document, 64).advance(None if patterns.is_dense else patterns)


def test_heads_of_little_influence_may_err_more(decoder: Decoder, tmp_path: Path) -> None:
    ids = random_ids(420, 1)
    rates = replace(CHEAP, shared_flops=1e12, ranges_flops=1e15)
    found = next(Search(decoder, [ids], 0.1, rates, state_in(tmp_path), measure="stream").run())
    with torch.inference_mode():
        document = Document(decoder.embed(torch.from_numpy(ids).long()))
        influences = Trials(decoder, 0, [document], 512, torch.device("cpu")).influences()
    errors = [head.error for head in found.choices.heads]
    assert not found.choices.shared
    assert any(not head.spec.is_dense for head in found.choices.heads)
    for error, influence in zip(errors, influences, strict=True):
        assert error is not None
        assert error * influence <= 0.1 * (1 + 1e-5)
    assert max(error or 0.0 for error in errors) > 0.1


@pytest.mark.parametrize("shared_flops", [1e12, 2e15])
def test_errors_are_traded_against_time(decoder: Decoder, tmp_path: Path, shared_flops: float) -> None:
    """No head, or group of heads, could have done better with its runner-up, with dense, or in the other way."""
    ids, tolerance = random_ids(420, 1), 0.1
    rates = replace(CHEAP, shared_flops=shared_flops, ranges_flops=1e15, blocks_flops=1e15)
    found = next(Search(decoder, [ids], tolerance, rates, state_in(tmp_path), measure="model").run())
    spec, choices = decoder.layers[0].spec, found.choices
    assert choices.shared == (shared_flops > 1e15)
    assert found.seconds < found.dense_seconds
    with torch.inference_mode():
        document = Document(decoder.embed(torch.from_numpy(ids).long()))
        trials = Trials(decoder, 0, [document], 512, torch.device("cpu"))
        influences = trials.influences()
    each = 2 if choices.shared else 1
    unit = Pricing((420,), spec, rates, shared=False).seconds(DENSE, (1.0,))
    pricing = Pricing((420,), spec, rates, choices.shared)
    taken = 0.0
    for at, head in enumerate(choices.heads):
        assert head.runner_up is not None
        costs = []
        for one in (head, head.runner_up):
            outcome = trials.run({at: one.spec}, shared=choices.shared, limits=[math.inf] * 4)[at]
            weighted = [
                error * influence / tolerance
                for error, influence in zip(outcome.errors, influences[at * each :], strict=False)
            ]
            assert len(weighted) == each
            assert one.error == pytest.approx(max(outcome.errors), rel=1e-3, abs=1e-6)
            seconds = pricing.seconds(one.spec, outcome.shares)
            costs.append(sum(error * error for error in weighted) + seconds / unit)
            taken += seconds if one is head else 0.0
        assert costs[0] <= costs[1] * (1 + 1e-6)
        assert costs[0] <= pricing.seconds(DENSE, (1.0,)) / unit * (1 + 1e-6)
    assert taken == pytest.approx(found.seconds)
    assert any(not head.spec.is_dense for head in choices.heads)


def test_earlier_layers_run_as_the_engine_runs_them(decoder: Decoder) -> None:
    """The hidden states that a search goes on with are those of a sparse prefill."""
    length = 400
    ids = random_ids(length, 8)
    patterns = LayerPatterns((spec_of("vertical_slash:vertical=30,slash=50"), A_SHAPE), shared=True)
    with torch.inference_mode():
        document = Document(decoder.embed(torch.from_numpy(ids).long()))
        for index in range(len(decoder.layers)):
            LayerPass(decoder, index, document, 64).advance(patterns)
    attention = EngineAttention.of(decoder.spec, [patterns] * len(decoder.layers), 1)
    from longbatch.attention import Executed

    segment = Segment(0, 0, length, reads=((0, length),), executed=Executed(sparse=True))
    step = Step.build(ids, [segment], None, tile_rows=128, device=decoder.device, attention=attention.layers)
    expected = prefill(decoder, new_cache(decoder), step)
    assert (document.hidden - expected).norm() / expected.norm() < 1e-5


def test_the_answer_does_not_depend_on_tiles(decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(new_search(decoder, state_in(tmp_path / "a")).run())
    monkeypatch.setitem(search_module.TILE_ROWS, "cpu", 128)
    tiled = list(new_search(decoder, state_in(tmp_path / "b")).run())
    assert [layer.choices.patterns for layer in tiled] == [layer.choices.patterns for layer in found]


def test_a_search_goes_on_where_it_was_stopped(decoder: Decoder, tmp_path: Path) -> None:
    whole = list(new_search(decoder, state_in(tmp_path / "whole")).run())
    first = new_search(decoder, state_in(tmp_path / "part")).run()
    head = [next(first), next(first)]
    first.close()
    watched: list[int] = []
    state = state_in(tmp_path / "part")
    again = Search(
        decoder,
        [random_ids(length, length) for length in (420, 200)],
        0.3,
        CHEAP,
        state,
        lambda layer, num_trials: watched.append(layer),
    )
    assert head == whole[:2]
    assert list(again.run()) == whole
    assert set(watched) == {2, 3}


def layers_of(found: Iterator[LayerFound]) -> list[tuple[int, bool]]:
    return [(layer.num_trials, layer.choices.patterns.is_dense) for layer in found]


@pytest.mark.parametrize("case", ["gemma3", "mistral-window"])
def test_layers_with_a_window_stay_dense(tmp_path: Path, case: str) -> None:
    model = tiny_decoder(tmp_path / "model", case)
    found = layers_of(new_search(model, state_in(tmp_path), lengths=(200,)).run())
    for (num_trials, is_dense), layer in zip(found, model.layers, strict=True):
        assert (num_trials > 0) == (layer.spec.window is None)
        assert is_dense or layer.spec.window is None
    assert not (tmp_path / "profile.json.search" / "layer-0000.json").exists() or case != "mistral-window"


def test_attention_sinks_take_part(tmp_path: Path) -> None:
    """A sink takes weight from every key, so that its head's output and error are others."""
    model = tiny_decoder(tmp_path / "model", "gpt_oss")
    index = next(i for i, layer in enumerate(model.layers) if layer.spec.window is None)
    with torch.inference_mode():
        document = Document(model.embed(torch.from_numpy(random_ids(150, 4)).long()))
        trials = Trials(model, index, [document], 64, torch.device("cpu"))
        outcome = trials.run({2: DENSE, 3: A_SHAPE}, shared=False, limits=[10.0] * 8)
    assert outcome[2].errors[0] < 1e-5
    assert outcome[3].errors[0] > 1e-3


def test_saved_layers_are_plain_json(decoder: Decoder, tmp_path: Path) -> None:
    found = next(new_search(decoder, state_in(tmp_path), tolerance=0.05).run())
    saved = json.loads((tmp_path / "profile.json.search" / "layer-0000.json").read_text())
    assert saved["heads"][0]["pattern"] == str(found.choices.heads[0].spec)
    assert saved["num_trials"] == found.num_trials > 0


def test_ids_may_be_of_any_integer_type(decoder: Decoder, tmp_path: Path) -> None:
    ids = random_ids(150, 0)
    one = next(Search(decoder, [ids], 0.3, CHEAP, state_in(tmp_path / "a")).run())
    other = next(Search(decoder, [ids.astype(np.int64)], 0.3, CHEAP, state_in(tmp_path / "b")).run())
    assert one == other
