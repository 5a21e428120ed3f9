"""A million rows: deciding what is left, and merging, within the time and memory that a run may spend on them."""

import resource
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from output_rows import make_folder, make_request, make_result

from longbatch.output import KeyTable, ResultWriter, RowState, RunFolder, merge, rolling, scan

NUM_ROWS = 1_000_000
PEAK_UNIT = 1 if sys.platform == "darwin" else 1024


def write_rows(path: Path) -> None:
    """A finished run in parts of 4 MiB, and its keys."""
    rolling.PART_BYTES = 4 << 20
    order = ((row * 7919) % NUM_ROWS for row in range(NUM_ROWS))
    with ResultWriter(make_folder(path), "w0") as writer:
        for row in order:
            writer.append(make_result(make_request(row)))
    KeyTable.of(make_request(row) for row in range(NUM_ROWS)).save(path / "keys.npz")


def decide(path: Path) -> tuple[float, int]:
    """Seconds and peak bytes for telling what is left."""
    start = time.monotonic()
    done = scan(RunFolder.open(path / "out"))
    table = KeyTable.load(path / "keys.npz")
    assert table is not None
    states = done.find(table.answers)[1]
    assert (states == RowState.OK).all()
    assert len(states) == NUM_ROWS
    return time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * PEAK_UNIT


def merge_all(path: Path) -> tuple[float, int]:
    """Seconds and peak bytes for the merge."""
    start = time.monotonic()
    table = KeyTable.load(path / "keys.npz")
    assert table is not None
    assert merge(RunFolder.open(path / "out"), table).num_rows == NUM_ROWS
    return time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * PEAK_UNIT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_million_rows(tmp_path: Path) -> None:
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:  # each in a fresh process, for its peak
        pool.apply(write_rows, [tmp_path])
        seconds, peak = pool.apply(decide, [tmp_path])
        assert seconds < 20, f"{seconds:.1f} s"
        assert peak < 1 << 30, f"{peak >> 20} MiB"
        seconds, peak = pool.apply(merge_all, [tmp_path])
        assert seconds < 120, f"{seconds:.1f} s"
        assert peak < 1 << 30, f"{peak >> 20} MiB"
    rows = pq.read_table(tmp_path / "out" / "results", columns=["row"])["row"].to_numpy()
    assert rows.tolist() == list(range(NUM_ROWS))
