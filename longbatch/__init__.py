"""longbatch: offline batch inference on very long inputs.

    import longbatch

    longbatch.run("manifest.jsonl", out="out", model="path/to/model", max_tokens=256)

Public names are those of `__all__`; everything else is private and may change. Importing the package imports
neither torch nor transformers.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longbatch.errors import (
    AbortError,
    DeviceError,
    DiskError,
    ExitCode,
    FidelityError,
    InterruptedRun,
    LongbatchError,
    ManifestError,
    RowError,
    RunningError,
    UsageError,
)

if TYPE_CHECKING:
    from longbatch.core import Request, Result
    from longbatch.report.plan_view import PlanView

__version__ = "0.1.0"

__all__ = [
    "AbortError",
    "DeviceError",
    "DiskError",
    "ExitCode",
    "FidelityError",
    "InterruptedRun",
    "LongbatchError",
    "ManifestError",
    "Request",
    "Result",
    "RowError",
    "RunningError",
    "UsageError",
    "plan",
    "run",
]


def run(sources: str | Path | Sequence[str | Path], **settings: Any) -> ExitCode:
    """Answer every row of the manifests `sources` into the folder `out`, or continue what is there.

    Keywords are the fields of `longbatch.config.Settings`; what is not given comes from the environment and
    the settings files, as on the command line. Returns ExitCode.OK, or FAILED_ROWS when rows failed. Raises the
    `LongbatchError` whose exit code the command would have; with FidelityError the results are complete.
    """
    from longbatch.config import resolve
    from longbatch.run.execute import execute

    return execute(resolve(settings).settings, _as_list(sources))


def plan(sources: str | Path | Sequence[str | Path], **settings: Any) -> PlanView:
    """Count, sort and price the rows of the manifests `sources` without running them. Keywords as in `run`."""
    from longbatch.config import resolve
    from longbatch.run import make_plan

    return make_plan(resolve(settings).settings, _as_list(sources))


def _as_list(sources: str | Path | Sequence[str | Path]) -> list[str]:
    return [str(sources)] if isinstance(sources, (str, Path)) else [str(source) for source in sources]


def __getattr__(name: str) -> Any:
    if name in {"Request", "Result"}:
        from longbatch import core

        return getattr(core, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(types.ModuleType):
    """Keeps the functions `run` and `plan` in place when the import system binds the subpackages so named."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in {"run", "plan"} and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
