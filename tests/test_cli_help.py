"""The command line's surface, frozen: `python tests/test_cli_help.py` writes the snapshot anew."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from longbatch.cli.app import app
from longbatch.config import Settings, flag_name, help_text

SNAPSHOT = Path(__file__).with_name("cli_help.txt")
HELP_SECONDS = 0.5


def commands(group: Any = None, path: tuple[str, ...] = ("longbatch",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it."""
    group = typer.main.get_command(app) if group is None else group
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


def surface() -> str:
    """Commands, arguments and flags with their help, in an order and form that no terminal or library decides."""
    lines = []
    for path, command in commands():
        lines += ["", " ".join(path), f"  {' '.join((command.help or '').split())}"]
        for parameter in command.params:
            name = ", ".join([*parameter.opts, *parameter.secondary_opts])
            if parameter.param_type_name == "argument":
                name = parameter.metavar or name
            elif parameter.metavar:
                name += f" {parameter.metavar}"
            lines.append(f"    {name}: {getattr(parameter, 'help', '') or ''}")
    return "\n".join(lines[1:]) + "\n"


def test_the_surface_is_the_snapshot() -> None:
    assert surface() == SNAPSHOT.read_text(), "if this change is wanted: python tests/test_cli_help.py"


def test_every_setting_is_a_flag_of_run() -> None:
    flags = {name for path, command in commands() if path[-1] == "run" for item in command.params for name in item.opts}
    assert flags >= {flag_name(item.name) for item in fields(Settings)}
    assert flags >= {"-o", "--config", "--dry-run"}


@pytest.mark.parametrize("words", [path[1:] for path, _ in commands()], ids=" ".join)
def test_every_command_has_help(words: tuple[str, ...], uninstalled_environment: dict[str, str]) -> None:
    for flag in ("--help", "-h"):
        done = subprocess.run(
            [sys.executable, "-m", "longbatch", *words, flag],
            env=uninstalled_environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"Usage: {' '.join(('longbatch', *words))}")


def test_help_names_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    from longbatch.cli import main

    assert main(["run", "--help"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for name in ("max_tokens", "overlong", "gpus"):
        assert f"{flag_name(name)} " in printed
        assert help_text(name) in printed


def test_help_is_fast(uninstalled_environment: dict[str, str]) -> None:
    """Best of several processes, interpreter start included; other work on the machine only slows some of them."""
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "longbatch", "--help"],
            env=uninstalled_environment,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=60,
        )
        best = min(best, time.perf_counter() - start)
        if best < HELP_SECONDS:
            break
    assert best < HELP_SECONDS


if __name__ == "__main__":
    os.chdir(SNAPSHOT.parent.parent)
    SNAPSHOT.write_text(surface())
