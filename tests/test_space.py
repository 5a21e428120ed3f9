"""Room on the disk: the estimate covers what a run really takes, and too little is said beforehand."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
from output_rows import make_folder, make_request, make_result

from longbatch.errors import DiskError, ExitCode
from longbatch.output import KeyTable, ResultWriter, RunFolder, merge
from longbatch.output.reserve import RESERVE_BYTES
from longbatch.run.space import check, estimate, free_bytes, stored_bytes


def used(folder: Path) -> int:
    """Bytes of all files that are there at the moment."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def fill(folder: RunFolder, rows: range, words: int, worker: str) -> int:
    """Answer rows with so many words of nonsense, which packs worse than language; the most bytes used at once."""
    choose = random.Random(rows.start)
    vocabulary = [f"{choose.getrandbits(16):x}" for _ in range(20_000)]
    peak = 0
    with ResultWriter(folder, worker) as writer:
        for row in rows:
            writer.append(make_result(make_request(row), text=" ".join(choose.choices(vocabulary, k=words))))
        writer.flush()
        peak = used(folder.path)
    return max(peak, used(folder.path))


def merge_peak(folder: RunFolder, num_rows: int) -> int:
    """Merge, and return the most bytes used at once."""
    peak, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.is_set():
            peak = max(peak, used(folder.path))
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    merge(folder, KeyTable.of(map(make_request, range(num_rows))))
    ended.set()
    watcher.join()
    return max(peak, used(folder.path))


@pytest.mark.parametrize(("num_rows", "words"), [(50_000, 0), (10_000, 30), (1000, 600)])
def test_a_run_stays_within_the_estimate(tmp_path: Path, num_rows: int, words: int) -> None:
    folder = make_folder(tmp_path)
    # Four characters of nonsense and a space are about two tokens.
    needed = estimate(num_rows, 2 * words * num_rows)
    peak = max(fill(folder, range(num_rows), words, "w0"), merge_peak(folder, num_rows))
    assert peak < needed
    assert needed < 4 * peak + 2 * RESERVE_BYTES


def test_a_continued_run_merges_what_is_there_too(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    fill(folder, range(5000), 100, "w0")
    before, stored = used(folder.path), stored_bytes(folder)
    assert 0 < stored <= before
    needed = estimate(10, 10, stored=stored)
    peak = max(fill(folder, range(5000, 5010), 5, "w1"), merge_peak(folder, 5010))
    assert peak - before < needed


def test_each_worker_needs_its_own_reserve() -> None:
    assert estimate(10, 10, num_workers=8) - estimate(10, 10) >= 7 * RESERVE_BYTES
    assert estimate(0, 0, num_workers=0) == 0


def test_too_little_space(tmp_path: Path) -> None:
    out = tmp_path / "not" / "yet"
    free = free_bytes(out)
    assert free > 1 << 20
    check(out, free // 2)
    with pytest.raises(DiskError, match=r"may need .* and .* are free") as caught:
        check(out, 2 * free)
    assert caught.value.exit_code is ExitCode.DISK
    assert "--limit" in str(caught.value.hint)
    assert not out.parent.exists()
