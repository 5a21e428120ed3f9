"""`longbatch bench fidelity`: its documents, MInference's rule, the scores, planted facts, and what its table holds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from PIL import Image

from longbatch.bench import fidelity, library_texts, minference_rule, planted
from longbatch.bench.chart import COLOURS, write_chart
from longbatch.bench.fidelity import AGAIN, MINFERENCE, default_lengths, fact_rows, gap_rows
from longbatch.bench.fidelity_scores import Gap, Scored, compare, mean, score
from longbatch.bench.report import Measurement
from longbatch.cli import main
from longbatch.errors import DiskError, UsageError
from longbatch.models import load, model_hash, read_spec
from longbatch.models.decoder import Decoder
from longbatch.plan.sparse_cost import layer_seconds
from longbatch.plan.sparse_rates import REFERENCE
from longbatch.sparsity import HeadChoice, LayerChoices, LayerPatterns, PatternSpec, Profile

CPU = torch.device("cpu")
LENGTH = 300
IDS = torch.randint(3, 200, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma of four layers, the first three with windows of 40."""
    folder = tmp_path_factory.mktemp("fidelity") / "gemma3"
    tiny_models.save("gemma3-scaled-capped", folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Decoder:
    return load(folder, torch.float32, CPU)


def all_heads(model: Decoder, text: str) -> list[LayerPatterns]:
    """One pattern for every head of the layers that have no window."""
    spec, dense = PatternSpec.parse(text), PatternSpec.make("dense")
    return [LayerPatterns(((spec if layer.spec.window is None else dense),) * 4) for layer in model.layers]


# ------------------------------------------------------------------------------------------ documents


def test_documents_are_long_and_apart() -> None:
    parts = {part: library_texts.documents(part) for part in library_texts.PARTS}
    assert len(parts["evaluation"]) >= 10
    texts = [text for documents in parts.values() for text in documents.values()]
    assert min(map(len, texts)) > 100_000
    assert len(set(texts)) == len(texts)
    modules = [name for part in library_texts.PARTS.values() for names in part.values() for name in names]
    assert len(set(modules)) == len(modules)


def test_documents_become_a_manifest(tmp_path: Path) -> None:
    library_texts.main(["calibration", str(tmp_path / "texts.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert {row["id"]: row["prompt"] for row in rows} == library_texts.documents("calibration")
    found = fidelity._texts(tmp_path / "texts.jsonl")
    assert list(found.values()) == [row["prompt"] for row in rows]
    with pytest.raises(SystemExit, match="usage"):
        library_texts.main(["calibration"])


def test_documents_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_texts.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UsageError, match=r"are not in .*: processes, logging"):
        library_texts.documents("calibration")


def test_manifest_of_something_else(tmp_path: Path) -> None:
    manifest = tmp_path / "rows.jsonl"
    manifest.write_text('{"id": "a", "prompt": "text"}\n{"id": "b"}\n')
    with pytest.raises(UsageError, match=r"row 1 of .* is no plain text"):
        fidelity._texts(manifest)


# ------------------------------------------------------------------------------------------ MInference's rule


def kept_by_definition(q: torch.Tensor, k: torch.Tensor, scale: float, first: int) -> dict[Any, float]:
    """Each entry of the menu on the whole matrix."""
    length = len(q)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    mass = ((q @ k.T) * scale).masked_fill(distance < 0, -torch.inf).softmax(-1)
    last = mass[-64:]
    columns = last.sum(0)
    columns[:30] = torch.inf
    slashes = torch.stack([last[distance[-64:] == d].sum() for d in range(length)])
    slashes[:30] = torch.inf
    sinks, window = minference_rule.A_SHAPE
    masks: dict[Any, torch.Tensor] = {
        ("a_shape", minference_rule.A_SHAPE): (torch.arange(length) < sinks) | (distance <= window)
    }
    for vertical, slash in minference_rule.VERTICAL_SLASH:
        seen = torch.zeros(length, length, dtype=torch.bool)
        seen[:, columns.topk(min(vertical, length)).indices] = True
        for d in slashes.topk(min(slash, length)).indices.tolist():
            seen |= distance == d
        masks["vertical_slash", (vertical, slash)] = seen
    blocks = -(-length // 32)
    means = [torch.nn.functional.pad(x, (0, 0, 0, blocks * 32 - length)).view(blocks, 32, -1).mean(1) for x in (q, k)]
    scores = (means[0] @ means[1].T).masked_fill(torch.ones(blocks, blocks).triu(1) > 0, torch.finfo(q.dtype).min)
    chosen = torch.zeros(blocks, blocks).scatter_(1, scores.topk(blocks // 8).indices, 1.0)
    masks["block_sparse", (8, 1)] = chosen.repeat_interleave(32, 0).repeat_interleave(32, 1)[:length, :length] > 0
    return {entry: float((mass * mask)[first:].sum(1).mean()) for entry, mask in masks.items()}


@pytest.fixture
def small_menu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minference_rule, "A_SHAPE", (10, 60))
    monkeypatch.setattr(minference_rule, "VERTICAL_SLASH", ((35, 80), (60, 40), (3500, 30)))
    monkeypatch.setattr(minference_rule, "PAIRS", 20_000)  # several tiles


@pytest.mark.usefixtures("small_menu")
@pytest.mark.parametrize("length", [389, 512])
def test_mass_kept_is_that_of_the_definition(length: int) -> None:
    torch.manual_seed(length)
    q, k = torch.randn(length, 16) * 1.5, torch.randn(length, 16) * 1.5
    found = minference_rule.mass_kept(q, k, 0.25, 100)
    assert found == pytest.approx(kept_by_definition(q, k, 0.25, 100), abs=1e-5)


@pytest.mark.usefixtures("small_menu")
def test_rule_takes_the_most_mass_and_rewrites(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = minference_rule.choose(model, IDS, 100)
    assert [own is None for own in chosen] == [layer.spec.window is not None for layer in model.layers]
    # The entry with 3,500 columns keeps everything of 300 tokens.
    assert {budget for own in chosen if own for budget in own} == {(3500, 30)}
    monkeypatch.setattr(
        minference_rule, "mass_kept", lambda *_: {("a_shape", (10, 60)): 0.5, ("block_sparse", (8, 1)): 0.6}
    )
    assert {budget for own in minference_rule.choose(model, IDS, 100) if own for budget in own} == {(1000, 6096)}
    patterns = fidelity.fit_minference(model, IDS)
    assert [str(layer.heads[0]) for layer in patterns] == [
        "dense" if layer.spec.window else "vertical_slash:vertical=1000,slash=6096" for layer in model.layers
    ]


# ------------------------------------------------------------------------------------------ scores


def test_dense_scores_are_those_of_transformers(folder: Path, model: Decoder) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits = reference(torch.tensor([IDS])).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    found = score(model, IDS, None, 64)
    assert (found.logprobs - expected).abs().max() < 1e-4
    assert torch.equal(found.best, logits[:-1].argmax(-1))
    assert found.shares == (None,) * 4


def test_sparse_scores(model: Decoder) -> None:
    dense = score(model, IDS, None, 64)
    whole = all_heads(model, "a_shape:sinks=0,window=300")
    everything = compare(dense, score(model, IDS, whole, 64), whole, model.spec, REFERENCE)
    assert everything.nats < 1e-5
    assert (everything.agreement, everything.density) == (1.0, 1.0)
    narrow = all_heads(model, "a_shape:sinks=0,window=20")
    sparse = score(model, IDS, narrow, 64)
    gap = compare(dense, sparse, narrow, model.spec, REFERENCE)
    assert gap.nats > 0.01
    assert gap.agreement < 1
    assert gap.density == pytest.approx((20 * 21 / 2 + 280 * 20) / (300 * 301 / 2))
    # Only layers without a window count, and they are priced by what they selected.
    layers = [(layer, own) for layer, own in zip(model.spec.layers, narrow, strict=True) if layer.window is None]
    assert 0 < len(layers) < 4
    priced = sum(layer_seconds(own, LENGTH, layer, REFERENCE, [gap.density] * 4) for layer, own in layers)
    assert gap.seconds == pytest.approx(priced)


def test_gap_by_hand(model: Decoder) -> None:
    dense = Scored(torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([5, 6, 7, 8]), (None,) * 4)
    other = Scored(torch.tensor([-1.5, -2.0, -2.5, -4.0]), torch.tensor([5, 6, 7, 9]), (None,) * 4)
    gap = compare(dense, other, fidelity.all_dense(model), model.spec, REFERENCE)
    assert (gap.nats, gap.agreement, gap.density) == (0.25, 0.75, 1.0)
    assert gap.seconds == pytest.approx(gap.dense_seconds)
    assert mean([gap, replace(gap, nats=0.75)]).nats == 0.5


# ------------------------------------------------------------------------------------------ table


def checked(rows: list[Measurement], case: str) -> dict[str, bool]:
    return {row.metric: row.checked for row in rows if row.case.startswith(case)}


GOOD = Gap(0.005, 0.99, 0.3, 1.0, 2.0)
THEIRS = Gap(0.02, 0.97, 0.6, 1.5, 2.0)


@pytest.mark.parametrize(
    ("length", "gap", "expected"),
    [
        (8192, GOOD, {"gap": True, "same best token": True, "density": True}),
        (8192, replace(GOOD, nats=0.011), {"gap": False, "same best token": True, "density": True}),
        (8192, replace(GOOD, agreement=0.97), {"gap": True, "same best token": False, "density": True}),
        (8192, replace(GOOD, density=0.41), {"gap": False, "same best token": False, "density": False}),
        (16_384, GOOD, {"gap": False, "same best token": False, "density": False}),
        (16_384, replace(GOOD, density=0.25), {"gap": True, "same best token": True, "density": True}),
    ],
    ids=["holds", "too far", "other tokens", "too dense", "too dense for 16K", "holds at 16K"],
)
def test_limits_of_the_first_profile(length: int, gap: Gap, expected: dict[str, bool]) -> None:
    rows = gap_rows({length: {"first": gap, "second": THEIRS, MINFERENCE: THEIRS, AGAIN: GOOD}}, "first")
    found = checked(rows, "first")
    assert {name: found[name] for name in expected} == expected
    # Others are points of a curve.
    assert all(checked(rows, "second").values())
    assert all(checked(rows, MINFERENCE).values())


@pytest.mark.parametrize(
    ("own", "value", "holds"),
    [
        ({"a": GOOD, "b": replace(GOOD, nats=0.001, seconds=1.6)}, 0.005, True),
        ({"a": replace(GOOD, nats=0.03), "b": GOOD}, 0.005, True),
        ({"a": replace(GOOD, nats=0.03)}, 0.03, False),
        ({"a": replace(GOOD, seconds=1.6)}, 0.02, False),
    ],
    ids=["nearer but slower", "best counts", "farther", "none as fast"],
)
def test_beside_minference(own: dict[str, Gap], value: float, holds: bool) -> None:
    rows = gap_rows({8192: {**own, MINFERENCE: THEIRS, AGAIN: GOOD}}, "none")
    (row,) = [row for row in rows if row.case.startswith("best profile")]
    assert (row.value, row.checked) == (value, holds)


def facts_and_answers() -> tuple[list[planted.Fact], planted.Found]:
    facts = [planted.Fact(500, depth, str(10_000 + i), "") for i, depth in enumerate(planted.DEPTHS)]
    return facts, planted.Found(tuple(fact.number for fact in facts), (None,) * len(facts))


def test_facts_that_sparse_prefill_finds() -> None:
    facts, dense = facts_and_answers()
    sparse = planted.Found(dense.answers, (0.3,) * len(facts))
    rows = fact_rows(facts, dense, sparse)
    assert len(rows) == 3 * len(planted.DEPTHS)
    assert all(row.checked and row.value == 1 for row in rows)


def test_facts_that_it_does_not_find() -> None:
    facts, dense = facts_and_answers()
    answers = (*dense.answers[:2], "10003", *dense.answers[3:])
    densities: tuple[float | None, ...] = (0.3, None, 0.3, 0.3, 0.3)
    rows = fact_rows(facts, dense, planted.Found(answers, densities))
    failed = {(row.case.rpartition(" ")[2], row.metric) for row in rows if not row.checked}
    # The second row ran dense, so its answer says nothing.
    assert failed == {("0.5", "same answer"), ("0.25", "same answer"), ("0.25", "found by sparse")}


def test_planted_facts() -> None:
    facts = planted.plant([400, 800], lambda text: len(text.split()), per_depth=2)
    assert [(fact.length, fact.depth) for fact in facts[::2]] == [(n, d) for n in (400, 800) for d in planted.DEPTHS]
    for fact in facts:
        words = fact.prompt.split()
        assert 0.9 * fact.length < len(words) <= fact.length - planted.MAX_TOKENS
        at = next(i for i, word in enumerate(words) if word == f"{fact.number}.") / len(words)
        # The question takes some words at the end.
        assert at == pytest.approx(fact.depth, abs=0.08)
        asked = re.search(r"Question: What is the code of the archive in (\w+)\?", fact.prompt)
        assert asked is not None
        assert f"The code of the archive in {asked[1]} is {fact.number}." in fact.prompt
        assert fact.prompt.endswith(f"The code of the archive in {asked[1]} is")
        assert fact.prompt.count(fact.number) == 1
    assert facts == planted.plant([400, 800], lambda text: len(text.split()), per_depth=2)


# ------------------------------------------------------------------------------------------ picture


def test_chart(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    series = {"ours": [(0.1, 0.1), (0.5, 0.001)], "theirs": [(0.9, 0.0)]}
    write_chart(path, "title", "density", "gap", series, limit=0.01)
    picture = Image.open(path).convert("RGB")
    assert picture.size == (960, 640)
    colours = {colour for _, colour in picture.getcolors(1 << 20)}
    assert {tuple(bytes.fromhex(colour[1:])) for colour in COLOURS[:2]} <= colours
    assert tuple(bytes.fromhex(COLOURS[2][1:])) not in colours
    write_chart(path, "title", "density", "gap", {"one": [(0.0, 0.0)]})
    with pytest.raises(DiskError, match="nowhere"):
        write_chart(tmp_path / "nowhere" / "curve.png", "title", "x", "y", series)


def test_curve_has_a_line_for_each_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(fidelity, "write_chart", lambda *arguments: drawn.append(arguments))
    gaps = {n: {"a": GOOD, "b": THEIRS, MINFERENCE: THEIRS, AGAIN: GOOD} for n in (8192, 16_384)}
    fidelity.draw(gaps, tmp_path / "curve.png")
    series = drawn[0][4]
    assert series["longbatch, 8,192 tokens"] == [(0.3, 0.005), (0.6, 0.02)]
    assert series[f"{MINFERENCE}, 16,384 tokens"] == [(0.6, 0.02)]
    assert len(series) == 4


# ------------------------------------------------------------------------------------------ command


def test_default_lengths() -> None:
    assert default_lengths(8192) == [8192]
    assert default_lengths(2048) == [2048]
    assert default_lengths(16_384) == [16_384]
    assert default_lengths(131_072) == [16_384, 32_768]


def write_profile(path: Path, model_dir: Path, vertical: int, slash: int, tolerance: float) -> Path:
    spec = read_spec(model_dir)
    head = HeadChoice(PatternSpec.make("vertical_slash", vertical=vertical, slash=slash), 0.1, 0.2)
    layer = spec.layers[0]
    Profile(
        choices=tuple(LayerChoices((head,) * layer.num_kv_heads, True) for _ in spec.layers),
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        model_hash=model_hash(model_dir),
        tolerance=tolerance,
        source="test",
    ).save(path)
    return path


def test_profile_is_needed_and_checked(smollm2_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fidelity", str(smollm2_dir)]) == 2
    assert "needs --profile" in capsys.readouterr().err
    profile = write_profile(tmp_path / "profile.json", smollm2_dir, 60, 100, 0.1)
    values = json.loads(profile.read_text())
    profile.write_text(json.dumps({**values, "model_hash": "0" * 32}))
    assert main(["bench", "fidelity", str(smollm2_dir), "--profile", str(profile)]) == 2
    assert "another model" in capsys.readouterr().err
    profile.write_text(json.dumps(values))
    documents = tmp_path / "short.jsonl"
    documents.write_text('{"id": "a", "prompt": "too short"}\n')
    assert main(["bench", "fidelity", str(smollm2_dir), "--profile", str(profile), "--documents", str(documents)]) == 2
    assert "no document has 8,192 tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_whole_bench(smollm2_dir: Path, tmp_path: Path) -> None:
    """Real weights at 500 tokens, the real command for the planted facts included."""
    profiles = [
        write_profile(tmp_path / "narrow.json", smollm2_dir, 60, 100, 0.2),
        write_profile(tmp_path / "wide.json", smollm2_dir, 500, 500, 0.1),
    ]
    picture, report = tmp_path / "curve.png", tmp_path / "report.json"
    flags = ["--lengths", "500", "--quick", "--picture", str(picture), "--json", str(report)]
    for profile in profiles:
        flags += ["--profile", str(profile)]
    # Budgets that nobody searched miss the limits.
    assert main(["bench", "fidelity", str(smollm2_dir), *flags]) == 7
    rows = {(row["case"], row["metric"]): row for row in json.loads(report.read_text())["rows"]}
    narrow = rows["narrow, tolerance 0.2, 500 tokens", "gap"]
    wide = rows["wide, tolerance 0.1, 500 tokens", "gap"]
    assert narrow["value"] > 0.01 > 1e-4 > wide["value"]
    assert not narrow["checked"]
    assert rows["narrow, tolerance 0.2, 500 tokens", "density"]["value"] < 0.6
    assert rows["wide, tolerance 0.1, 500 tokens", "density"]["value"] == 1
    assert rows[f"{AGAIN}, 500 tokens", "gap"]["value"] < 1e-4
    depths = [f"planted facts, 500 tokens, depth {depth:g}" for depth in planted.DEPTHS]
    assert all(rows[case, "found by dense"]["value"] == 1 for case in depths)
    assert picture.stat().st_size > 1000
