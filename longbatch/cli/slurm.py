"""`longbatch slurm`."""

from __future__ import annotations

from typing import Annotated

import typer

from longbatch.cli.options import ALL_SETTINGS, Sources, settings_flags
from longbatch.cli.plan import NOT_PLANNED
from longbatch.config import Resolved
from longbatch.errors import ExitCode

# Slurm's array gives each job its share.
_NOT_PASSED = {"shard"}


@settings_flags(*[name for name in ALL_SETTINGS if name not in _NOT_PASSED])
def slurm(
    sources: Sources,
    resolved: Resolved,
    array: Annotated[int, typer.Option("--array", metavar="N", help="shares of the rows, one job each", min=1)] = 1,
    max_parallel: Annotated[
        int | None, typer.Option("--max-parallel", metavar="N", help="most shares that run at once", min=1)
    ] = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="TIME", help="time limit of a job, as sbatch takes it: 4:00:00")
    ] = None,
    partition: Annotated[str | None, typer.Option("--partition", metavar="NAME", help="Slurm partition")] = None,
    gpus_per_task: Annotated[
        int | None, typer.Option("--gpus-per-task", metavar="N", help="GPUs of each share", min=1)
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", help="one more option of sbatch, --sbatch=--mem=64G; repeatable"),
    ] = None,
) -> ExitCode:
    """Print a script that submits a run to Slurm. Its jobs plan, run in shares, requeue themselves, and merge."""
    from longbatch.run.sbatch import Resources, Submission, sbatch_script

    resources = Resources(
        shares=array,
        most_at_once=max_parallel,
        time=time,
        partition=partition,
        gpus_per_task=gpus_per_task,
        options=sbatch or (),
    )
    print(sbatch_script(Submission.of(sources, resolved, NOT_PLANNED, resources)), end="")
    return ExitCode.OK
