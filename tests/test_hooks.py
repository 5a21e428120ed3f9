"""The command at the end of a run, by a real shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longbatch.config import resolve
from longbatch.run.hooks import on_finish

SUMMARY = {"rows": 3, "failed": 1, "text": 'it\'s "quoted" $HOME'}


def test_the_command_is_told_how_it_ended(tmp_path: Path) -> None:
    command = f'cd {tmp_path} && printf %s "$LONGBATCH_SUMMARY" > summary && echo $LONGBATCH_EXIT_CODE > code && pwd'
    command += " > where && echo $LONGBATCH_OUT > out"
    assert on_finish(command, 75, Path("some/run"), SUMMARY) is None
    assert json.loads((tmp_path / "summary").read_text()) == SUMMARY
    assert (tmp_path / "code").read_text() == "75\n"
    assert (tmp_path / "out").read_text() == f"{Path('some/run').absolute()}\n"


def test_a_failing_command_is_a_warning_without_its_text(tmp_path: Path) -> None:
    assert on_finish("exit 9 # secret", 0, tmp_path, {}) == "the --on-finish command ended with 9"
    assert on_finish("/no/such/secret 2>/dev/null", 0, tmp_path, {}) == "the --on-finish command ended with 127"
    assert on_finish("kill -9 $$", 0, tmp_path, {}) == "the --on-finish command ended with -9"


@pytest.mark.parametrize("command", ["sec\0ret", "x" * (4 << 20)], ids=["null", "too long"])
def test_a_command_that_cannot_start(tmp_path: Path, command: str) -> None:
    warning = on_finish(command, 0, tmp_path, {})
    assert warning is not None
    assert "could not be started" in warning
    assert len(warning) < 100


def test_a_command_that_takes_too_long_ends_with_its_children(tmp_path: Path) -> None:
    begin = time.monotonic()
    command = f"sleep 600 & echo $! > {tmp_path}/pid; wait"
    warning = on_finish(command, 0, tmp_path, {}, seconds=0.5)
    assert time.monotonic() - begin < 20
    assert warning == "the --on-finish command took more than 0.5 seconds and was ended"
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _runs(pid):
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_standard_output_stays_clean(tmp_path: Path, uninstalled_environment: dict[str, str]) -> None:
    """And the command cannot read what is meant for the run."""
    program = (
        "from pathlib import Path; from longbatch.run.hooks import on_finish\n"
        "print(on_finish('cat; echo told', 0, Path('.'), {}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=uninstalled_environment,
        input="typed",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("None\n", "told\n")


def test_longbatch_can_be_called_by_the_command(tmp_path: Path, uninstalled_environment: dict[str, str]) -> None:
    """The variables of the command are no unknown settings."""
    for name in ("OUT", "EXIT_CODE", "SUMMARY"):
        uninstalled_environment[f"LONGBATCH_{name}"] = "3"
    assert resolve({}, environ=uninstalled_environment).settings.out == Path("3")
    command = f"cd {tmp_path} && PYTHONPATH={os.getcwd()} {sys.executable} -m longbatch config --show > shown"
    assert on_finish(command, 3, tmp_path, {"rows": 1}) is None
    assert str(tmp_path) in (tmp_path / "shown").read_text()
