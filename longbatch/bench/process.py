"""Work in processes of its own: the real command, and functions whose memory must not stay behind."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from longbatch.errors import LongbatchError, UsageError

Arguments = ParamSpec("Arguments")
Outcome = TypeVar("Outcome")

_STARTED = time.monotonic()


@dataclass(frozen=True, slots=True)
class CommandRun:
    """One `longbatch run`. summary: what its `--json` says. results: the columns read, in manifest order.
    startup_seconds: from the start of the process until the first wave could begin. total_seconds: until its end."""

    summary: dict[str, Any]
    results: list[dict[str, Any]]
    startup_seconds: float
    total_seconds: float

    @property
    def work(self) -> dict[str, Any]:
        """The summary's figures of this process's own work."""
        work: dict[str, Any] = self.summary["run"]
        return work

    @property
    def tokens(self) -> int:
        """Tokens read and generated."""
        return sum(row["usage"]["prompt_tokens"] + row["usage"]["completion_tokens"] for row in self.results)


def in_child(function: Callable[Arguments, Outcome], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Outcome:
    """The function's answer, from a fresh process that ends with it. Arguments and answer are pickled."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()


def write_manifest(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_command(manifest: Path, out: Path, flags: Sequence[str], columns: Sequence[str]) -> CommandRun:
    """`longbatch run` on the manifest, in a process with no settings but the flags. columns: what is read of its
    results beside `usage`. Raises LongbatchError where it fails."""
    import pyarrow.parquet as pq

    command = [sys.executable, "-m", "longbatch", "run", str(manifest), "-o", str(out), *flags]
    start, started_at = time.monotonic(), time.time()
    done = subprocess.run(
        [*command, "--json", "--progress", "none"],
        env=clean_environment(manifest.parent),
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - start
    if done.returncode:
        raise LongbatchError(f"longbatch run ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    summary = json.loads(done.stdout)
    table = pq.read_table(summary["results"], columns=["usage", *columns])
    return CommandRun(summary, table.to_pylist(), summary["run"]["ready_at"] - started_at, seconds)


def clean_environment(folder: Path) -> dict[str, str]:
    """The environment without any setting of the user's; an empty settings file is put into the folder."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("LONGBATCH_") or name == "LONGBATCH_CACHE_DIR"
    }
    empty = folder / "no-settings.toml"
    empty.touch()
    return {**kept, "LONGBATCH_CONFIG": str(empty), "XDG_CONFIG_HOME": str(folder)}


def peak_bytes() -> int:
    """The most memory that this process has had resident. Not from getrusage on Linux: that counts the parent's too,
    as it was when it started this one."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def require_transformers() -> None:
    """Raise UsageError where the rival and reference is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("this compares with transformers, which is not installed", hint="pip install 'longbatch[hub]'")


def say(text: str) -> None:
    """One line about what is being measured, away from the table, behind the seconds since this module was loaded."""
    print(f"[{time.monotonic() - _STARTED:5.0f} s] {text}", file=sys.stderr, flush=True)
