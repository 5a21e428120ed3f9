"""The rows that run again at the end of a run, sparse and dense, to measure the gap between the two.

The sample is drawn when every row has a result, and only from good rows that ran sparse: sorted by length and cut into
as many strata as rows are wanted, each gives one. Which one depends on the run's seed and the row alone, and a stratum
that holds a row which is measured already gives that one, so that a continued run repeats nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from hashlib import blake2b

import numpy as np

from longbatch.core import Fault
from longbatch.output import Done, RowState, RunFolder, ran_sparse, read_gaps, recover, scan, verify_folder
from longbatch.plan import CostModel, make_plan
from longbatch.run.feed import read_entry
from longbatch.run.index import RowIndex
from longbatch.run.job import Job
from longbatch.run.planning import Remaining
from longbatch.run.sample import save_sample
from longbatch.run.shard import Shard

VERIFIER = "longbatch.run.worker:load_verifier"
# Rows of a stratum that are looked at for one whose task has log-probabilities.
MOST_LOOKS = 64


@dataclass(frozen=True)
class Verification:
    """folder: the run folder inside the run folder that keeps what was measured. left: the rows to measure."""

    folder: RunFolder
    left: Remaining

    @classmethod
    def draw(cls, job: Job, folder: RunFolder, index: RowIndex, shard: Shard | None, share: np.ndarray) -> Verification:
        """Decide which rows are measured. share: the entries that this process answers for. What a dead process left
        there is published first. Raises DiskError."""
        inner = verify_folder(folder)
        recover(inner, f"{shard.name}-*" if shard is not None else "*")
        known = scan(inner)
        wanted = job.settings.verify_sample
        if shard is not None:
            wanted = wanted // shard.count + (shard.index < wanted % shard.count)
        places, states = known.find(index.keys.answers)
        # A gap that cannot be read is measured again.
        finished = (states == RowState.FAILED) | read_gaps(folder).has(index.keys.answers)
        sparse = _sparse_entries(scan(folder, journals=False), index, share)
        chosen = np.array(sorted(_drawn(job, index, sparse, finished, wanted)), dtype=np.int64)
        save_sample(inner, shard, min(wanted, len(sparse)), index.keys.answers[chosen])
        attempts = np.zeros(len(index), dtype=np.int32)
        attempts[places >= 0] = known.attempts[places[places >= 0]]
        again = chosen[~finished[chosen]]
        sparse_cost = job.cost()
        cost = _BothWays(**{item.name: getattr(sparse_cost, item.name) for item in fields(sparse_cost)})
        seconds = job.settings.max_wave_seconds
        plan = make_plan(index.sizes(again), job.spec, job.budget(), cost, max_wave_seconds=seconds)
        num_finished = len(chosen) - len(again)
        num_failed = int(np.count_nonzero(states[chosen] == RowState.FAILED))
        return cls(inner, Remaining(index, plan, [], attempts, chosen, num_finished, num_failed))


class _BothWays(CostModel):
    """Rows run as they ran, and once more densely."""

    def prefill(self, prompt: np.ndarray, branch_tokens: np.ndarray | None = None) -> np.ndarray:
        dense = self._prefill(prompt, np.zeros(len(prompt), dtype=bool), branch_tokens)
        both: np.ndarray = super().prefill(prompt, branch_tokens) + dense
        return both


def _sparse_entries(done: Done, index: RowIndex, share: np.ndarray) -> np.ndarray:
    """Entries of the share whose result is a good one that ran sparse: int64, by length, longest first."""
    places, states = done.find(index.keys.answers[share])
    good = states == RowState.OK
    sparse: np.ndarray = share[good][ran_sparse(done)[places[good]]]
    order: np.ndarray = np.argsort(-index.entries["prompt"][sparse], kind="stable")
    ordered: np.ndarray = sparse[order]
    return ordered


def _drawn(job: Job, index: RowIndex, sparse: np.ndarray, finished: np.ndarray, wanted: int) -> Iterator[int]:
    """One entry of each stratum; none where a stratum has none that can be compared."""
    num_strata = min(wanted, len(sparse))
    for stratum in np.array_split(sparse, num_strata) if num_strata else ():
        ranks = {entry: (not finished[entry], _lot(job.settings.seed, index, entry)) for entry in stratum.tolist()}
        for entry in sorted(ranks, key=ranks.__getitem__)[:MOST_LOOKS]:
            if finished[entry] or _is_comparable(job, index, entry):
                yield entry
                break


def _lot(seed: int, index: RowIndex, entry: int) -> bytes:
    return blake2b(index.key(entry), key=str(seed).encode(), digest_size=8).digest()


def _is_comparable(job: Job, index: RowIndex, entry: int) -> bool:
    """Whether the row's task has log-probabilities: all but embeddings."""
    row, sample = int(index.keys.rows[entry]), int(index.keys.samples[entry])
    source = read_entry(job, index.location(entry), row, sample)
    return not isinstance(source, Fault) and (source.task.decodes or source.task.reads == "scored")
