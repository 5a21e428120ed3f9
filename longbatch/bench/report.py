"""What every benchmark reports: measurements, and the hardware and versions they were made with."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from longbatch import device
from longbatch.errors import DiskError
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


def write_json(name: str, measurements: Sequence[Measurement], path: Path) -> None:
    """Write the measurements with what they were made on. Raises DiskError."""
    report = {
        "bench": name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "hardware": _hardware(),
        "versions": _versions(),
        "rows": [asdict(row) for row in measurements],
    }
    try:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise DiskError(f"cannot write {path}: {error.strerror}") from error


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


def _hardware() -> dict[str, Any]:
    cpu = device.cpu_info()
    return {
        "cpu": cpu.name,
        "memory_gib": round(cpu.memory_bytes / 2**30, 1),
        "gpus": [f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB" for gpu in device.gpu_infos()],
    }


def _versions() -> dict[str, str]:
    from longbatch import __version__

    found = {"longbatch": __version__}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
