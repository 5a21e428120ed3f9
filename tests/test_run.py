"""Whole runs over a tiny model: every row one result, in order; continued runs repeat nothing."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from run_folders import results, run, settings_of, tiny_model, words, write_manifest

from longbatch.config import resolve
from longbatch.errors import DeviceError, ExitCode, InterruptedRun, RunningError, UsageError
from longbatch.run import make_plan, merge_folder
from longbatch.run.index import RowIndex
from longbatch.run.owner import Owner
from longbatch.run.status import read_status

__all__ = ["tiny_model"]

MIXED = [
    {"id": "long", "prompt": words(300)},
    {"id": "bad", "prompt": words(5), "temperature": -1},
    {"id": "short", "prompt": words(3, 1), "logprobs": True, "top_logprobs": 2},
    {"id": "long", "prompt": words(4, 2)},
    {"prompt": words(7, 3)},
    {"id": "score", "task": "score", "prompt": words(40, 4)},
    {"id": "embed", "task": "embed", "prompt": words(9, 5)},
    {"id": "label", "task": "classify", "prompt": words(70, 6), "labels": ["w5", "w6 w7", "w8"]},
    {"id": "three", "prompt": words(6, 7), "temperature": 1.0, "n": 3},
    {"id": "huge", "prompt": words(2000, 8)},
]


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return write_manifest(tmp_path / "manifest.jsonl", MIXED)


def test_every_row_has_one_result_in_order(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    assert run(manifest, tiny_model, tmp_path / "out") is ExitCode.FAILED_ROWS
    rows = results(tmp_path / "out")
    assert [(row["row"], row["sample"]) for row in rows] == [
        (0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (7, 0), (8, 0), (8, 1), (8, 2), (9, 0),
    ]  # fmt: skip
    errors = {row["row"]: row["error"]["type"] for row in rows if row["status"] == "error"}
    assert errors == {1: "invalid_value", 3: "duplicate_id", 9: "prompt_too_long"}
    by_row = {(row["row"], row["sample"]): row for row in rows}
    assert by_row[0, 0]["finish_reason"] == "length"
    assert by_row[0, 0]["usage"]["prompt_tokens"] == 300
    assert by_row[0, 0]["usage"]["completion_tokens"] == 4
    assert len(by_row[2, 0]["logprobs"]) == 4
    assert all(len(entry["top"]) == 2 for entry in by_row[2, 0]["logprobs"])
    assert len(by_row[5, 0]["logprobs"]) == 39
    assert len(by_row[6, 0]["embedding"]) == 64
    assert by_row[7, 0]["label"] in ("w5", "w6 w7", "w8")
    assert len({by_row[8, sample]["text"] for sample in range(3)}) > 1
    for row in rows:
        if row["status"] == "ok":
            assert row["timing"]["total"] >= row["timing"]["prefill"] > 0
            assert row["timing"]["queued"] >= 0
            assert row["placement"]["device"] == "cpu"
            assert row["attention"]["mode"] == "dense"
    success = json.loads((tmp_path / "out" / "_SUCCESS.json").read_text())
    assert success["num_rows"] == len(rows)


def test_run_again_repeats_nothing(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    out = tmp_path / "out"
    run(manifest, tiny_model, out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    assert run(manifest, tiny_model, out) is ExitCode.FAILED_ROWS
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")} == before


def test_limit_then_all(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    out = tmp_path / "out"
    run(manifest, tiny_model, out, limit=3)
    first = results(out)
    assert len(first) == 3
    run(manifest, tiny_model, out)
    rows = results(out)
    assert len(rows) == 12
    assert [row["run_id"] for row in rows] == [rows[0]["run_id"]] * 12
    assert rows[:3] == first


def test_grown_manifest_runs_its_new_rows(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"id": f"r{i}", "prompt": words(5, i)} for i in range(4)]
    manifest, out = tmp_path / "manifest.jsonl", tmp_path / "out"
    write_manifest(manifest, rows[:2])
    assert run(manifest, tiny_model, out) is ExitCode.OK
    first = results(out)
    write_manifest(manifest, rows)
    assert run(manifest, tiny_model, out) is ExitCode.OK
    assert [row["id"] for row in results(out)] == ["r0", "r1", "r2", "r3"]
    assert results(out)[:2] == first


def test_other_settings_refuse_to_continue(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    run(manifest, tiny_model, tmp_path / "out")
    with pytest.raises(UsageError, match="max_tokens: 4 there, 5 now"):
        run(manifest, tiny_model, tmp_path / "out", max_tokens=5)


def test_only_repeats_one_row(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    out = tmp_path / "out"
    run(manifest, tiny_model, out)
    before = results(out)
    run(manifest, tiny_model, out, only="short")
    after = results(out)
    assert len(after) == 12
    assert (after[2]["attempt"], before[2]["attempt"]) == (2, 1)
    assert after[2]["text"] == before[2]["text"]
    assert [row for i, row in enumerate(after) if i != 2] == [row for i, row in enumerate(before) if i != 2]


@pytest.mark.parametrize("form", ["gz", "parquet", "folder", "text"])
def test_other_sources(tmp_path: Path, tiny_model: Path, form: str) -> None:
    rows = [{"id": f"r{i}", "prompt": words(5 + 20 * i, i)} for i in range(5)]
    plain = write_manifest(tmp_path / "plain.jsonl", rows)
    assert run(plain, tiny_model, tmp_path / "expected") is ExitCode.OK
    source, settings = tmp_path / "source", {}
    if form == "gz":
        source = tmp_path / "rows.jsonl.gz"
        source.write_bytes(gzip.compress(plain.read_bytes()))
    elif form == "parquet":
        import pyarrow as pa

        source = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(rows), source, row_group_size=2)
    else:
        source.mkdir()
        for i, row in enumerate(rows):
            if form == "folder":
                write_manifest(source / f"part{i}.jsonl", [row])
            else:
                (source / f"r{i}.txt").write_text(str(row["prompt"]))
    if form == "text":
        source, settings = source / "*.txt", {"prompt": "{text}"}
    assert run(source, tiny_model, tmp_path / "out", **settings) is ExitCode.OK
    found, expected = results(tmp_path / "out"), results(tmp_path / "expected")
    assert [row["text"] for row in found] == [row["text"] for row in expected]


def test_stored_plan_is_used(tmp_path: Path, manifest: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    values = {"model": str(tiny_model), "out": out, "gpus": "0", "max_tokens": 4}
    view = make_plan(resolve(values, environ={}).settings, [str(manifest)])
    assert view.num_rows == 12
    assert view.refusals.counts == {"invalid_value": 1, "duplicate_id": 1, "prompt_too_long": 1}
    assert view.plan.totals.num_rows == 9

    def refuse(*arguments: object) -> None:
        raise AssertionError("the manifest was counted again")

    monkeypatch.setattr(RowIndex, "build", refuse)
    assert run(manifest, tiny_model, out) is ExitCode.FAILED_ROWS
    assert len(results(out)) == 12


def test_small_waves_and_chunks_change_nothing(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    run(manifest, tiny_model, tmp_path / "one")
    run(manifest, tiny_model, tmp_path / "other", wave_tokens=128, kv_tokens=512, decode_batch=2)
    one, other = results(tmp_path / "one"), results(tmp_path / "other")
    assert [(row["text"], row["label"]) for row in one] == [(row["text"], row["label"]) for row in other]


def test_allowed_failures(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    assert run(manifest, tiny_model, tmp_path / "out", allow_failures="25%") is ExitCode.OK


def test_terminated_run_saves_and_continues(
    tmp_path: Path, tiny_model: Path, uninstalled_environment: dict[str, str]
) -> None:
    """TERM while answers are under way: exit 75; the same command then finishes the rest."""
    rows = [{"id": f"r{i}", "prompt": words(30, i)} for i in range(40)]
    manifest, out = write_manifest(tmp_path / "manifest.jsonl", rows), tmp_path / "out"
    command = [
        *(sys.executable, "-m", "longbatch", "run", str(manifest), "-o", str(out), "--model", str(tiny_model)),
        *("--gpus", "0", "--max-tokens", "200", "--decode-batch", "2", "--wave-tokens", "64", "--threads", "1"),
    ]
    with subprocess.Popen(command, env=uninstalled_environment, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not list((out / "_work").glob("*/journal*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED, log
    assert "run the same command again" in log
    num_saved = sum(pq.read_metadata(path).num_rows for path in (out / "parts").glob("*.parquet"))
    assert 0 < num_saved < 40
    done = subprocess.run(command, env=uninstalled_environment, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.OK, done.stderr
    assert [row["id"] for row in results(out)] == [row["id"] for row in rows]


def test_run_without_out(manifest: Path, tiny_model: Path) -> None:
    with pytest.raises(UsageError, match="folder for its results"):
        run(manifest, tiny_model, None)  # type: ignore[arg-type]


def test_folder_is_private(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    run(manifest, tiny_model, tmp_path / "out")
    assert os.stat(tmp_path / "out").st_mode & 0o777 == 0o700


def test_document_that_comes_later_is_read(tmp_path: Path, tiny_model: Path) -> None:
    """A missing file is an error row; when it is there the next run answers the row, and repeats no other."""
    rows = [{"id": "late", "prompt": words(3), "document_path": "late.txt"}, {"id": "good", "prompt": words(5, 1)}]
    manifest, out = write_manifest(tmp_path / "manifest.jsonl", rows), tmp_path / "out"
    assert run(manifest, tiny_model, out) is ExitCode.FAILED_ROWS
    first = results(out)
    assert first[0]["error"]["type"] == "file_missing"
    (tmp_path / "late.txt").write_text(words(20, 2))
    assert run(manifest, tiny_model, out) is ExitCode.OK
    second = results(out)
    assert [row["status"] for row in second] == ["ok", "ok"]
    assert second[0]["usage"]["prompt_tokens"] > 20
    assert second[1] == first[1]


def test_changed_row_needs_update_once_it_is_answered(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"id": "a", "prompt": words(3)}, {"id": "b", "prompt": words(3), "temperature": -1}]
    manifest, out = write_manifest(tmp_path / "manifest.jsonl", rows), tmp_path / "out"
    run(manifest, tiny_model, out)
    write_manifest(manifest, [rows[0], {"id": "b", "prompt": words(4)}])
    assert run(manifest, tiny_model, out) is ExitCode.OK
    write_manifest(manifest, [{"id": "a", "prompt": words(9)}, {"id": "b", "prompt": words(4)}])
    with pytest.raises(UsageError, match="1 rows changed since they were answered, the first is row 0"):
        run(manifest, tiny_model, out)
    assert run(manifest, tiny_model, out, update=True) is ExitCode.OK
    assert results(out)[0]["usage"]["prompt_tokens"] == 9


def test_error_before_the_work_shows_in_the_status(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    with pytest.raises(DeviceError):
        run(manifest, tiny_model, tmp_path / "out", kv_tokens=1 << 40)
    assert read_status(tmp_path / "out").state == "failed"


def test_row_that_is_too_long_for_the_limit_is_an_error_row(tmp_path: Path, tiny_model: Path) -> None:
    """Read alone, without the limit, it would be another row than the one that was refused."""
    rows = [{"id": "a", "prompt": words(3)}, {"id": "b", "prompt": words(400)}]
    manifest, out = write_manifest(tmp_path / "manifest.jsonl", rows), tmp_path / "out"
    assert run(manifest, tiny_model, out, max_row_bytes=1000) is ExitCode.FAILED_ROWS
    assert [row["error"] and row["error"]["type"] for row in results(out)] == [None, "row_too_large"]
    assert run(manifest, tiny_model, out) is ExitCode.OK
    assert [row["id"] for row in results(out)] == ["a", "b"]


def test_document_edited_after_it_was_counted(tmp_path: Path, tiny_model: Path) -> None:
    manifest = write_manifest(tmp_path / "manifest.jsonl", [{"id": "a", "prompt": "w5", "document_path": "d.txt"}])
    out, document = tmp_path / "out", tmp_path / "d.txt"
    document.write_text(words(10))
    make_plan(settings_of(tiny_model, out), [str(manifest)])
    document.write_text(words(20))
    assert run(manifest, tiny_model, out) is ExitCode.OK
    assert results(out)[0]["usage"]["prompt_tokens"] > 20
    document.write_text(words(30))
    with pytest.raises(UsageError, match="changed since they were answered"):
        run(manifest, tiny_model, out)
    assert run(manifest, tiny_model, out, update=True) is ExitCode.OK
    assert results(out)[0]["usage"]["prompt_tokens"] > 30


def test_media_root_given_later_counts(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "d.txt").write_text(words(10))
    row = {"id": "a", "prompt": "w5", "document_path": str(tmp_path / "d.txt")}
    manifest, out = write_manifest(tmp_path / "in" / "manifest.jsonl", [row]), tmp_path / "out"
    run(manifest, tiny_model, out)
    assert results(out)[0]["error"]["type"] == "file_refused"
    run(manifest, tiny_model, out, media_root=tmp_path)
    assert results(out)[0]["status"] == "ok"


def test_told_to_stop_while_counting(tmp_path: Path, tiny_model: Path) -> None:
    """A time that is over before the rows are counted ends the counting."""
    rows = [{"id": f"r{i}", "prompt": words(5, i)} for i in range(600)]
    manifest, out = write_manifest(tmp_path / "manifest.jsonl", rows), tmp_path / "out"
    with pytest.raises(InterruptedRun, match="stopped before --max-time while the rows were counted"):
        run(manifest, tiny_model, out, max_time="1s")
    assert run(manifest, tiny_model, out, limit=5) is ExitCode.OK


def test_merge_waits_for_the_run(tmp_path: Path, manifest: Path, tiny_model: Path) -> None:
    out = tmp_path / "out"
    run(manifest, tiny_model, out)
    with Owner.acquire(out / "_work", "run"), pytest.raises(RunningError):
        merge_folder(out)
    assert merge_folder(out) is ExitCode.FAILED_ROWS
