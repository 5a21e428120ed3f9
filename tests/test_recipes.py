"""The commands in the recipes, run as they are written: Slurm's by a real Slurm, cron's in cron's environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_folders import results, tiny_model, words, write_manifest
from slurm_cluster import Cluster, slurm, wait_until

__all__ = ["slurm", "tiny_model"]


def blocks(path: Path, language: str = "") -> list[str]:
    """The fenced blocks of a page that are commands."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def install(folder: Path, root: Path) -> Path:
    """A program `longbatch` that runs the tree; the folder that holds it."""
    folder.mkdir()
    program = folder / "longbatch"
    paths = f"{root}:{root / 'kernels'}"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={paths} exec {sys.executable} -m longbatch "$@"\n')
    program.chmod(0o755)
    return folder


def settings(folder: Path, model: Path) -> None:
    (folder / "longbatch.toml").write_text(f'model = "{model}"\ngpus = "0"\nthreads = 1\nmax_tokens = 4\n')


def rows(count: int) -> list[dict[str, str]]:
    return [{"id": str(i), "prompt": words(10, i)} for i in range(count)]


def test_the_slurm_recipe(slurm: Cluster, tiny_model: Path, root: Path) -> None:
    recipe = root / "recipes" / "slurm"
    folder = slurm.folder
    write_manifest(folder / "manifest.jsonl", rows(30))
    settings(folder, tiny_model)
    shutil.copy(recipe / "array.sbatch", folder)
    tools = install(folder / "tools", root)
    environment = slurm.environment | {"PATH": f"{tools}:{slurm.environment['PATH']}"}
    one, many, watch, own = blocks(recipe / "README.md")

    def shell(commands: str) -> str:
        done = subprocess.run(
            ["bash", "-euxc", commands], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def finished() -> bool:
        return not slurm.call("squeue", "--noheader")

    for commands, out in ((one, "out"), (many, "many")):
        assert "submitted" in shell(commands)
        wait_until(finished, "the jobs")
        assert [row["id"] for row in results(folder / out)] == [row["id"] for row in rows(30)]
    assert "nothing is running in many" in shell(watch)
    write_manifest(folder / "manifest.jsonl", rows(50))
    assert "Submitted batch job" in shell(own)
    assert [row["id"] for row in results(folder / "out")] == [row["id"] for row in rows(50)]


@pytest.fixture
def nightly(tmp_path: Path, tiny_model: Path, root: Path) -> list[str]:
    """The command of the crontab, for a folder that holds a manifest of ten rows."""
    folder = tmp_path / "the job"
    folder.mkdir()
    settings(folder, tiny_model)
    write_manifest(folder / "manifest.jsonl", rows(10))
    tools = install(tmp_path / "tools", root)
    return [str(root / "recipes" / "cron" / "nightly.sh"), str(folder), str(tools / "longbatch")]


def start(command: list[str]) -> subprocess.CompletedProcess[str]:
    """As cron starts it, at its barest: nothing in the environment, no terminal, another folder."""
    return subprocess.run(
        ["/bin/sh", *command], env={}, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )


def logs(command: list[str]) -> list[str]:
    return [path.read_text() for path in sorted(Path(command[1], "starts").iterdir(), key=os.path.getmtime)]


def test_a_night_and_the_next(nightly: list[str]) -> None:
    out = Path(nightly[1], "out")
    for count in (10, 25):
        write_manifest(Path(nightly[1], "manifest.jsonl"), rows(count))
        done = start(nightly)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert [row["id"] for row in results(out)] == [str(i) for i in range(count)]
    assert "10 rows: 10 ok" in logs(nightly)[0]
    assert "25 rows: 25 ok" in logs(nightly)[1]
    assert "this run: 15 rows" in logs(nightly)[1]
    assert all("\r" not in text and "\x1b" not in text for text in logs(nightly))


def test_a_start_while_the_last_one_lives_and_one_after_its_death(nightly: list[str]) -> None:
    folder = Path(nightly[1])
    write_manifest(folder / "manifest.jsonl", rows(300))
    with (folder / "longbatch.toml").open("a") as file:
        file.write("decode_batch = 1\n")
    (folder / "longbatch.toml").write_text((folder / "longbatch.toml").read_text().replace("= 4", "= 200"))
    with subprocess.Popen(["/bin/sh", *nightly], env={}, cwd="/", start_new_session=True) as first:
        owner = folder / "out" / "_work" / "owner-run.json"
        try:
            wait_until(owner.exists, "the first start to own the run")
            done = start(nightly)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
            assert "is being worked on by process" in logs(nightly)[-1]
            assert "nothing to do" in logs(nightly)[-1]
            assert first.poll() is None
        finally:
            os.killpg(first.pid, 9)
    assert owner.exists()
    with (folder / "longbatch.toml").open("a") as file:
        file.write('max_time = "1s"\ngrace = 0\n')
    done = start(nightly)
    assert (done.returncode, done.stdout, done.stderr) == (75, "", "")
    assert "being worked on" not in logs(nightly)[-1]
    assert not owner.exists()


def test_a_failure_is_told(nightly: list[str]) -> None:
    Path(nightly[1], "manifest.jsonl").unlink()
    done = start(nightly)
    assert done.returncode != 0
    assert f"longbatch ended with {done.returncode}" in done.stdout
    assert "manifest.jsonl" in done.stdout.splitlines()[-1]


def test_old_logs_go(nightly: list[str]) -> None:
    starts = Path(nightly[1], "starts")
    starts.mkdir()
    for name, days in (("old.log", 32), ("young.log", 29)):
        (starts / name).touch()
        os.utime(starts / name, (time.time() - days * 86400,) * 2)
    start(nightly)
    assert sorted(path.name for path in starts.iterdir())[-1] == "young.log"
    assert not (starts / "old.log").exists()


def test_the_cron_recipe(nightly: list[str], root: Path) -> None:
    recipe = root / "recipes" / "cron"
    folder = Path(nightly[1])
    shutil.copy(recipe / "nightly.sh", folder)
    (commands,) = blocks(recipe / "README.md")
    # The recipe's folder stands for one of this test's own.
    commands = commands.replace("/tmp/nightly", str(folder / "nightly"))
    settings_file = (folder / "longbatch.toml").read_text()
    (folder / "nightly").mkdir()
    (folder / "nightly" / "longbatch.toml").write_text(settings_file)
    done = subprocess.run(
        ["bash", "-euc", commands.replace(str(folder), f"'{folder}'")],
        cwd=folder,
        env={**os.environ, "PATH": f"{Path(nightly[2]).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 rows: 10 ok" in done.stdout


def test_the_crontab_calls_the_recipe(root: Path) -> None:
    """Five fields or @reboot, then a command whose first word is the script's path and which has two arguments."""
    (table,) = blocks(root / "recipes" / "cron" / "README.md", "crontab")
    for line in table.splitlines():
        match = re.fullmatch(
            r"(?:@reboot|(?:\S+ ){4}\S+) +(/\S+)/recipes/cron/nightly.sh (/\S+) (\1/.venv/bin/longbatch)", line
        )
        assert match, line
    script = root / "recipes" / "cron" / "nightly.sh"
    assert os.access(script, os.X_OK)
