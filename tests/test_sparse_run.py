"""Sparse attention in whole runs: what is resolved, recorded, refused, measured, and continued after kills."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from run_folders import results, run, settings_of, tiny_model, words, write_manifest

from longbatch.device import cpu_info
from longbatch.errors import ExitCode, FidelityError, InterruptedRun, UsageError
from longbatch.models import model_hash, read_spec
from longbatch.output import RunFolder, read_gaps
from longbatch.plan.sparse_rates import REFERENCE
from longbatch.run import make_plan, merge_folder
from longbatch.run.attention import Device, RunAttention, resolve_attention, stored_length
from longbatch.run.job import Job, open_folder
from longbatch.run.status import read_status
from longbatch.sparsity import HeadChoice, LayerChoices, LayerPatterns, PatternSpec, Profile

__all__ = ["tiny_model"]

SINKS = "a_shape:sinks=4,window=40"
LENGTHS = (300, 10, 260, 220, 40, 180, 140)
SPARSE: dict[str, Any] = {"attention": SINKS, "min_sparse_length": 100}


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    rows: list[dict[str, Any]] = [{"id": f"r{i}", "prompt": words(n, i)} for i, n in enumerate(LENGTHS)]
    rows += [
        {"id": "score", "task": "score", "prompt": words(200, 20)},
        {"id": "embed", "task": "embed", "prompt": words(190, 21)},
        {"id": "label", "task": "classify", "prompt": words(240, 22), "labels": ["w5", "w6 w7"]},
        {"id": "bad", "prompt": words(120, 23), "temperature": -1},
    ]
    return write_manifest(tmp_path / "manifest.jsonl", rows)


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


def by_id(out: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in results(out)}


def measured(out: Path) -> dict[str, float]:
    return {id: row["attention"]["gap"] for id, row in by_id(out).items() if row["attention"]["gap"] is not None}


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
    assert not resolve_attention(settings, spec, "", Device(cpu_info(), "float32")).is_sparse
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


# ------------------------------------------------------------------------------------------------ the gap


def test_a_sample_of_sparse_rows_is_measured(
    tmp_path: Path, manifest: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(manifest, tiny_model, out, **SPARSE, verify_sample=4, max_gap=9.0, quiet=False) is ExitCode.FAILED_ROWS
    told = capsys.readouterr().err
    assert "4 rows that ran sparse run again, to measure the gap to dense attention" in told
    gaps = measured(out)
    assert f"gap to dense attention: {np.mean(list(gaps.values())):.3g} nats a token over 4 rows" in told
    assert len(gaps) == 4
    assert all(gap > 1e-3 for gap in gaps.values())
    rows = by_id(out)
    assert {rows[id]["attention"]["mode"] for id in gaps} == {"sparse"}
    # Short and long ones: two of the four shorter rows, two of the longer ones.
    lengths = sorted(rows[id]["usage"]["prompt_tokens"] for id in gaps)
    assert lengths[1] <= 200 <= lengths[2]
    run(manifest, tiny_model, tmp_path / "plain", **SPARSE)
    for id, row in by_id(tmp_path / "plain").items():
        assert (row["text"], row["label"], row["logprobs"]) == tuple(rows[id][n] for n in ("text", "label", "logprobs"))
    again = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    assert run(manifest, tiny_model, out, **SPARSE, verify_sample=4) is ExitCode.FAILED_ROWS
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")} == again


def test_all_rows_but_embeddings_can_be_measured(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    run(manifest, tiny_model, tmp_path / "out", **SPARSE, verify_sample=100)
    assert set(measured(tmp_path / "out")) == {"r0", "r2", "r3", "r5", "r6", "score", "label"}


def test_scores_are_compared_token_by_token(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    run(manifest, tiny_model, tmp_path / "out", **SPARSE, verify_sample=100)
    run(manifest, tiny_model, tmp_path / "dense")
    one, other = (
        np.array([entry["logprob"] for entry in by_id(tmp_path / name)["score"]["logprobs"]])
        for name in ("out", "dense")
    )
    assert measured(tmp_path / "out")["score"] == pytest.approx(np.abs(one - other).mean(), rel=1e-4)


def test_too_large_a_gap_is_exit_code_7(
    tmp_path: Path, manifest: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    settings: dict[str, Any] = {**SPARSE, "verify_sample": 3, "max_gap": 1e-4, "allow_failures": "100%"}
    with pytest.raises(FidelityError, match=r"larger than --max-gap 0\.0001") as caught:
        run(manifest, tiny_model, out, **settings, quiet=False)
    assert caught.value.exit_code is ExitCode.FIDELITY
    assert "more than --max-gap 0.0001" in capsys.readouterr().err
    assert len(results(out)) == 11
    assert (out / "_SUCCESS.json").exists()
    with pytest.raises(FidelityError, match=r"larger than --max-gap 0\.0001"):
        merge_folder(out)
    assert "attention: sparse, 8 rows" in capsys.readouterr().err
    assert run(manifest, tiny_model, out, **{**settings, "max_gap": 9.0}) is ExitCode.OK
    assert len(measured(out)) == 3


def test_a_selection_of_everything_passes_the_strictest_limit(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    settings = {"attention": "a_shape:sinks=0,window=5000", "min_sparse_length": 0, "verify_sample": 3}
    code = run(manifest, tiny_model, tmp_path / "out", **settings, max_gap=1e-5, allow_failures="1")
    assert code is ExitCode.OK
    assert max(measured(tmp_path / "out").values()) < 1e-5


def test_shares_measure_their_own_rows(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    out, settings = tmp_path / "out", {**SPARSE, "verify_sample": 3, "max_gap": 1e-4}
    for i in range(2):
        with pytest.raises(FidelityError):
            run(manifest, tiny_model, out, **settings, shard=f"{i}/2")
    assert len(read_gaps(RunFolder.open(out))) == 3
    with pytest.raises(FidelityError):
        merge_folder(out)
    assert len(measured(out)) == 3


@pytest.mark.parametrize("shard", [None, "0/2", "1/2"])
def test_no_row_to_measure(
    shard: str | None, tmp_path: Path, manifest: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sample is asked for and no row ran sparse: nothing is measured, and nothing is wrong."""
    given: dict[str, Any] = {**SPARSE, "min_sparse_length": 5000, "verify_sample": 2, "max_gap": 0.0}
    code = run(manifest, tiny_model, tmp_path / "out", **given, allow_failures="1", shard=shard, quiet=False)
    assert code is ExitCode.OK
    if shard is None:
        assert "attention: dense (no row ran sparse; from 5,000 tokens " in capsys.readouterr().err


def test_a_grown_run_measures_more(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    out = tmp_path / "out"
    run(manifest, tiny_model, out, **SPARSE, limit=1, verify_sample=2)
    first = measured(out)
    assert set(first) == {"r0"}
    run(manifest, tiny_model, out, **SPARSE, verify_sample=2)
    later = measured(out)
    assert first.items() < later.items()
    assert len(later) == 2
    run(manifest, tiny_model, out, **SPARSE, verify_sample=5)
    assert later.items() < measured(out).items()
    assert len(measured(out)) == 5


def test_the_sample_hangs_on_the_seed(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    chosen = set()
    for seed in range(4):
        run(manifest, tiny_model, tmp_path / f"{seed}", **SPARSE, seed=seed, verify_sample=1)
        chosen |= set(measured(tmp_path / f"{seed}"))
    assert len(chosen) > 1


def crashing_verifier(job: Job, setup: Any) -> Any:
    """Kills its process on every row."""
    import os

    class Crashing:
        num_decoding = 0
        spill = None

        def run(self, waves: Any, should_stop: Any) -> Any:
            for _ in waves:
                os._exit(1)
            yield from ()

    return Crashing()


def test_rows_that_cannot_be_measured_end_as_such(
    tmp_path: Path,
    manifest: Path,
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run ends all the same, and says so; the next one tries again."""
    from longbatch.run.execute import execute

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    settings = settings_of(tiny_model, tmp_path / "out", **SPARSE, verify_sample=1, max_gap=0.0, quiet=False)
    code = execute(settings, [str(manifest)], verifier="test_sparse_run:crashing_verifier")
    assert code is ExitCode.FAILED_ROWS
    assert "gap to dense attention: no row could be measured" in capsys.readouterr().err
    assert run(manifest, tiny_model, tmp_path / "out", **SPARSE, verify_sample=1) is ExitCode.FAILED_ROWS
    assert len(measured(tmp_path / "out")) == 1


def test_killed_while_measuring(tmp_path: Path, tiny_model: Path, uninstalled_environment: dict[str, str]) -> None:
    """SIGKILL when the first gaps are in the journal: they are kept, the rest is measured by the same command."""
    rows = [{"id": f"r{i}", "prompt": words(100 + i, i)} for i in range(24)]
    manifest, out = write_manifest(tmp_path / "manifest.jsonl", rows), tmp_path / "out"
    command = [
        *(sys.executable, "-m", "longbatch", "run", str(manifest), "-o", str(out), "--model", str(tiny_model)),
        *("--gpus", "0", "--threads", "1", "--max-tokens", "40", "--wave-tokens", "128"),
        *("--attention", SINKS, "--min-sparse-length", "0", "--verify-sample", "20"),
    ]
    inner = out / "_work" / "verify"
    with subprocess.Popen(command, env=uninstalled_environment, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not list(inner.glob("_work/*/journal*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        for child in children:
            child.kill()
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not (out / "results").exists()
    status = read_status(out)
    assert (status.rows_done, status.rows_total, status.supervisors[0].snapshot.state) == (24, 24, "verifying")
    parts = {path.name for path in (out / "parts").iterdir()}
    done = subprocess.run(command, env=uninstalled_environment, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.OK, done.stderr
    assert {path.name for path in (out / "parts").iterdir()} == parts, "rows were answered again"
    assert "20 rows that ran sparse" not in done.stderr, "what was measured is measured again"
    assert len(measured(out)) == 20
    stored = [pq.read_table(path, columns=["id"]).column(0).to_pylist() for path in (inner / "parts").iterdir()]
    assert sorted(id for part in stored for id in part) == sorted(measured(out))
    undisturbed = subprocess.run(
        [str(tmp_path / "other") if word == str(out) else word for word in command],
        env=uninstalled_environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert undisturbed.returncode == ExitCode.OK, undisturbed.stderr
    assert measured(tmp_path / "other") == measured(out)


def test_the_exit_code_of_the_command(
    tmp_path: Path, manifest: Path, tiny_model: Path, uninstalled_environment: dict[str, str]
) -> None:
    flags = ["--attention", SINKS, "--min-sparse-length=100", "--verify-sample=1", "--max-gap=0", "--allow-failures=9"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "longbatch", "run", str(manifest), "-o", str(tmp_path / "out"), "--gpus=0", *flags),
            *("--model", str(tiny_model), "--max-tokens=4", "--on-finish=echo $LONGBATCH_EXIT_CODE > code"),
        ],
        env=uninstalled_environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    assert "error: the gap between sparse and dense attention is larger than --max-gap 0" in done.stderr
    assert (tmp_path / "code").read_text() == "7\n"


def test_stopped_while_measuring(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    """A time that is over before the sample is measured: exit 75, and nothing is merged yet."""
    out = tmp_path / "out"
    run(manifest, tiny_model, out, **SPARSE)
    with pytest.raises(InterruptedRun, match="3 rows are left to verify"):
        run(manifest, tiny_model, out, **SPARSE, verify_sample=3, max_time="1s", grace=5.0)
    assert run(manifest, tiny_model, out, **SPARSE, verify_sample=3) is ExitCode.FAILED_ROWS
    assert len(measured(out)) == 3
