"""The out-of-memory ladder: its steps and lessons, and rows that take them under a cap that the kernel enforces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from capped_engine import CASES

from longbatch.engine import EngineLimits
from longbatch.engine.ladder import Ladder, Shape, step_down


def ladder(tile_rows: int = 1024, step_tokens: int = 16384, chunk_tokens: int | None = None) -> Ladder:
    return Ladder(EngineLimits(step_tokens, tile_rows, decode_rows=8, max_tokens=8, chunk_tokens=chunk_tokens))


def descent(ladder: Ladder, num_tokens: int) -> list[tuple[int, int]]:
    shapes = [ladder.shape(num_tokens)]
    while (shape := ladder.below(shapes[-1], num_tokens)) is not None:
        shapes.append(shape)
    return [(shape.tile_rows, shape.step_tokens) for shape in shapes]


def test_tiles_are_halved_once_and_chunks_down_to_one_tile() -> None:
    assert descent(ladder(), 8192) == [(1024, 16384), (512, 16384), (512, 4096), (512, 2048), (512, 1024), (512, 512)]


def test_a_chunked_row_has_smaller_chunks_from_its_own_on() -> None:
    assert descent(ladder(step_tokens=2048), 100_000) == [(1024, 2048), (512, 2048), (512, 1024), (512, 512)]


@pytest.mark.parametrize(("num_tokens", "shapes"), [(1, [(1024, 16384)]), (3, [(1024, 16384), (1, 16384), (1, 1)])])
def test_short_rows(num_tokens: int, shapes: list[tuple[int, int]]) -> None:
    """Half a tile is half of what the row fills of it."""
    assert descent(ladder(), num_tokens)[: len(shapes)] == shapes


def test_chunks_are_whole_tiles() -> None:
    for tile, step in descent(ladder(tile_rows=1000, step_tokens=9000), 8765)[2:]:
        assert (tile, step % tile) == (448, 0)


def test_lessons_hold_for_rows_like_the_one_that_taught_them() -> None:
    taught = ladder()
    taught.learn(8192, taught.shape(8192))
    assert taught.num_lessons == 0, "a row that fits teaches nothing"
    taught.learn(8192, Shape(512, 4096))
    assert taught.shape(100_000) == taught.shape(8192) == taught.shape(8191) == Shape(512, 4096)
    assert taught.shape(1000) == Shape(1024, 16384)
    assert descent(taught, 9000) == [(512, 4096), (512, 2048), (512, 1024), (512, 512)]
    taught.learn(50_000, Shape(512, 1024))
    assert taught.shape(50_000) == Shape(512, 1024)
    assert taught.shape(8192) == Shape(512, 4096)


def test_what_results_say() -> None:
    taught = ladder()
    assert step_down(Shape(1024, 16384), Shape(512, 16384)) == "out of memory: tiles of 512 rows"
    assert step_down(Shape(512, 16384), Shape(512, 4096)) == "out of memory: chunks of 4,096 tokens"
    assert taught.remark(8192, taught.shape(8192)) is None
    taught.learn(8192, Shape(512, 16384))
    assert taught.remark(8192, taught.shape(8192)) == "out of memory before: tiles of 512 rows"
    assert taught.remark(1000, taught.shape(1000)) is None


def test_chunks_for_the_sake_of_time_are_not_a_lesson() -> None:
    short = ladder(chunk_tokens=2048)
    assert short.shape(10) == Shape(1024, 2048)
    assert short.wave_tokens == 16384
    assert short.remark(10, short.shape(10)) is None


# ---------------------------------------------------------------------------------- under a real cap


def run_capped(case: str, environment: dict[str, str], root: Path) -> tuple[list[Any], list[Any]]:
    command = [sys.executable, str(root / "tests" / "capped_engine.py"), case]
    # After an allocation that fails glibc would reserve address space for a second arena, which counts under the cap.
    environment = {**environment, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert [row["error"] for row in found["free"]] == [None] * len(found["free"])
    assert [row["notes"] for row in found["free"]] == [[]] * len(found["free"])
    return found["free"], found["capped"]


NOTES = {
    "tile": [["out of memory: tiles of 512 rows"], ["out of memory before: tiles of 512 rows"]],
    "chunks": [
        ["out of memory: tiles of 512 rows", "out of memory: chunks of 4,096 tokens"],
        ["out of memory before: tiles of 512 rows, chunks of 4,096 tokens"],
    ],
    "wave": [["out of memory: wave of 4 rows halved"]] * 4 + [[]] * 4,
    "decode": [["out of memory: wave of 64 rows halved", "out of memory: decode batch of 64 rows halved"]] * 64,
}


@pytest.mark.skipif(sys.platform != "linux", reason="the cap is Linux's")
@pytest.mark.parametrize("case", sorted(NOTES))
def test_rows_that_need_a_step_down(case: str, uninstalled_environment: dict[str, str], root: Path) -> None:
    free, capped = run_capped(case, uninstalled_environment, root)
    assert [row["notes"] for row in capped] == NOTES[case]
    for row, expected in zip(capped, free, strict=True):
        assert row["error"] is None
        assert row["tokens"] == expected["tokens"]
        assert row["numbers"] == pytest.approx(expected["numbers"], abs=1e-5)
        assert row["embedding"] == pytest.approx(expected["embedding"], abs=1e-5)
        assert row["tokens"] or row["embedding"]


@pytest.mark.skipif(sys.platform != "linux", reason="the cap is Linux's")
def test_a_row_that_nothing_helps(uninstalled_environment: dict[str, str], root: Path) -> None:
    """It went down the whole ladder, and cost the row beside it nothing."""
    assert CASES["bottom"].waves == [[("generate", 2048), ("generate", 16)]]
    free, (large, small) = run_capped("bottom", uninstalled_environment, root)
    assert (large["error"], large["tokens"]) == ("out_of_memory", [])
    halved = "out of memory: wave of 2 rows halved"
    assert large["notes"] == [
        halved,
        "out of memory: tiles of 512 rows",
        "out of memory: chunks of 1,024 tokens",
        "out of memory: chunks of 512 tokens",
    ]
    assert (small["error"], small["tokens"], small["notes"]) == (None, free[1]["tokens"], [halved])
