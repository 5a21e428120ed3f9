"""The script that submits a run to Slurm: plan, an array of shares, and a merge that looks for itself what is missing.

What is known of Slurm 22.05 and built on here: only a process that the batch script became by `exec` gets the warning
signal; a log is overwritten by a requeue unless it is appended to; `afterok` behind an interrupted element waits for
ever, `afterany` runs; sites with `RequeueExit=75` requeue even a job that forbids it, without end.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from longbatch.config import Resolved, flag_name
from longbatch.errors import UsageError
from longbatch.run.slurm import RESTART_COUNT

# Slurm sends the warning up to a minute early or late.
SIGNAL_SLACK = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What is asked of Slurm. shares: elements of the array; 1 is a single job, which plans and merges by itself.

    most_at_once: elements that may run at the same time. time, partition: as sbatch takes them. options: more options
    of sbatch, for every job.
    """

    shares: int = 1
    most_at_once: int | None = None
    time: str | None = None
    partition: str | None = None
    gpus_per_task: int | None = None
    options: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A run as its jobs will call it.

    command: the program and its first arguments. sources, out: as on the command line, relative to folder. plan_flags,
    run_flags: flags of `longbatch plan` and `longbatch run`, without -o and --shard. grace: seconds that a run takes to
    save.
    """

    command: Sequence[str]
    folder: Path
    sources: Sequence[str]
    out: str
    plan_flags: Sequence[str]
    run_flags: Sequence[str]
    grace: float
    resources: Resources

    @classmethod
    def of(
        cls, sources: Sequence[str], resolved: Resolved, not_planned: Collection[str], resources: Resources
    ) -> Submission:
        """The run of a command line given here and now. Settings that come from the environment or from a file are
        written out, so that the script holds all of them. not_planned: settings that `longbatch plan` has no flag for.

        Raises UsageError without a run folder.
        """
        settings = resolved.settings
        if settings.out is None:
            raise UsageError("a run needs a folder for its results", hint="give one with -o OUT")
        flags = {
            name: _flag(name, value)
            for name, value in settings.as_dict().items()
            if resolved.origins[name] != "default" and name not in ("out", "shard") and value is not None
        }
        installed = Path(sys.executable).with_name("longbatch")
        return cls(
            command=[str(installed)] if installed.exists() else [sys.executable, "-m", "longbatch"],
            folder=Path.cwd(),
            sources=sources,
            out=str(settings.out),
            plan_flags=[flag for name, flag in flags.items() if name not in not_planned],
            run_flags=list(flags.values()),
            grace=settings.grace,
            resources=resources,
        )


def sbatch_script(submission: Submission) -> str:
    """A bash script that submits the run; running it again continues the run. Every value in it is quoted."""
    out = shlex.quote(submission.out)
    lines = [
        "#!/bin/bash",
        "# Submits the run to Slurm. The same script again, after the jobs have ended, continues what was left.",
        "set -euo pipefail",
        f"cd {shlex.quote(str(submission.folder))}",
        f"(umask 077 && mkdir -p {out} {shlex.quote(_join(submission.out, 'logs'))})",
        f"options=({shlex.join(_common_options(submission))})",
        "",
    ]
    lines += _single_job(submission) if submission.resources.shares == 1 else _jobs(submission)
    return "\n".join([*lines, f'echo "longbatch status {_in_double_quotes(out)} shows how it goes"', ""])


def _single_job(submission: Submission) -> list[str]:
    return [
        "# Plans, runs and merges. A job that ran out of time puts itself back into the queue.",
        *_submit(submission, "run", "slurm-%j.log", _run_options(submission), [_run(submission)]),
        'echo "submitted job $run"',
    ]


def _jobs(submission: Submission) -> list[str]:
    resources = submission.resources
    shares = f"0-{resources.shares - 1}"
    if resources.most_at_once is not None:
        shares += f"%{resources.most_at_once}"
    out = ["-o", submission.out]
    plan = _command(submission, "plan", [*submission.sources], [*out, *submission.plan_flags])
    merge = _command(submission, "merge", [submission.out], [])
    array_options = [*_run_options(submission), f"--array={shares}", "--kill-on-invalid-dep=yes"]
    return [
        "# Counts and sorts the rows once, so that no element of the array reads the whole manifest again. It asks for",
        "# what the elements ask for, because the device decides the number format.",
        *_submit(submission, "plan", "slurm-plan-%j.log", _device_options(submission), [f"exec {plan}"]),
        "",
        "# One share of the rows each. An element that ran out of time puts itself back into the queue.",
        *_submit(submission, "run", "slurm-%A_%a.log", array_options, [_run(submission, "--shard=auto")], after="plan"),
        "",
        "# Runs whatever became of the elements, counts the rows itself, and exits with 75 if some are missing. On a",
        "# site that requeues a job for that, it looks once more and then gives up.",
        *_submit(
            submission,
            "merge",
            "slurm-merge-%j.log",
            [],
            [
                "code=0",
                f"{merge} || code=$?",
                f'if [ "$code" = 75 ] && [ "${{{RESTART_COUNT}:-0}}" -gt 0 ]; then code=1; fi',
                'exit "$code"',
            ],
            after="run",
        ),
        "",
        'echo "submitted plan $plan, shares $run, merge $merge"',
    ]


def _run(submission: Submission, *more: str) -> str:
    flags = ["-o", submission.out, *submission.run_flags, *more]
    return f"exec {_command(submission, 'run', [*submission.sources], flags)}"


def _command(submission: Submission, name: str, arguments: list[str], flags: list[str]) -> str:
    # Only a name that looks like a flag needs the mark that ends the flags.
    mark = ["--"] if any(argument.startswith("-") for argument in arguments) else []
    words = [*flags, *mark, *arguments] if mark else [*arguments, *flags]
    return shlex.join([*submission.command, name, *words])


def _submit(
    submission: Submission, name: str, log: str, options: list[str], body: list[str], after: str | None = None
) -> list[str]:
    """Lines that submit one job and keep its id in the variable `name`."""
    pattern = _join(submission.out, "logs").replace("%", "%%") + f"/{log}"
    words = ["sbatch", "--parsable", f"--job-name=longbatch-{name}", f"--output={pattern}", *options]
    dependency = "" if after is None else f' --dependency={"afterok" if after == "plan" else "afterany"}:"${after}"'
    mark = "JOB"
    while mark in "\n".join(body).split("\n"):
        mark += "_"
    return [
        f"{name}=$({shlex.join(words)} \"${{options[@]}}\"{dependency} <<'{mark}'",
        "#!/bin/bash",
        *body,
        mark,
        ")",
        # With several clusters the answer is ID;CLUSTER.
        f"{name}=${{{name}%%;*}}",
    ]


def _common_options(submission: Submission) -> list[str]:
    resources = submission.resources
    options = ["--ntasks=1", "--requeue", "--open-mode=append"]
    if resources.partition is not None:
        options.append(f"--partition={resources.partition}")
    if resources.time is not None:
        options.append(f"--time={resources.time}")
    return [*options, *resources.options]


def _device_options(submission: Submission) -> list[str]:
    number = submission.resources.gpus_per_task
    return [] if number is None else [f"--gpus-per-task={number}"]


def _run_options(submission: Submission) -> list[str]:
    return [*_device_options(submission), f"--signal=B:TERM@{round(submission.grace) + SIGNAL_SLACK}"]


def _flag(name: str, value: object) -> str:
    flag = flag_name(name)
    if isinstance(value, bool):
        return flag if value else f"--no-{flag[2:]}"
    # With `=` a value may begin with a dash.
    return f"{flag}={','.join(value) if isinstance(value, (list, tuple)) else value}"


def _join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


def _in_double_quotes(quoted: str) -> str:
    """Shell-quoted text as it can stand in an echoed command inside double quotes."""
    for character in '\\"$`':
        quoted = quoted.replace(character, "\\" + character)
    return quoted
