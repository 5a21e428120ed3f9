"""What every benchmark reports: measurements, and the hardware and versions they were made with."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from longbatch import device
from longbatch.errors import DiskError
from longbatch.output.files import replace_file
from longbatch.report.console import plain_table, standard_output

VERSIONS = ("torch", "triton", "transformers", "tokenizers", "numpy")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One number. against: the rival or limit measured in the same run; ratio: value over the rival's, None for
    the rival itself. checked: whether the result behind the number was compared with the reference in this run
    and agreed."""

    case: str
    metric: str
    value: float
    unit: str
    against: str | None
    ratio: float | None
    checked: bool


def print_table(measurements: Sequence[Measurement]) -> None:
    """Print the measurements on standard output."""
    table = plain_table("case", "metric", ">value", "unit", "against", ">ratio", "checked")
    for row in measurements:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        checked = "yes" if row.checked else "NO"
        table.add_row(row.case, row.metric, f"{row.value:,.4g}", row.unit, row.against or "", ratio, checked)
    standard_output().print(table)


def recorded(name: str, found: Iterable[Measurement], path: Path | None) -> list[Measurement]:
    """All measurements of a benchmark, printed as a table, whole or not. Each is in the file before the next is made,
    so that whatever ends the process leaves what there is. Raises DiskError."""
    measurements: list[Measurement] = []
    try:
        if path is not None:
            write_json(name, measurements, path, complete=False)
        for row in found:
            measurements.append(row)
            if path is not None:
                write_json(name, measurements, path, complete=False)
        if path is not None:
            write_json(name, measurements, path, complete=True)
    finally:
        if measurements:
            print_table(measurements)
    return measurements


def write_json(name: str, measurements: Sequence[Measurement], path: Path, *, complete: bool) -> None:
    """Write the measurements with what they were made on; an older file is replaced whole. complete: whether the
    benchmark has made all that it makes. Raises DiskError."""
    report = {
        "bench": name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "hardware": _hardware(),
        "versions": _versions(),
        "complete": complete,
        "rows": [asdict(row) for row in measurements],
    }
    text = json.dumps(report, indent=1) + "\n"
    try:
        if path.is_file() or not path.exists():
            replace_file(path, text.encode())
        elif complete:
            # A pipe or a device takes one text.
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DiskError(f"cannot write {path}: {error.strerror}") from error


@cache
def _commit() -> str | None:
    """The commit of the tree that this package is run from, with + when it was changed; None outside a tree."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    return commit and commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


@cache
def _hardware() -> dict[str, Any]:
    cpu = device.cpu_info()
    return {
        "cpu": cpu.name,
        "memory_gib": round(cpu.memory_bytes / 2**30, 1),
        "gpus": [f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB" for gpu in device.gpu_infos()],
    }


@cache
def _versions() -> dict[str, str]:
    from longbatch import __version__

    found = {"longbatch": __version__}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
