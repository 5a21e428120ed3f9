"""`longbatch bench fidelity MODEL --profile FILE`: what sparse prefill costs in fidelity on real documents.

Sparsity is forced at every length. Every token of each document is scored dense and by the patterns: mean |difference
of log-probability|, positions with the same best token, executed density and predicted seconds of attention. Several
--profile files (searched with several tolerances) give a curve of density against gap; the first one is held to the
limits below. Beside them stands MInference's way of choosing (`minference_rule`), fitted on one text that is not among
the documents and run by the same code: with no more predicted time than it, some profile must come as close to dense.
Then facts planted at several depths are asked for through the real command: the answers must be those of dense prefill.

Documents are by default those of Python's standard library (`library_texts`), of which none serves calibration.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from longbatch import device
from longbatch.bench import library_texts, planted
from longbatch.bench.chart import write_chart
from longbatch.bench.process import say
from longbatch.bench.report import Measurement
from longbatch.core import Request
from longbatch.errors import UsageError
from longbatch.folders import cache_folder
from longbatch.sparsity import LayerPatterns, PatternSpec, Profile

if TYPE_CHECKING:
    from longbatch.bench.fidelity_scores import Gap
    from longbatch.models.decoder import Decoder

MOST_GAP, LEAST_AGREEMENT = 0.01, 0.98
# Greatest executed density of a prompt up to so many tokens; denser runs do not count as sparse.
MOST_DENSITY = ((12_288, 0.40), (1 << 40, 0.25))
MINFERENCE = "MInference's menu and rule"
DENSE, AGAIN = "dense", "dense, other tiles"
TILE_ROWS = {"cpu": 1024, "cuda": 16384}


@dataclass(frozen=True, slots=True)
class Way:
    """One way of running: a name for the table, and patterns of each layer."""

    name: str
    patterns: tuple[LayerPatterns, ...]


def measure(
    *,
    model: str | None = None,
    profile: Sequence[Path] | None = None,
    documents: Path | None = None,
    lengths: Sequence[int] | None = None,
    picture: Path | None = None,
    dtype: str = "auto",
    quick: bool = False,
) -> Iterator[Measurement]:
    """On the first GPU, or the CPU: the scores, and then the facts. quick: three documents, and one fact at each depth.
    Raises UsageError for a missing or mismatched profile and for documents that are too short."""
    from longbatch.models import model_hash, read_spec
    from longbatch.models.bundled import sample_weights
    from longbatch.models.hub import resolve
    from longbatch.prompt import Tokenizer

    if not profile:
        raise UsageError("bench fidelity needs --profile FILE", hint="make one with `longbatch profile`")
    folder = resolve(model) if model else sample_weights(say)
    spec, tokenizer = read_spec(folder), Tokenizer.load(folder)
    ways: list[Way] = []
    for path in profile:
        loaded = Profile.load(path)
        loaded.check(model_hash(folder), spec)
        tolerance = "" if loaded.tolerance is None else f", tolerance {loaded.tolerance:g}"
        name = f"{path.stem}{tolerance}"
        ways.append(Way(str(path) if name in [way.name for way in ways] else name, loaded.layers))
    lengths = lengths or default_lengths(spec.max_length)
    texts = _texts(documents)
    ids = {name: tokenizer.encode(text, allow_special=False, add_special=True) for name, text in texts.items()}
    chosen = {length: [own[:length] for own in ids.values() if len(own) >= length] for length in lengths}
    for length, found in chosen.items():
        if not found:
            raise UsageError(f"no document has {length:,} tokens", hint="give longer --documents, or shorter --lengths")
        say(f"{len(found)} documents of {length:,} tokens")
        del found[3 if quick else len(found) :]
    example = library_texts.documents("calibration")["processes"]
    fitted = tokenizer.encode(example, allow_special=False, add_special=True)[: max(lengths)]
    gaps = score_documents(folder, ways, chosen, fitted, dtype)
    if picture is not None:
        draw(gaps, picture)
    yield from gap_rows(gaps, ways[0].name)
    with tempfile.TemporaryDirectory(prefix="longbatch-bench-") as name:
        facts = planted.plant(
            lengths, lambda text: len(tokenizer.encode(text, allow_special=False)), per_depth=1 if quick else 2
        )
        flags = ["--model", str(folder), "--dtype", dtype, "--max-tokens", str(planted.MAX_TOKENS)]
        say("planted facts, dense")
        dense = planted.ask(facts, Path(name), "dense", [*flags, "--attention", "dense"])
        say("planted facts, sparse")
        forced = ["--attention", "auto", "--profile", str(profile[0].absolute()), "--min-sparse-length", "0"]
        sparse = planted.ask(facts, Path(name), "sparse", [*flags, *forced])
    yield from fact_rows(facts, dense, sparse)


def default_lengths(max_length: int) -> list[int]:
    """16K and 32K tokens where the model reads so many, else 8K or all that it reads."""
    return [length for length in (16_384, 32_768) if length <= max_length] or [min(8192, max_length)]


def _texts(documents: Path | None) -> dict[str, str]:
    if documents is None:
        return library_texts.documents("evaluation")
    from longbatch.manifest import Manifest, ManifestOptions

    found = {}
    for number, row in enumerate(Manifest.open([str(documents)], ManifestOptions()).rows()):
        parts: tuple[object, ...] = ()
        if isinstance(row, Request):
            parts = row.messages[-1].parts if row.messages else (row.text,)
        if len(parts) != 1 or not isinstance(parts[0], str):
            raise UsageError(f"row {number} of {documents} is no plain text", hint='rows such as {"prompt": "..."}')
        found[f"{number}"] = parts[0]
    return found


# ------------------------------------------------------------------------------------------ scores


def score_documents(
    folder: Path, ways: Sequence[Way], chosen: Mapping[int, Sequence[Sequence[int]]], example: Sequence[int], dtype: str
) -> dict[int, dict[str, Gap]]:
    """Mean gaps by length and way, MInference's and dense attention in other tiles among them. example: the ids that
    MInference's rule is fitted on."""
    import torch

    from longbatch.bench.fidelity_scores import compare, mean, score
    from longbatch.models import load
    from longbatch.plan.sparse_rates import REFERENCE, sparse_rates

    info = device.detect()[0]
    dtype = device.default_dtype(info) if dtype == "auto" else dtype
    rates = sparse_rates(info, dtype, cache_folder(), say) or REFERENCE
    model = load(folder, getattr(torch, dtype), torch.device(info.torch_name))
    tile_rows = TILE_ROWS[model.device.type]
    say(MINFERENCE)
    everything = [*ways, Way(MINFERENCE, fit_minference(model, example))]
    found: dict[int, dict[str, Gap]] = {}
    for length, documents in chosen.items():
        gaps: dict[str, list[Gap]] = {way.name: [] for way in everything}
        again = []
        for number, ids in enumerate(documents):
            say(f"{length:,} tokens, document {number + 1} of {len(documents)}")
            dense = score(model, ids, None, tile_rows)
            for way in everything:
                gaps[way.name].append(
                    compare(dense, score(model, ids, way.patterns, tile_rows), way.patterns, model.spec, rates)
                )
            if not number:
                other = score(model, ids, None, tile_rows // 3)
                again.append(compare(dense, other, all_dense(model), model.spec, rates))
        found[length] = {name: mean(own) for name, own in gaps.items()} | {AGAIN: mean(again)}
        for name, gap in found[length].items():
            say(
                f"{length:,} tokens, {name}: {gap.nats:.4g} nats, {gap.agreement:.2%} same best token, density "
                f"{gap.density:.4f}, predicted {gap.seconds:.4g} s, dense {gap.dense_seconds:.4g} s"
            )
    return found


def fit_minference(model: Decoder, example: Sequence[int]) -> tuple[LayerPatterns, ...]:
    """MInference's choices as patterns. An example that is too short for its rule is judged from its middle on."""
    from longbatch.bench import minference_rule

    first = min(minference_rule.FIRST_QUERY, len(example) // 2)
    chosen = minference_rule.choose(model, example, first)
    return tuple(
        own if budgets is None else LayerPatterns(tuple(_vertical_slash(*budget) for budget in budgets))
        for own, budgets in zip(all_dense(model), chosen, strict=True)
    )


def all_dense(model: Decoder) -> tuple[LayerPatterns, ...]:
    """Every head dense."""
    return tuple(LayerPatterns((PatternSpec.make("dense"),) * layer.num_heads) for layer in model.spec.layers)


def _vertical_slash(vertical: int, slash: int) -> PatternSpec:
    return PatternSpec.make("vertical_slash", vertical=vertical, slash=slash)


def draw(gaps: Mapping[int, Mapping[str, Gap]], picture: Path) -> None:
    """The curve of density against gap."""
    series: dict[str, list[tuple[float, float]]] = {}
    for length, own in gaps.items():
        for name, gap in own.items():
            if name != AGAIN:
                who = name if name == MINFERENCE else "longbatch"
                series.setdefault(f"{who}, {length:,} tokens", []).append((gap.density, gap.nats))
    title = "Sparse prefill against dense"
    write_chart(picture, title, "executed density", "mean |difference of log-probability|, nats", series, MOST_GAP)


# ------------------------------------------------------------------------------------------ table


def gap_rows(gaps: Mapping[int, Mapping[str, Gap]], first: str) -> list[Measurement]:
    """The table of scores. first: the profile that is held to the limits."""
    rows = []
    for length, own in gaps.items():
        limit = next(density for most, density in MOST_DENSITY if length <= most)
        for name, gap in own.items():
            held, case = name == first, f"{name}, {length:,} tokens"
            # A denser run does not count as sparse, however near to dense it comes.
            counts = not held or gap.density <= limit
            near = counts and (gap.nats <= MOST_GAP or not held)
            agrees = counts and (gap.agreement >= LEAST_AGREEMENT or not held)
            rows += [
                Measurement(case, "gap", gap.nats, "nats", DENSE, None, near),
                Measurement(case, "same best token", gap.agreement, "share", DENSE, None, agrees),
            ]
            if name != AGAIN:
                speedup = gap.dense_seconds / gap.seconds
                rows += [
                    Measurement(case, "density", gap.density, "share", DENSE, gap.density, counts),
                    Measurement(case, "predicted attention", gap.seconds, "s", DENSE, speedup, True),
                ]
        rows.append(_against_minference(length, own))
    return rows


def _against_minference(length: int, gaps: Mapping[str, Gap]) -> Measurement:
    """The profile nearest to dense among those that are predicted to take no longer than MInference's choices."""
    rival = gaps[MINFERENCE]
    within = [
        gap.nats for name, gap in gaps.items() if name not in (MINFERENCE, AGAIN) and gap.seconds <= rival.seconds
    ]
    case = f"best profile within its predicted time, {length:,} tokens"
    if not within:
        return Measurement(case, "gap of the rival alone", rival.nats, "nats", MINFERENCE, None, False)
    best = min(within)
    ratio = best / rival.nats if rival.nats else None
    return Measurement(case, "gap", best, "nats", MINFERENCE, ratio, best <= rival.nats)


def fact_rows(facts: Sequence[planted.Fact], dense: planted.Found, sparse: planted.Found) -> list[Measurement]:
    """Answers by length, then by depth."""
    rows = []
    for length in dict.fromkeys(fact.length for fact in facts):
        for depth in planted.DEPTHS:
            at = [i for i, fact in enumerate(facts) if (fact.length, fact.depth) == (length, depth)]
            own = [facts[i] for i in at]
            case = f"planted facts, {length:,} tokens, depth {depth:g}"
            found = [
                planted.Found(tuple(each.answers[i] for i in at), tuple(each.densities[i] for i in at))
                for each in (dense, sparse)
            ]
            equal = sum(a == b for a, b in zip(found[0].answers, found[1].answers, strict=True))
            forced = all(density is not None and density < 1 for density in found[1].densities)
            same, unit = forced and equal == len(own), f"of {len(own)}"
            rows += [
                Measurement(case, "found by dense", found[0].correct(own), unit, None, None, True),
                Measurement(case, "found by sparse", found[1].correct(own), unit, DENSE, None, forced),
                Measurement(case, "same answer", equal, unit, DENSE, equal / len(own), same),
            ]
    return rows
