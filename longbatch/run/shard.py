"""Shares of a run: which rows an element of a job array answers. A pure function of the full plan, so that no element
needs to know what the others do or have done."""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from longbatch.errors import UsageError


@dataclass(frozen=True, slots=True)
class Shard:
    """Share `index` of `count`, counted from 0."""

    index: int
    count: int

    @property
    def name(self) -> str:
        """What this share's files in the run folder are called after."""
        return f"s{self.index}"

    @classmethod
    def parse(cls, text: str | None, environ: Mapping[str, str]) -> Shard | None:
        """`i/n` with i from 0 to n-1, `auto` for the share of a Slurm array element, None for no sharing.

        Raises UsageError, also for `auto` outside an array, or in one whose elements are not evenly spaced.
        """
        if text is None:
            return None
        if text == "auto":
            return cls._of_array(environ)
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
        if match is None:
            raise UsageError(f"{text!r} is no share", hint="write --shard 0/4, or --shard auto in a Slurm array")
        index, count = int(match[1]), int(match[2])
        if not index < count:
            hint = f"shares are counted from 0: --shard 0/{count} to --shard {count - 1}/{count}" if count else None
            raise UsageError(f"there is no share {index} of {count}", hint=hint)
        return cls(index, count)

    @classmethod
    def _of_array(cls, environ: Mapping[str, str]) -> Shard:
        def read(name: str, default: str = "") -> int:
            text = environ.get(f"SLURM_ARRAY_TASK_{name}", default)
            if not text.isdigit():
                raise UsageError(
                    f"--shard auto needs a Slurm job array, and SLURM_ARRAY_TASK_{name} is not set",
                    hint="submit with sbatch --array=0-3 (`longbatch slurm` prints it), or write --shard 0/4",
                )
            return int(text)

        task, first, last = read("ID"), read("MIN"), read("MAX")
        step = max(1, read("STEP", "1"))
        count = (last - first) // step + 1
        if read("COUNT", str(count)) != count or (task - first) % step:
            raise UsageError(
                f"--shard auto needs an evenly spaced array, and this one has {read('COUNT')} of {first}-{last}",
                hint=f"submit --array={first}-{last}: elements whose rows are finished end at once",
            )
        return cls((task - first) // step, count)


def deal(work: np.ndarray, count: int) -> np.ndarray:
    """Which share each entry belongs to: int32 [n], for estimated work [n] (any unit, finite).

    The largest entry goes to the share with the least work so far, then the next (Graham's LPT rule), ties by order;
    so shares differ by no more than the largest entry. `work` must be computed alike on every machine: from the full
    plan, with fixed rates, whatever is finished already.
    """
    # Whole numbers, so that neither the order nor the sums hang on a last bit.
    scale = float(work.max(initial=0.0))
    units = np.rint(work * (1e9 / scale)).astype(np.int64) if scale > 0 else np.zeros(len(work), np.int64)
    order = np.argsort(-units, kind="stable")
    shares = np.empty(len(work), dtype=np.int32)
    if count == 1:
        shares[:] = 0
        return shares
    # An entry of no work still counts as a little, else all of those went to one share.
    loads = [(0, share) for share in range(count)]
    dealt = []
    for amount in (units[order] + 1).tolist():
        load, share = loads[0]
        dealt.append(share)
        heapq.heapreplace(loads, (load + amount, share))
    shares[order] = dealt
    return shares
