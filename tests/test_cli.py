"""The command line as a process: exit codes, where output goes, errors without tracebacks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from longbatch import errors
from longbatch.cli import app as cli
from longbatch.cli import main
from longbatch.errors import ExitCode, LongbatchError


@pytest.fixture
def environment(uninstalled_environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return {**uninstalled_environment, "LONGBATCH_CACHE_DIR": str(tmp_path / "cache")}


def longbatch(environment: dict[str, str], *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "longbatch", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "manifest.jsonl"
    rows = [{"id": str(row), "prompt": f"Say {row}."} for row in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["run"], "missing argument", "see longbatch run --help"),
        (["frobnicate"], "no such command", "see longbatch --help"),
        (["run", "x", "--frobnicate"], "no such option", "see longbatch run --help"),
        (["run", "x", "--dtype", "bf16"], "flag --dtype", "did you mean bfloat16?"),
        (["run", "x", "--max-tokens", "0"], "max_tokens must be at least 1", ""),
        (["run", "x", "--gpus", "two"], "gpus", "0 is the CPU"),
        (["run", "x", "--config", "none.toml"], "none.toml does not exist", ""),
        (["bench", "frobnicate"], "there is no benchmark 'frobnicate'", "one of: attention"),
        (["models", "check", "no/where"], "no/where", "longbatch models pull"),
        (["convert", "none.gguf", "there"], "none.gguf is not a file", ".gguf"),
        (["verify", "nowhere"], "nowhere", ""),
        (["export", "nowhere"], "nowhere", ""),
        (["merge", "nowhere"], "nowhere", ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_exits_2_and_says_what_helps(
    arguments: list[str], message: str, hint: str, environment: dict[str, str], tmp_path: Path
) -> None:
    done = longbatch(environment, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert hint in (lines[1] if len(lines) > 1 else "")
    assert all(line.startswith("hint: ") for line in lines[1:])


def test_a_bare_command_prints_help_and_exits_2(environment: dict[str, str], tmp_path: Path) -> None:
    for arguments in ([], ["models"]):
        done = longbatch(environment, *arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("Usage: longbatch")


EXCEPTIONS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, LongbatchError) and kind not in (LongbatchError, errors.RowError)
]


@pytest.mark.parametrize("kind", EXCEPTIONS, ids=lambda kind: kind.__name__)
def test_each_error_has_its_exit_code(
    kind: type[LongbatchError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise kind("what is wrong", hint="what mends it")

    monkeypatch.setattr(cli, "app", fail)
    assert main([]) == kind.exit_code != ExitCode.OK
    assert capsys.readouterr().err == "error: what is wrong\nhint: what mends it\n"


def test_exit_codes_are_those_documented() -> None:
    assert {code.name: code.value for code in ExitCode} == {
        "OK": 0,
        "INTERNAL": 1,
        "USAGE": 2,
        "FAILED_ROWS": 3,
        "MANIFEST": 4,
        "DEVICE": 5,
        "DISK": 6,
        "FIDELITY": 7,
        "ABORTED": 8,
        "INTERRUPTED": 75,
        "KILLED": 130,
    }


def test_a_bug_exits_1_and_keeps_its_traceback_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(**_: object) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setenv("LONGBATCH_CACHE_DIR", str(tmp_path))
    assert main([]) == 1
    printed = capsys.readouterr().err
    (log,) = (tmp_path / "logs").iterdir()
    assert printed == f"error: internal error: ZeroDivisionError\nhint: the traceback is in {log}\n"
    assert log.read_text().startswith("Traceback")
    assert log.read_text().endswith("\nZeroDivisionError\n"), "its message might quote a prompt"
    monkeypatch.setenv("LONGBATCH_CACHE_DIR", str(log / "not a folder"))
    assert main([]) == 1
    assert capsys.readouterr().err == "error: internal error: ZeroDivisionError\n"


def test_config_shows_each_value_with_its_origin(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "longbatch.toml").write_text("seed = 5\n")
    environment["LONGBATCH_MAX_TOKENS"] = "7"
    done = longbatch(environment, "config", "--show", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert ["seed", "5", "(longbatch.toml)"] in words
    assert ["max_tokens", "7", "(environment LONGBATCH_MAX_TOKENS)"] in words
    assert ["overlong", "error", "(default)"] in words
    shown = json.loads(longbatch(environment, "config", "--json", cwd=tmp_path).stdout)
    assert shown["seed"] == {"value": 5, "origin": "longbatch.toml"}


def test_validate_needs_no_torch_and_counts(environment: dict[str, str], tmp_path: Path, manifest: Path) -> None:
    blocked = tmp_path / "blocked"
    for name in ("torch", "transformers"):
        (blocked / name).mkdir(parents=True)
        (blocked / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    environment["PYTHONPATH"] = os.pathsep.join([str(blocked), environment["PYTHONPATH"]])
    done = longbatch(environment, "validate", str(manifest), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_ok"] == 3


@pytest.mark.parametrize(("bad", "good", "code"), [(1, 2, 3), (2, 0, 4)])
def test_validate_exits_by_what_can_run(
    bad: int, good: int, code: int, environment: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{not json\n" * bad + '{"prompt": "x"}\n' * good)
    done = longbatch(environment, "validate", str(path), cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert f"invalid_json: {bad}" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_manifest_that_is_not_there_exits_4(environment: dict[str, str], tmp_path: Path) -> None:
    done = longbatch(environment, "validate", "none.jsonl", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith("error: ")


def test_a_gpu_that_is_not_there_exits_5(environment: dict[str, str], tmp_path: Path, manifest: Path) -> None:
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = longbatch(environment, "doctor", "--gpus", "1", cwd=tmp_path)
    assert done.returncode == 5
    assert "0 can be used" in done.stdout


def test_a_reader_that_goes_away_is_no_error(environment: dict[str, str], tmp_path: Path) -> None:
    """`longbatch config | head -0`, with a pipe that is closed before anything is written."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "longbatch", "config", "--show"],
        cwd=tmp_path,
        env=environment,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_is_130_without_a_traceback(environment: dict[str, str], tmp_path: Path) -> None:
    """A validation that is still opening its manifest."""
    program = (
        "import sys, time, longbatch.manifest\n"
        "def wait(*_): print('waiting', flush=True); time.sleep(60)\n"
        "longbatch.manifest.Manifest.open = wait\n"
        "from longbatch.cli import main\n"
        "sys.exit(main(['validate', 'x']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=30)
    assert time.monotonic() - start < 20
    assert process.returncode == 130
    assert "Traceback" not in printed


def test_the_python_functions_are_the_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, manifest: Path) -> None:
    """`longbatch.run` and `plan` resolve settings as the command line does, and pass them on."""
    import longbatch as package

    seen: list[tuple[object, list[str]]] = []
    # The attribute longbatch.run is the function, so the modules are asked for by name.
    for module, name in (("longbatch.run.execute", "execute"), ("longbatch.run", "make_plan")):
        monkeypatch.setattr(import_module(module), name, lambda settings, sources: seen.append((settings, sources)))
    monkeypatch.setenv("LONGBATCH_SEED", "9")
    package.run(manifest, out=tmp_path / "out", max_tokens=5)
    package.plan(["a.jsonl", Path("b.jsonl")], limit=2)
    (run, run_sources), (plan, plan_sources) = seen
    assert (run.out, run.max_tokens, run.seed) == (tmp_path / "out", 5, 9)  # type: ignore[attr-defined]
    assert plan.limit == 2  # type: ignore[attr-defined]
    assert (run_sources, plan_sources) == ([str(manifest)], ["a.jsonl", "b.jsonl"])
    with pytest.raises(errors.UsageError, match="max_token"):
        package.run(manifest, max_token=5)
