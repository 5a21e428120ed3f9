"""The gap between sparse and dense attention in whole runs: drawn, measured, judged, and continued after kills."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_folders import results, run, settings_of, tiny_model, words, write_manifest
from sparse_runs import SINKS, SPARSE, by_id, manifest, measured

from longbatch.errors import ExitCode, FidelityError, InterruptedRun
from longbatch.output import RunFolder, read_gaps
from longbatch.run import merge_folder
from longbatch.run.job import Job
from longbatch.run.sample import read_sample
from longbatch.run.status import read_status

__all__ = ["manifest", "tiny_model"]


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
        assert "attention: dense (no row ran sparse, prompts of 5,000 tokens and more do; " in capsys.readouterr().err


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
    with pytest.raises(FidelityError, match="none could be measured, so that nothing says whether --max-gap 0 is kept"):
        execute(settings, [str(manifest)], verifier="test_sparse_gap:crashing_verifier")
    told = "gap to dense attention: measured 0 of 1, 1 could not be measured: 1 crashed_engine"
    assert told in capsys.readouterr().err
    assert len(results(tmp_path / "out")) == 11
    with pytest.raises(FidelityError, match="none could be measured"):
        merge_folder(tmp_path / "out")
    assert told in capsys.readouterr().err
    assert run(manifest, tiny_model, tmp_path / "without", **SPARSE, allow_failures="1") is ExitCode.OK
    assert run(manifest, tiny_model, tmp_path / "out", **SPARSE, verify_sample=1) is ExitCode.FAILED_ROWS
    assert len(measured(tmp_path / "out")) == 1


def test_a_stop_before_the_sample_is_drawn_is_not_forgotten(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    """One of two shares is finished and measured; the other has answered its rows and drawn nothing."""
    out, settings = tmp_path / "out", {**SPARSE, "verify_sample": 4, "max_gap": 9.0}
    for i in range(2):
        run(manifest, tiny_model, out, **settings, shard=f"{i}/2", allow_failures="1")
    assert merge_folder(out) is ExitCode.FAILED_ROWS
    (out / "_work" / "verify" / "_work" / "sample-1-of-2.json").unlink()
    with pytest.raises(InterruptedRun, match="2 rows that ran sparse were not measured"):
        merge_folder(out)
    shutil.rmtree(out / "_work" / "verify")
    with pytest.raises(InterruptedRun, match="4 rows that ran sparse were not measured"):
        merge_folder(out)


def test_a_damaged_gap_is_measured_again(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    """One gap is no number, as after a damage; the row counts as not measured."""
    out = tmp_path / "out"
    run(manifest, tiny_model, out, **SPARSE, verify_sample=3)
    before = measured(out)
    inner = out / "_work" / "verify"
    (part,) = (inner / "parts").iterdir()
    table = pq.read_table(part)
    rows = table.to_pylist()
    rows[0]["attention"]["gap"] = float("nan")
    part.unlink()
    pq.write_table(pa.Table.from_pylist(rows, table.schema), part, write_page_checksum=True)
    for ledger in inner.rglob("published.jsonl"):
        ledger.unlink()
    assert len(read_gaps(RunFolder.open(out))) == 2
    sample = read_sample(RunFolder.open(out), 3, 8)
    assert (sample.num_wanted, sample.num_measured, sample.num_left) == (3, 2, 1)
    run(manifest, tiny_model, out, **SPARSE, verify_sample=3)
    assert measured(out) == before


def test_rows_without_anything_to_compare_are_told_of(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"id": f"e{i}", "task": "embed", "prompt": words(200, i)} for i in range(3)]
    manifest = write_manifest(tmp_path / "manifest.jsonl", rows)
    settings: dict[str, Any] = {**SPARSE, "verify_sample": 2, "quiet": False}
    assert run(manifest, tiny_model, tmp_path / "out", **settings) is ExitCode.OK
    assert "measured 0 of 2, 2 could not be measured: 2 nothing to compare" in capsys.readouterr().err
    with pytest.raises(FidelityError, match="none could be measured"):
        run(manifest, tiny_model, tmp_path / "out", **settings, max_gap=0.5)


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


def test_stopped_while_measuring(
    tmp_path: Path, manifest: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A time that is over before the sample is measured: exit 75, and nothing is merged yet."""
    out = tmp_path / "out"
    run(manifest, tiny_model, out, **SPARSE)
    with pytest.raises(InterruptedRun, match="3 rows are left to verify"):
        run(manifest, tiny_model, out, **SPARSE, verify_sample=3, max_time="1s", grace=5.0)
    # Nothing asks for a bound: the merge says what is missing.
    assert merge_folder(out) is ExitCode.FAILED_ROWS
    assert "gap to dense attention: measured 0 of 3, 3 not measured yet" in capsys.readouterr().err
    bounded: dict[str, Any] = {**SPARSE, "verify_sample": 3, "max_gap": 9.0}
    with pytest.raises(InterruptedRun, match="3 rows are left to verify"):
        run(manifest, tiny_model, out, **bounded, max_time="1s", grace=5.0)
    with pytest.raises(InterruptedRun, match="3 rows that ran sparse were not measured") as caught:
        merge_folder(out)
    assert caught.value.exit_code is ExitCode.INTERRUPTED
    assert len(results(out)) == 11
    assert run(manifest, tiny_model, out, **SPARSE, verify_sample=3) is ExitCode.FAILED_ROWS
    assert len(measured(out)) == 3
