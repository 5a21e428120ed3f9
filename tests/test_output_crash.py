"""Killed by SIGKILL at any moment, the next start ends with exactly one right row for each input."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest


def drive(tmp_path: Path, root: Path, environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, str(root / "tests" / "output_crashes.py"), str(tmp_path), *arguments]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert process.returncode == 0, f"{arguments}: {process.stderr}"
    return process.stdout


def test_kills_at_random_times(tmp_path: Path, root: Path, uninstalled_environment: dict[str, str]) -> None:
    seed = random.randrange(1 << 32)
    assert f"seed {seed}: 40 kills" in drive(tmp_path, root, uninstalled_environment, "random", str(seed), "40")


def test_kills_before_every_file_operation(tmp_path: Path, root: Path, uninstalled_environment: dict[str, str]) -> None:
    output = drive(tmp_path, root, uninstalled_environment, "points")
    found = re.fullmatch(r"(\d+) kills at (\d+) operations: .*'journal write'.*'link'.*'rename'.*\n", output)
    assert found is not None
    assert int(found[1]) >= 40


@pytest.mark.slow
def test_many_kills_at_random_times(tmp_path: Path, root: Path, uninstalled_environment: dict[str, str]) -> None:
    assert "1: 1000 kills" in drive(tmp_path, root, uninstalled_environment, "random", "1", "1000")
