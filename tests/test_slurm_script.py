"""The script that `longbatch slurm` prints. Bash runs it and the jobs in it; an sbatch of the test's keeps what it is
given. The real Slurm has its turn in test_slurm_run.py."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longbatch.cli import main
from longbatch.cli.plan import NOT_PLANNED
from longbatch.config import Resolved, Settings
from longbatch.run.sbatch import Resources, Submission, sbatch_script

# Answers with a job id, and keeps its arguments and the job's script.
SBATCH = """#!{python}
import json, pathlib, sys
folder = pathlib.Path({folder!r})
number = len(list(folder.glob("job-*.json"))) + 1
content = {{"arguments": sys.argv[1:], "script": sys.stdin.read()}}
(folder / f"job-{{number}}.json").write_text(json.dumps(content))
print(f"{{number}};cluster")
"""
SHOW = "import json, sys; print(json.dumps(sys.argv[1:]))"
ODD = [
    "two words",
    'it\'s "quoted"',
    "$HOME `id` $(touch broken)",
    "back\\slash\\",
    "first\nJOB\nJOB_\nlast",
    "tab\tand ünïcode 文",
    "*",
    "",
    "-n",
    "100%j",
    "!history; exit 9 # & |",
]


def submission(folder: Path, **changes: Any) -> Submission:
    values: dict[str, Any] = {
        "command": [sys.executable, "-c", SHOW],
        "folder": folder,
        "sources": ["m.jsonl"],
        "out": "out",
        "plan_flags": ["--max-tokens=9"],
        "run_flags": ["--max-tokens=9", "--quiet"],
        "grace": 20.0,
        "resources": Resources(shares=4),
    }
    return Submission(**{**values, **changes})


def submit(script: str, folder: Path) -> list[dict[str, Any]]:
    """Run the script; what sbatch was given, in order."""
    tools = folder / "tools"
    tools.mkdir()
    (tools / "sbatch").write_text(SBATCH.format(python=sys.executable, folder=str(tools)))
    (tools / "sbatch").chmod(0o755)
    done = subprocess.run(
        ["bash"], input=script, env={"PATH": f"{tools}:/usr/bin:/bin"}, cwd="/", capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(path.read_text()) for path in sorted(tools.glob("job-*.json"))]


def called(job: dict[str, Any], folder: Path) -> list[str]:
    """The arguments with which a job calls longbatch."""
    done = subprocess.run(["bash"], input=job["script"], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    arguments: list[str] = json.loads(done.stdout)
    return arguments


def test_three_jobs_that_wait_for_each_other(tmp_path: Path) -> None:
    resources = Resources(
        shares=4,
        most_at_once=2,
        time="4:00:00",
        partition="long",
        gpus_per_task=2,
        options=["--mem=9G", "--account=a b"],
    )
    plan, run, merge = submit(sbatch_script(submission(tmp_path, resources=resources, grace=45)), tmp_path)
    shared = {"--parsable", "--ntasks=1", "--requeue", "--open-mode=append", "--partition=long", "--time=4:00:00"}
    for job in (plan, run, merge):
        assert set(job["arguments"]) >= shared | {"--mem=9G", "--account=a b"}
        assert job["script"].startswith("#!/bin/bash\n")
    assert "--gpus-per-task=2" in plan["arguments"]
    assert not any(word.startswith("--dependency") for word in plan["arguments"])
    assert set(run["arguments"]) >= {
        "--gpus-per-task=2",
        "--array=0-3%2",
        "--signal=B:TERM@145",
        "--dependency=afterok:1",
        "--kill-on-invalid-dep=yes",
        "--output=out/logs/slurm-%A_%a.log",
    }
    assert "--dependency=afterany:2" in merge["arguments"]
    assert not any(word.startswith("--gpus") for word in merge["arguments"])
    assert called(plan, tmp_path) == ["plan", "m.jsonl", "-o", "out", "--max-tokens=9"]
    assert called(run, tmp_path) == ["run", "m.jsonl", "-o", "out", "--max-tokens=9", "--quiet", "--shard=auto"]
    assert called(merge, tmp_path) == ["merge", "out"]
    assert "\nexec " in run["script"]
    assert "\nexec " in plan["script"]
    assert (tmp_path / "out" / "logs").is_dir()
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700


def test_one_job(tmp_path: Path) -> None:
    (job,) = submit(sbatch_script(submission(tmp_path, resources=Resources())), tmp_path)
    assert called(job, tmp_path) == ["run", "m.jsonl", "-o", "out", "--max-tokens=9", "--quiet"]
    assert "--signal=B:TERM@120" in job["arguments"]
    assert not any(word.startswith(("--array", "--dependency")) for word in job["arguments"])


@pytest.mark.parametrize("value", ODD)
def test_odd_values_arrive(tmp_path: Path, value: str) -> None:
    flags = [f"--prompt={value}"]
    odd = submission(tmp_path, sources=["m.jsonl", value], plan_flags=flags, run_flags=flags)
    plan, run, _ = submit(sbatch_script(odd), tmp_path)
    names = ["m.jsonl", value] if not value.startswith("-") else []
    tail = [] if names else ["--", "m.jsonl", value]
    assert called(plan, tmp_path) == ["plan", *names, "-o", "out", *flags, *tail]
    assert called(run, tmp_path) == ["run", *names, "-o", "out", *flags, "--shard=auto", *tail]
    assert not list(tmp_path.rglob("broken"))


@pytest.mark.parametrize("value", [value for value in ODD if value and not value.startswith("-")])
def test_odd_folders(tmp_path: Path, value: str) -> None:
    folder = tmp_path / value.replace("/", "-")
    folder.mkdir()
    plan, run, merge = submit(sbatch_script(submission(folder, out=f"{value}/out/")), tmp_path)
    assert (folder / value / "out" / "logs").is_dir()
    escaped = value.replace("%", "%%")
    assert f"--output={escaped}/out/logs/slurm-%A_%a.log" in run["arguments"]
    assert called(plan, tmp_path)[2:4] == ["-o", f"{value}/out/"]
    assert called(merge, tmp_path) == ["merge", f"{value}/out/"]
    assert not list(tmp_path.rglob("broken"))


@pytest.mark.parametrize(
    ("code", "restarts", "outcome"), [(0, "", 0), (3, "", 3), (75, "", 75), (75, "0", 75), (75, "1", 1), (3, "1", 3)]
)
def test_the_merge_job_is_not_requeued_for_ever(tmp_path: Path, code: int, restarts: str, outcome: int) -> None:
    failing = submission(tmp_path, command=[sys.executable, "-c", f"raise SystemExit({code})"])
    *_, merge = submit(sbatch_script(failing), tmp_path)
    done = subprocess.run(["bash"], input=merge["script"], env={"SLURM_RESTART_COUNT": restarts}, text=True)
    assert done.returncode == outcome


def test_the_command_prints_what_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags, environment and files alike, so that the script does not depend on them; defaults are left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONGBATCH_MAX_TOKENS", "77")
    (tmp_path / "longbatch.toml").write_text('system = "Be brief"\nkeep_columns = ["a", "b"]\nquiet = true\n')
    flags = ["--array=2", "--allow-failures=2%", "--no-quiet", "--seed=0", "--sbatch=--mem=1G", "--time=60"]
    assert main(["slurm", "m.jsonl", "-o", "out", *flags]) == 0
    script = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    plan, run, _ = submit(script, tmp_path)
    for flag in ("--max-tokens=77", "--seed=0", "'--system=Be brief'", "--keep-columns=a,b"):
        assert flag in plan["script"]
        assert flag in run["script"]
    assert "--allow-failures=2%" in run["script"]
    assert "--allow-failures" not in plan["script"]
    assert "--no-quiet" in run["script"]
    for name in ("--dtype", "--grace", "--config", "--out"):
        assert name not in run["script"]
    assert "--mem=1G" in run["arguments"]


def test_the_flags_are_those_of_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting that can be given is one that `run` has, and `plan` where the script says so."""
    monkeypatch.chdir(tmp_path)
    settings = Settings(out=Path("out"))
    values = {"model": "x", "threads": 1, "prompt": "p", "system": "s", "keep_columns": ("a",), "limit": 1, "only": "r"}
    values |= {"media_root": Path("m"), "wave_tokens": 64, "kv_tokens": 64, "decode_batch": 1, "max_time": "1h"}
    values |= {"adapter": Path("a"), "profile": Path("p"), "min_sparse_length": 0, "verify_sample": 1, "max_gap": 0.5}
    values |= {"max_gpu_hours": 1.0, "row_timeout": 9.0, "price_per_gpu_hour": 2.0, "on_finish": "true"}
    settings = dataclasses.replace(settings, **values, spill=Path("s"))
    unset = [name for name, value in settings.as_dict().items() if value is None]
    assert unset == ["shard"]
    resolved = Resolved(settings, dict.fromkeys(settings.as_dict(), "flag"))
    made = Submission.of(["m.jsonl"], resolved, NOT_PLANNED, Resources(shares=2))
    for command, flags in (("run", made.run_flags), ("plan", made.plan_flags)):
        done = subprocess.run(
            [sys.executable, "-m", "longbatch", command, "missing.jsonl", "-o", "out", *flags],
            env={"PYTHONPATH": str(Path(__file__).resolve().parent.parent), "LONGBATCH_CACHE_DIR": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        assert "no such option" not in done.stderr.lower()
        assert "model" in done.stderr  # got as far as looking for the model


def test_no_folder_for_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "m.jsonl"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "give one with -o OUT" in printed.err
