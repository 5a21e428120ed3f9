"""`longbatch plan`."""

from __future__ import annotations

from longbatch.cli.options import ALL_SETTINGS, Sources, print_json, settings_flags
from longbatch.config import Settings
from longbatch.errors import ExitCode

# What neither a plan nor the identity of the run folder that it may start depends on.
NOT_PLANNED = {
    "abort_on_failures",
    "allow_failures",
    "grace",
    "max_gap",
    "max_gpu_hours",
    "max_time",
    "on_finish",
    "progress",
    "quiet",
    "row_timeout",
    "skip_if_running",
    "spill",
    "verify_sample",
}


@settings_flags(*[name for name in ALL_SETTINGS if name not in NOT_PLANNED])
def plan(sources: Sources, settings: Settings) -> ExitCode:
    """Count, sort and price the rows without running them. With -o the plan is stored and `run` reuses it."""
    return show_plan(sources, settings)


def show_plan(sources: list[str], settings: Settings) -> ExitCode:
    """Make the plan and print it. Rows that cannot run are shown and do not change the exit code."""
    from longbatch.report.plan_view import print_plan
    from longbatch.run import make_plan

    view = make_plan(settings, sources)
    if settings.json:
        print_json(view.as_dict())
    else:
        print_plan(view)
    return ExitCode.OK
