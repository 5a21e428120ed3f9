"""Whole runs under a real Slurm, submitted by the printed script: requeued, preempted, told to end, the node lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import results, run, tiny_model, words, write_manifest
from slurm_cluster import Cluster, slurm, wait_until

from longbatch.errors import ExitCode
from longbatch.output import read_success
from longbatch.output.folder import RunFolder
from longbatch.run.owner import find_holders
from longbatch.run.status import read_supervisors

__all__ = ["slurm", "tiny_model"]
NUM_ROWS = 240
NUM_TOKENS = 300
# Few rows at a time and short waves: rows end one after the other, and something is always under way.
SETTINGS = {"max_tokens": NUM_TOKENS, "decode_batch": 4, "max_wave_seconds": 1, "grace": 1, "threads": 1}


def submit(slurm: Cluster, *arguments: str) -> dict[str, str]:
    """Print the script, give it to bash, and return the ids of the jobs by kind."""
    script = slurm.call(sys.executable, "-m", "longbatch", "slurm", *arguments)
    done = subprocess.run(
        ["bash"], input=script, env=slurm.environment, cwd="/", capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    first = done.stdout.splitlines()[0].removeprefix("submitted ")
    return dict(text.split() for text in first.split(", "))


def flags(model: Path) -> list[str]:
    return [
        f"--model={model}",
        "--gpus=0",
        *(f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()),
    ]


def rows_done(out: Path) -> dict[str, int]:
    """Rows that each share's supervisor has counted so far."""
    return {found.name: found.snapshot.rows_done for found in read_supervisors(out / "_work")}


@pytest.mark.timeout(600)
def test_an_array_that_is_disturbed_in_every_way(slurm: Cluster, tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"id": f"row {i}", "prompt": words(20 + i % 60, i)} for i in range(NUM_ROWS)]
    write_manifest(slurm.folder / "it's a manifest.jsonl", rows)
    out = slurm.folder / "its results"
    jobs = submit(slurm, "it's a manifest.jsonl", "-o", "its results", *flags(tiny_model), "--array=4")
    array = jobs["shares"]

    slurm.wait_for(jobs["plan"], "COMPLETED")
    index = (out / "_work" / "index.parquet").stat()
    wait_until(lambda: len(done := rows_done(out)) == 4 and min(done.values()) > 0, "rows from all shares")

    # One gives way to an urgent job, one is requeued by an administrator, one is told to end as at its time limit.
    slurm.call("sbatch", "--partition=urgent", "--ntasks=5", "--output=urgent.log", "--wrap=sleep 1")
    wait_until(lambda: 1 in restarts(slurm, array).values(), "the urgent job to preempt")
    first, second, last = (task for task, count in restarts(slurm, array).items() if count == 0)
    slurm.call("scontrol", "requeue", f"{array}_{first}")
    slurm.call("scancel", "--signal=TERM", "--batch", f"{array}_{second}")
    slurm.wait_for(f"{array}_{first}", "PENDING")
    slurm.wait_for(f"{array}_{second}", "PENDING")
    slurm.start_now(array)
    again = [f"{array}_{task}" for task in restarts(slurm, array) if task != last]
    for element in again:
        slurm.wait_for(element, "RUNNING")
    names = {f"s{element.rpartition('_')[2]}" for element in again}
    wait_until(lambda: names <= {holder.name for holder in find_holders(out / "_work")}, "shares to be owned")

    # The node is lost with all of them.
    node = slurm.call("hostname", "-s")
    slurm.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    slurm.wait_for(array, "PENDING", "COMPLETED")
    assert slurm.states(jobs["merge"]) == ["PENDING"]
    holders = find_holders(out / "_work")
    wait_until(lambda: not any(holder.is_alive(out / "_work") for holder in holders), "the processes to be gone")
    # Refused where the node has reported back by itself.
    slurm.call("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
    slurm.start_now(array)
    slurm.wait_for(array, "COMPLETED", seconds=200)
    slurm.wait_for(jobs["merge"], "COMPLETED")

    counts = restarts(slurm, array)
    assert counts.pop(last) <= 1  # it may have been finished before the node was lost
    assert set(counts.values()) == {2}
    found = results(out)
    assert [row["id"] for row in found] == [row["id"] for row in rows]
    assert {row["status"] for row in found} == {"ok"}
    assert {row["usage"]["completion_tokens"] for row in found} == {NUM_TOKENS}
    assert len({row["placement"]["slurm_job_id"] for row in found}) == 4
    assert read_success(RunFolder.open(out)) is not None
    # Nobody read the manifest again.
    now = (out / "_work" / "index.parquet").stat()
    assert (now.st_ino, now.st_mtime_ns) == (index.st_ino, index.st_mtime_ns)
    part = write_manifest(tmp_path / "part.jsonl", rows[:40])
    assert run(part, tiny_model, tmp_path / "alone", **SETTINGS) is ExitCode.OK
    assert [row["text"] for row in results(tmp_path / "alone")] == [row["text"] for row in found[:40]]


def restarts(slurm: Cluster, array: str) -> dict[str, int]:
    """How often each element was requeued."""
    return {record["ArrayTaskId"]: int(record["Restarts"]) for record in slurm.jobs(array)}


def slurm_logs(out: Path) -> str:
    return "".join(path.read_text() for path in (out / "logs").glob("slurm-*.log"))


def test_a_plan_that_fails_ends_the_other_jobs(slurm: Cluster, tiny_model: Path) -> None:
    jobs = submit(slurm, "missing.jsonl", "-o", "nothing", *flags(tiny_model), "--array=2")
    slurm.wait_for(jobs["plan"], "FAILED")
    slurm.wait_for(jobs["shares"], "CANCELLED")
    slurm.wait_for(jobs["merge"], "FAILED")
    assert slurm.jobs(jobs["merge"])[0]["ExitCode"] == "2:0"
    assert "missing.jsonl" in slurm_logs(slurm.folder / "nothing")


def test_a_merge_of_too_few_rows_says_so(slurm: Cluster, tiny_model: Path) -> None:
    """An element is cancelled; the merge runs all the same and counts. The same script again brings the rest."""
    rows = [{"id": str(i), "prompt": words(10, i)} for i in range(40)]
    write_manifest(slurm.folder / "few.jsonl", rows)
    arguments = ["few.jsonl", "-o", "few", *flags(tiny_model), "--array=2", "--max-tokens=8"]
    jobs = submit(slurm, *arguments, "--max-parallel=1")
    slurm.wait_for(f"{jobs['shares']}_0", "RUNNING", "COMPLETED")
    slurm.call("scancel", f"{jobs['shares']}_1")
    slurm.wait_for(jobs["merge"], "FAILED")
    assert slurm.jobs(jobs["merge"])[0]["ExitCode"] == "75:0"
    assert not (slurm.folder / "few" / "_SUCCESS.json").exists()
    again = submit(slurm, *arguments)
    slurm.wait_for(again["merge"], "COMPLETED")
    assert [row["id"] for row in results(slurm.folder / "few")] == [row["id"] for row in rows]
