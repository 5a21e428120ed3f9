"""`longbatch stop` and `longbatch retry`, and the command that a run folder remembers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from output_rows import make_failure, make_folder, make_request, make_result
from run_folders import results, run, tiny_model, words, write_manifest

from longbatch.config import Settings, resolve
from longbatch.errors import ExitCode, RunningError, UsageError
from longbatch.output import ResultWriter, scan
from longbatch.run.control import RetryMarks, last_stop, stop_requested
from longbatch.run.owner import Owner
from longbatch.run.requests import mark_failed, retry, stop_run
from longbatch.run.status import Snapshot, StatusFile
from longbatch.run.stored import COMMAND_FILE, read_command, save_command

__all__ = ["tiny_model"]


def settings(**values: Any) -> Settings:
    return resolve(values, environ={}).settings


# ------------------------------------------------------------------------------- what a run folder remembers


def test_settings_that_are_not_defaults_are_kept(tmp_path: Path) -> None:
    given = settings(max_tokens=7, keep_columns=("a", "b"), gpus="0", allow_failures="2%", out=tmp_path, update=True)
    save_command(tmp_path, given, ["rows.jsonl", "s3://bucket/rows.parquet"])
    command = read_command(tmp_path)
    assert command.values == {"max_tokens": 7, "keep_columns": ["a", "b"], "gpus": "0", "allow_failures": "2%"}
    assert command.sources == [str(Path("rows.jsonl").absolute()), "s3://bucket/rows.parquet"]
    again = command.settings(settings(max_tokens=9, gpus="1", seed=5), ["max_tokens"])
    assert (again.max_tokens, again.keep_columns, again.gpus, again.seed) == (9, ("a", "b"), "0", 5)


def test_a_model_here_is_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    save_command(tmp_path, settings(model="model", media_root="model"), ["x"])
    assert read_command(tmp_path).values == {"model": str(tmp_path / "model"), "media_root": str(tmp_path / "model")}
    save_command(tmp_path, settings(model="org/model"), ["x"])
    assert read_command(tmp_path).values == {"model": "org/model"}


@pytest.mark.parametrize(
    "url", ["https://host/rows.jsonl?token=x", "https://me:x@host/rows.jsonl", "http://host/rows.jsonl#x"]
)
def test_a_url_that_may_hold_a_secret_is_not_kept(tmp_path: Path, url: str) -> None:
    save_command(tmp_path, settings(), ["rows.jsonl", url])
    assert read_command(tmp_path).sources is None
    assert "host" not in (tmp_path / COMMAND_FILE).read_text()


def test_texts_are_not_kept_and_asked_for_again(tmp_path: Path) -> None:
    save_command(tmp_path, settings(prompt="Say {text}", system="Be kind", on_finish="curl token"), ["x"])
    content = (tmp_path / COMMAND_FILE).read_text()
    assert not any(text in content for text in ("Say", "kind", "curl"))
    command = read_command(tmp_path)
    with pytest.raises(UsageError, match="--prompt and --system, which is not stored") as caught:
        command.settings(settings(), [])
    assert caught.value.hint == "give it again, as it was"
    with pytest.raises(UsageError, match="started with --system, which"):
        command.settings(settings(prompt="Say {text}"), ["prompt"])
    again = command.settings(settings(prompt="Say {text}", system="Be kind"), ["prompt"])
    assert (again.prompt, again.system) == ("Say {text}", "Be kind")


def test_a_start_for_one_row_is_not_the_run(tmp_path: Path) -> None:
    save_command(tmp_path, settings(max_tokens=7), ["x"])
    save_command(tmp_path, settings(max_tokens=7, only="a"), ["y"])
    assert read_command(tmp_path).sources == [str(Path("x").absolute())]


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{}", b'{"settings": 1, "sources": [], "withheld": []}'])
def test_nothing_is_known_from_a_damaged_file(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / COMMAND_FILE).write_bytes(content)
    command = read_command(tmp_path)
    assert (command.values, command.sources, command.withheld) == ({}, None, [])


# ----------------------------------------------------------------------------------------------------- stop


def test_stop_where_nothing_runs(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    said: list[str] = []
    StatusFile(folder.work, "run").write(Snapshot("running", 1.0))  # of a process that is gone
    assert stop_run(folder.path, said.append, wait=True) is ExitCode.OK
    assert said == [f"nothing is running in {folder.path}"]
    assert last_stop(folder.work) == ""
    with pytest.raises(UsageError):
        stop_run(tmp_path, said.append)


def test_stop_waits_for_all(tmp_path: Path) -> None:
    """Two shards: one ends by itself, the other says first that it saves."""
    folder = make_folder(tmp_path)
    owners = {name: Owner.acquire(folder.work, name) for name in ("s0", "s1")}
    files = {name: StatusFile(folder.work, name) for name in owners}
    for file in files.values():
        file.write(Snapshot("running", 1.0))
    said: list[str] = []

    def supervise() -> None:
        while not stop_requested(folder.work):
            time.sleep(0.02)
        owners["s0"].release()
        files["s1"].write(Snapshot("stopping", 1.0))
        time.sleep(2.5)
        files["s1"].write(Snapshot("interrupted", 1.0))
        owners["s1"].release()

    thread = threading.Thread(target=supervise)
    thread.start()
    begin = time.monotonic()
    assert stop_run(folder.path, said.append, wait=True) is ExitCode.OK
    assert 2.5 <= time.monotonic() - begin < 20
    thread.join()
    assert [line.split(" (")[0] for line in said] == ["s0", "s1", "s0", "s1", "s1"]
    assert [line.split(") ")[1].split(",")[0] for line in said] == [
        "was asked to stop", "was asked to stop", "has ended: failed", "is stopping", "has ended: interrupted",
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------- retry


def test_failed_rows_are_marked_by_type(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    requests = [make_request(row) for row in range(5)]
    outcomes = [
        make_result(requests[0]),
        make_failure(requests[1], "prompt_too_long", attempt=3),
        make_failure(requests[2], "crashed_engine"),
        make_failure(requests[3], "io_error"),
        make_result(requests[3], attempt=2),
        make_failure(requests[4], "crashed_engine", attempt=2),
    ]
    with ResultWriter(folder, "w0", reserve_bytes=0) as writer:
        writer.append(*outcomes)
    done = scan(folder)

    def marked() -> list[int]:
        return sorted(done.rows[RetryMarks.load(folder.work).wanted(done.answers, done.attempts)].tolist())

    assert mark_failed(folder, ["io_error"]) == {}
    assert marked() == []
    assert mark_failed(folder, ["crashed_engine", "io_error"]) == {"crashed_engine": 2}
    assert marked() == [2, 4]
    assert mark_failed(folder) == {"prompt_too_long": 1, "crashed_engine": 2}
    assert marked() == [1, 2, 4]


def retry_rows(out: Path, *types: str, sources: tuple[Path, ...] = (), **flags: Any) -> tuple[ExitCode, list[str]]:
    said: list[str] = []
    code = retry(out, list(types), [str(source) for source in sources], resolve(flags, environ={}), said.append)
    return code, said


@pytest.fixture(scope="module")
def broken_run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Path, Path]:
    """A run in which a row is too long for the model, one is invalid, and one has a document that is missing."""
    folder = tmp_path_factory.mktemp("broken")
    rows = [
        {"id": "good", "prompt": words(5)},
        {"id": "long", "prompt": words(2000)},
        {"id": "bad", "prompt": words(5), "temperature": -1},
        {"id": "late", "prompt": words(5), "document": {"path": "late.txt"}},
    ]
    out = folder / "out"
    run(write_manifest(folder / "manifest.jsonl", rows), tiny_model, out)
    assert [row["status"] for row in results(out)] == ["ok", "error", "error", "error"]
    return folder, out


def test_retry_runs_the_chosen_rows_again(broken_run: tuple[Path, Path]) -> None:
    folder, out = broken_run
    before = results(out)
    assert retry_rows(out, "nonfinite_logits") == (
        ExitCode.OK,
        ["no row failed with nonfinite_logits; nothing to retry"],
    )
    code, said = retry_rows(out, "prompt_too_long")
    assert (code, said) == (ExitCode.FAILED_ROWS, ["running again: 1 prompt_too_long"])
    after = results(out)
    assert [row["attempt"] - old["attempt"] for row, old in zip(after, before, strict=True)][:3] == [0, 1, 0]
    assert after[0] == before[0]
    # Settled by the new answer, so that a run without a wish repeats it no more.
    run(folder / "manifest.jsonl", Path(read_command(folder / "out" / "_work").values["model"]), out)
    assert results(out)[1]["attempt"] == after[1]["attempt"]
    code, said = retry_rows(out)
    assert (code, said) == (
        ExitCode.FAILED_ROWS,
        ["running again: 1 prompt_too_long, 1 invalid_value, 1 file_missing"],
    )
    assert [row["attempt"] - old["attempt"] for row, old in zip(results(out), after, strict=True)][:3] == [0, 1, 1]


def test_retry_with_what_is_not_stored(broken_run: tuple[Path, Path]) -> None:
    folder, out = broken_run
    path = out / "_work" / COMMAND_FILE
    content = json.loads(path.read_text())
    try:
        path.write_text(json.dumps({**content, "sources": None}))
        with pytest.raises(UsageError, match="does not say where its rows came from") as caught:
            retry_rows(out)
        assert f"longbatch retry {out} SOURCE" in str(caught.value.hint)
        assert retry_rows(out, "invalid_value", sources=(folder / "manifest.jsonl",))[0] is ExitCode.FAILED_ROWS
        path.write_text(json.dumps({**content, "withheld": ["system"]}))
        with pytest.raises(UsageError, match="--system, which is not stored"):
            retry_rows(out)
        with pytest.raises(UsageError, match="system"):
            retry_rows(out, system="another")
    finally:
        path.write_text(json.dumps(content))


def test_retry_refuses_wrong_types_and_a_run_under_way(broken_run: tuple[Path, Path], tmp_path: Path) -> None:
    _, out = broken_run
    with pytest.raises(UsageError, match="no error type 'io_eror'") as caught:
        retry_rows(out, "io_eror")
    assert caught.value.hint == "did you mean io_error?"
    with Owner.acquire(out / "_work", "run"), pytest.raises(RunningError, match="works on") as running:
        retry_rows(out)
    assert "longbatch stop" in str(running.value.hint)
    with pytest.raises(UsageError, match=r"no run\.json"):
        retry_rows(tmp_path)


# ------------------------------------------------------------------------------------------- as commands


def test_the_commands(broken_run: tuple[Path, Path], uninstalled_environment: dict[str, str], tmp_path: Path) -> None:
    _, out = broken_run

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "longbatch", *arguments],
            cwd=tmp_path,
            env=uninstalled_environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    status = json.loads(call("status", str(out), "--json").stdout)
    assert (status["state"], status["rows_total"], status["complete"]) == ("finished", 4, True)
    assert f"{out}, finished" in call("status", str(out)).stdout
    assert "finished" in call("status", str(out), "--watch").stdout
    assert call("stop", str(out), "--wait").stdout == f"nothing is running in {out}\n"
    again = call("retry", str(out), "--type", "invalid_value", "--progress", "none")
    assert again.returncode == ExitCode.FAILED_ROWS, again.stderr
    assert "running again: 1 invalid_value" in again.stderr
    for command in ("status", "stop", "retry"):
        wrong = call(command, "nowhere")
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert "nowhere is not a run folder" in wrong.stderr


def test_stop_ends_a_real_run(tmp_path: Path, tiny_model: Path, uninstalled_environment: dict[str, str]) -> None:
    """From another process; the same command then finishes."""
    rows = [{"id": f"r{i}", "prompt": words(30, i)} for i in range(60)]
    manifest, out = write_manifest(tmp_path / "manifest.jsonl", rows), tmp_path / "out"
    command = [
        *(sys.executable, "-m", "longbatch", "run", str(manifest), "-o", str(out), "--model", str(tiny_model)),
        *("--gpus", "0", "--max-tokens", "200", "--decode-batch", "2", "--wave-tokens", "64", "--threads", "1"),
        *("--grace", "0"),
    ]
    with subprocess.Popen(command, env=uninstalled_environment, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not list((out / "_work").glob("*/journal*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        said: list[str] = []
        assert stop_run(out, said.append, wait=True) is ExitCode.OK
        _, log = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED, log
    assert said[0].endswith("was asked to stop")
    assert said[-1].endswith("has ended: interrupted")
    done = subprocess.run(command, env=uninstalled_environment, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.OK, done.stderr
    assert [row["id"] for row in results(out)] == [row["id"] for row in rows]
