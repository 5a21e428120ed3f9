"""Sparse attention in whole runs: what is resolved, recorded, refused, and kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_folders import results, run, settings_of, tiny_model
from sparse_runs import LENGTHS, SINKS, SPARSE, by_id, manifest

from longbatch.device import cpu_info
from longbatch.errors import ExitCode, UsageError
from longbatch.models import model_hash, read_spec
from longbatch.output import RunFolder
from longbatch.plan.sparse_rates import REFERENCE
from longbatch.run import make_plan
from longbatch.run.attention import Device, RunAttention, resolve_attention, stored_length
from longbatch.run.job import Job, open_folder
from longbatch.sparsity import HeadChoice, LayerChoices, LayerPatterns, PatternSpec, Profile

__all__ = ["manifest", "tiny_model"]


def make_profile(model: Path, path: Path, text: str = SINKS, **fields: Any) -> Path:
    """A profile with one pattern for every key/value head."""
    spec = read_spec(model)
    layer = LayerChoices((HeadChoice(PatternSpec.parse(text)),) * spec.layers[0].num_kv_heads, shared=True)
    values: dict[str, Any] = {
        "choices": (layer,) * len(spec.layers),
        "num_heads": spec.layers[0].num_heads,
        "num_kv_heads": spec.layers[0].num_kv_heads,
        "model_hash": model_hash(model),
        "tolerance": 0.05,
        "source": "a test",
        **fields,
    }
    Profile(**values).save(path)
    return path


# ------------------------------------------------------------------------------------------------ how rows run


def test_long_rows_run_the_pattern(
    tmp_path: Path, manifest: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(manifest, tiny_model, tmp_path / "out", **SPARSE, quiet=False) is ExitCode.FAILED_ROWS
    assert f"attention: sparse ({PatternSpec.parse(SINKS)}), 8 rows, mean density " in capsys.readouterr().err
    rows = by_id(tmp_path / "out")
    for i, length in enumerate(LENGTHS):
        attention = rows[f"r{i}"]["attention"]
        if length >= 100:
            assert attention["mode"] == "sparse"
            assert 0 < attention["density"] < 0.7
            assert attention["patterns"] == ["16 a_shape"]
        else:
            assert attention == {"mode": "dense", "density": 1.0, "patterns": None, "gap": None}
    assert {rows[id]["attention"]["mode"] for id in ("score", "embed", "label")} == {"sparse"}
    assert rows["bad"]["attention"]["mode"] is None
    run(manifest, tiny_model, tmp_path / "dense")
    dense = by_id(tmp_path / "dense")
    assert [id for id, row in rows.items() if row["logprobs"] and row["logprobs"] == dense[id]["logprobs"]] == []
    assert rows["r1"]["text"] == dense["r1"]["text"]


def test_auto_without_a_profile_is_dense_and_says_so(
    tmp_path: Path, manifest: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(manifest, tiny_model, tmp_path / "out", min_sparse_length=0, verify_sample=5, max_gap=0.0, quiet=False)
    assert "attention: dense (no profile)" in capsys.readouterr().err
    assert {row["attention"]["mode"] for row in results(tmp_path / "out")} == {"dense", None}
    assert not (tmp_path / "out" / "_work" / "verify").exists()
    identity = RunFolder.open(tmp_path / "out").identity
    assert {"attention", "profile_hash", "min_sparse_length"} & set(identity) == set()


def test_a_profile_of_the_model_is_used(
    tmp_path: Path, manifest: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = make_profile(tiny_model, tmp_path / "profile.json")
    settings = {"profile": profile, "min_sparse_length": 100, "json": True}
    run(manifest, tiny_model, tmp_path / "out", **settings)
    told = json.loads(capsys.readouterr().out)["attention"]
    assert (told["mode"], told["num_sparse"], told["num_measured"]) == ("sparse", 8, 0)
    assert told["settings"] == f"sparse from 100 tokens (profile {profile})"
    by_pattern = tmp_path / "pattern"
    run(manifest, tiny_model, by_pattern, **SPARSE)
    # The pattern goes by positions alone, so that sharing it within a group changes nothing.
    assert [row["text"] for row in results(by_pattern)] == [row["text"] for row in results(tmp_path / "out")]
    run(manifest, tiny_model, tmp_path / "dense", **settings, attention="dense")
    assert json.loads(capsys.readouterr().out)["attention"]["settings"] == "dense (--attention dense)"


def test_a_profile_of_another_model_is_refused(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    profile = make_profile(tiny_model, tmp_path / "profile.json", model_hash="0" * 32)
    with pytest.raises(UsageError, match="the profile is for another model"):
        run(manifest, tiny_model, tmp_path / "out", profile=profile, min_sparse_length=100)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="cannot be read"):
        run(manifest, tiny_model, tmp_path / "out", profile=tmp_path / "none.json")


def test_other_patterns_refuse_to_continue(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    out, profile = tmp_path / "out", make_profile(tiny_model, tmp_path / "profile.json")
    given: dict[str, Any] = {"profile": profile, "min_sparse_length": 100, "limit": 2}
    run(manifest, tiny_model, out, **given)
    with pytest.raises(UsageError, match=r"min_sparse_length: 100 there, 101 now"):
        run(manifest, tiny_model, out, **{**given, "min_sparse_length": 101})
    with pytest.raises(UsageError, match=r'attention: "profile" there, \(not set\) now'):
        run(manifest, tiny_model, out, **given, attention="dense")
    with pytest.raises(UsageError, match=r'attention: "profile" there, "a_shape:sinks=4,window=40" now'):
        run(manifest, tiny_model, out, **given, attention=SINKS)
    make_profile(tiny_model, profile, "a_shape:sinks=4,window=41")
    with pytest.raises(UsageError, match="profile_hash: "):
        run(manifest, tiny_model, out, **given)
    # The same patterns found once more are the same profile.
    make_profile(tiny_model, profile, created="2000-01-01T00:00:00+00:00", tolerance=0.5)
    assert run(manifest, tiny_model, out, profile=profile, limit=3) is ExitCode.OK
    assert [row["attention"]["mode"] for row in results(out)] == ["sparse", "dense", "sparse"]


# ------------------------------------------------------------------------------------------------ from which length on


class Timed(Device):
    """A device with the reference's rates."""

    rates = REFERENCE


def test_the_length_is_where_sparse_gets_faster(tmp_path: Path, tiny_model: Path) -> None:
    spec, device = read_spec(tiny_model), Timed(cpu_info(), "float32")
    settings = settings_of(tiny_model, tmp_path / "out", attention=SINKS)
    found = resolve_attention(settings, spec, "", device)
    assert found.is_sparse
    rows = found.rows(spec, REFERENCE)
    assert rows is not None
    dense = RunAttention((LayerPatterns((PatternSpec.parse("dense"),) * 4),) * 4, "dense").rows(spec, REFERENCE)
    assert dense is not None
    lengths = np.array([found.min_length / 2, found.min_length * 2])
    assert (rows.seconds(lengths) < dense.seconds(lengths)).tolist() == [False, True]
    assert resolve_attention(replace(settings, min_sparse_length=7), spec, "", device).min_length == 7


def test_a_device_that_gains_nothing_stays_dense(tmp_path: Path, tiny_model: Path) -> None:
    settings = settings_of(tiny_model, tmp_path / "out", attention=SINKS)
    found = resolve_attention(settings, read_spec(tiny_model), "", Device(cpu_info(), "float32"))
    assert found.describe() == (
        f"dense ({PatternSpec.parse(SINKS)}: never faster on this device; --min-sparse-length N runs it all the same)"
    )
    assert found.identity() == RunAttention().identity()


def test_only_layers_without_a_window_count(tmp_path: Path, tiny_model: Path) -> None:
    spec = read_spec(tiny_model)
    spec = replace(spec, layers=tuple(replace(layer, window=64) for layer in spec.layers))
    settings = settings_of(tiny_model, tmp_path, attention=SINKS, min_sparse_length=0)
    found = resolve_attention(settings, spec, "", Device(cpu_info(), "float32"))
    assert found.describe() == (
        f"dense ({PatternSpec.parse(SINKS)}: no layer of this model sees the whole prompt with uncapped scores)"
    )
    dense = settings_of(
        tiny_model, tmp_path, attention="auto", profile=make_profile(tiny_model, tmp_path / "p", "dense")
    )
    assert "no sparse head" in resolve_attention(
        dense, read_spec(tiny_model), model_hash(tiny_model), Device(cpu_info(), "float32")
    ).describe()  # fmt: skip


def test_a_run_keeps_the_length_that_it_began_with(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    out = tmp_path / "out"
    assert stored_length(out) is None
    run(manifest, tiny_model, out, **SPARSE, limit=1)
    assert stored_length(out) == 100
    assert run(manifest, tiny_model, out, attention=SINKS, limit=3) is ExitCode.OK
    assert [row["attention"]["mode"] for row in results(out)] == ["sparse", "dense", "sparse"]


def test_a_run_that_began_dense_goes_on_dense(
    tmp_path: Path, manifest: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Begun on a device that gains nothing: another one, where it would be faster, continues as it began."""
    out, spec, fast = tmp_path / "out", read_spec(tiny_model), Timed(cpu_info(), "float32")
    assert run(manifest, tiny_model, out, attention=SINKS, limit=2, quiet=False) is ExitCode.OK
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith(f"attention: every row runs dense ({PatternSpec.parse(SINKS)}: never faster on this device")
    settings = settings_of(tiny_model, out, attention=SINKS)
    found = resolve_attention(settings, spec, "", fast)
    assert found.describe().startswith(f"dense ({PatternSpec.parse(SINKS)}: not faster where this run began")
    job = replace(Job.open(settings, [str(manifest)], print), attention=found)
    assert open_folder(job)[0].attention == found
    # Started at the same time, before there was a run to look at.
    raced = resolve_attention(replace(settings, out=tmp_path / "none"), spec, "", fast)
    assert raced.is_sparse
    assert open_folder(replace(job, attention=raced))[0].attention == found
    # Whatever else is asked for is another run.
    longer = replace(settings, min_sparse_length=100)
    assert resolve_attention(longer, spec, "", fast).min_length == 100
    with pytest.raises(UsageError, match=r"attention: \(not set\) there"):
        run(manifest, tiny_model, out, attention=SINKS, min_sparse_length=100)
    other = resolve_attention(replace(settings, attention="strided:stride=2"), spec, "", fast)
    assert "not faster where this run began" not in other.describe()


def test_of_two_that_measured_the_first_decides(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    """Both looked for a run that was not there yet, and measured."""
    settings = settings_of(tiny_model, tmp_path / "out", attention=SINKS)
    job = Job.open(settings, [str(manifest)], print)
    layers = (LayerPatterns((PatternSpec.parse(SINKS),) * 4),) * 4
    jobs = [replace(job, attention=RunAttention(layers, SINKS, SINKS, min_length=length)) for length in (50, 60)]
    assert [open_folder(one)[0].attention.min_length for one in jobs] == [50, 50]
    fixed = replace(jobs[1], settings=replace(settings, min_sparse_length=60))
    with pytest.raises(UsageError, match="min_sparse_length: 50 there, 60 now"):
        open_folder(fixed)
    other = replace(jobs[1], attention=replace(jobs[1].attention, name="strided"))
    with pytest.raises(UsageError, match='attention: "a_shape:sinks=4,window=40" there, "strided" now'):
        open_folder(other)


def test_the_plan_shows_it(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    view = make_plan(settings_of(tiny_model, None, **SPARSE), [str(manifest)])  # type: ignore[arg-type]
    assert view.attention == f"sparse from 100 tokens ({PatternSpec.parse(SINKS)})"
    assert view.as_dict()["attention"] == view.attention
