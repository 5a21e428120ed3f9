"""The whole of a run: what it is made of (`job`), its rows (`index`), and the run itself on one page (`execute`)."""

from __future__ import annotations

from pathlib import Path

from longbatch.config import Settings
from longbatch.errors import ExitCode
from longbatch.report.plan_view import PlanView

__all__ = ["make_plan", "merge_folder"]


def make_plan(settings: Settings, sources: list[str]) -> PlanView:
    """Read, count and pack the rows without running them; stored in `settings.out` where that is set."""
    from longbatch.run.planning import make_plan as plan

    return plan(settings, sources)


def merge_folder(out: Path, *, partial: bool = False) -> ExitCode:
    """Write OUT/results from what is finished."""
    from longbatch.run.finish import merge_folder as merge

    return merge(out, partial=partial)
