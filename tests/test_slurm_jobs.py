"""What is asked of Slurm and told to it, with a real one: states, time limits, requeues, dead holders."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from slurm_cluster import Cluster, slurm, wait_until

from longbatch.run.owner import Holder, owner_path
from longbatch.run.slurm import GONE, JobState, ask, job_id, restart_count

__all__ = ["slurm"]
# Until it is told to end: each requeue that leads nowhere would run for ever otherwise.
WAIT = "import os, time\nwhile not os.path.exists('end'): time.sleep(0.05)\n"
REQUEUE = """
import os, signal, sys, time
from longbatch.run.slurm import requeue
os.environ.get("SLURM_RESTART_COUNT") == "1" and sys.exit(print("again") or 0)
def stop(number, frame):
    print("answer:", requeue(os.environ, num_finished={rows}, most={most}))
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
print("ready")
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def ask_this_cluster(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    (slurm.folder / "end").unlink(missing_ok=True)


def test_outside_a_job() -> None:
    assert job_id({}) is None
    assert restart_count({}) == 0
    assert restart_count({"SLURM_RESTART_COUNT": "3"}) == 3


def test_states(slurm: Cluster) -> None:
    job = slurm.submit(slurm.python(WAIT), "--time=10")
    slurm.wait_for(job, "RUNNING")
    state = ask(job)
    assert state is not None
    assert state.state == "RUNNING"
    assert state.is_live
    assert 580 < (state.seconds_left or 0) <= 600
    later = slurm.submit("true\n", f"--dependency=afterany:{job}")
    state = ask(later)
    assert state is not None
    assert state.state == "PENDING"
    assert not state.is_live
    (slurm.folder / "end").touch()
    slurm.wait_for(later, "COMPLETED")
    assert ask(job) == ask(later) == ask("999999") == JobState(GONE, None)


def test_the_controller_cannot_be_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=none\nSlurmctldHost=localhost\nSlurmctldPort=1\nMessageTimeout=1\n"
    )
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    assert ask("1") is None


def test_an_array_element_finds_itself(slurm: Cluster) -> None:
    """The last element's id is the array's, for which squeue lists all of them."""
    program = (
        "import os\nfrom longbatch.run.deadline import Deadline\nfrom longbatch.run.shard import Shard\n"
        "shard, deadline = Shard.parse('auto', os.environ), Deadline.find(None, 20, os.environ)\n"
        "print(shard.index, shard.count, os.environ['SLURM_JOB_ID'] == deadline.job, deadline.seconds_left())\n"
    )
    job = slurm.submit(slurm.python(program + WAIT), "--array=0-6:3", "--time=7")
    slurm.wait_for(job, "RUNNING")
    for element, task in enumerate((0, 3, 6)):
        line = wait_until(lambda name=f"{job}_{task}": slurm.log(name), f"element {task}")
        index, count, own, left = line.split()
        assert (index, count, own) == (str(element), "3", "True")
        assert 390 < float(left) <= 420
    (slurm.folder / "end").touch()
    slurm.wait_for(job, "COMPLETED")


def test_a_job_requeues_itself_once(slurm: Cluster) -> None:
    job = slurm.submit(slurm.python(REQUEUE.format(rows=3, most=1)), "--requeue")
    wait_until(lambda: "ready" in slurm.log(job), "the job")
    merge = slurm.submit("echo merged\n", f"--dependency=afterany:{job}")
    slurm.call("scancel", "--signal=TERM", "--batch", job)
    slurm.wait_for(job, "PENDING")
    assert "not requeued" not in slurm.log(job)
    assert slurm.states(merge) == ["PENDING"]
    slurm.start_now(job)
    slurm.wait_for(job, "COMPLETED")
    assert "again" in slurm.log(job)
    assert slurm.jobs(job)[0]["Restarts"] == "1"
    slurm.wait_for(merge, "COMPLETED")


@pytest.mark.parametrize(
    ("rows", "most", "reason"), [(0, 9, "no row was finished"), (3, 0, "it was 0 times already")], ids=["idle", "often"]
)
def test_a_requeue_that_leads_nowhere(slurm: Cluster, rows: int, most: int, reason: str) -> None:
    job = slurm.submit(slurm.python(REQUEUE.format(rows=rows, most=most)), "--requeue")
    wait_until(lambda: "ready" in slurm.log(job), "the job")
    slurm.call("scancel", "--signal=TERM", "--batch", job)
    slurm.wait_for(job, "FAILED")
    assert reason in slurm.log(job)
    assert slurm.jobs(job)[0]["ExitCode"] == "75:0"


def test_a_cancelled_job_stays_cancelled(slurm: Cluster) -> None:
    job = slurm.submit(slurm.python(REQUEUE.format(rows=3, most=9)), "--requeue")
    wait_until(lambda: "ready" in slurm.log(job), "the job")
    slurm.call("scancel", job)
    wait_until(lambda: "answer: " in slurm.log(job), "the answer")
    slurm.wait_for(job, "CANCELLED")
    assert "is not requeued: its state is COMPLETING" in slurm.log(job)
    time.sleep(1)
    assert slurm.states(job) == ["CANCELLED"]


def test_a_holder_on_another_machine_lives_as_long_as_its_job(slurm: Cluster, tmp_path: Path) -> None:
    job = slurm.submit(slurm.python(WAIT))
    slurm.wait_for(job, "RUNNING")
    elsewhere = {"host": "node7", "boot": "other", "machine": "other", "slurm_job": job}
    holder = replace(Holder.this_process("run", {}), **elsewhere)
    owner_path(tmp_path, "run").write_text(json.dumps(asdict(holder)))
    assert holder.is_alive(tmp_path, {})
    slurm.call("scontrol", "suspend", job)
    (slurm.folder / "end").touch()
    os.utime(owner_path(tmp_path, "run"), (0, 0))
    assert holder.is_alive(tmp_path, {})
    slurm.call("scontrol", "resume", job)
    slurm.wait_for(job, "COMPLETED")
    os.utime(owner_path(tmp_path, "run"))
    assert not holder.is_alive(tmp_path, {})


def test_the_limit_warns_a_process_that_replaced_the_shell(slurm: Cluster) -> None:
    """With a warning earlier than the limit is long, it comes at once, give or take Slurm's half minute: perhaps before
    Python can take it, so it is held back until then."""
    script = slurm.python(REQUEUE.format(rows=3, most=9)).replace("exec ", "exec env --block-signal=TERM ", 1)
    job = slurm.submit(script, "--requeue", "--time=1", "--signal=B:TERM@60")
    slurm.wait_for(job, "PENDING", "RUNNING")
    wait_until(lambda: slurm.jobs(job)[0]["Restarts"] == "1", "the requeue", 150)
    slurm.start_now(job)
    slurm.wait_for(job, "COMPLETED")
    assert slurm.log(job).split()[-1] == "again"
