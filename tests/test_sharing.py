"""Which rows share a beginning, and how much of it."""

from __future__ import annotations

import numpy as np
import pytest
from engine_rows import random_ids, request

from longbatch.core import Prompt, Result
from longbatch.engine.ladder import Shape
from longbatch.engine.sequence import Sequence
from longbatch.engine.sharing import group


def sequence(row: int, ids: np.ndarray, task: str = "generate") -> Sequence:
    made = request(row, task)
    return Sequence(made, Prompt(ids), Result(made.key, row), 0, Shape(64, 4096))


def groups(*prompts: np.ndarray, task: str = "generate") -> list[tuple[int, list[int]]]:
    """(trunk, row numbers) in the order of rows."""
    found = group([sequence(row, ids, task) for row, ids in enumerate(prompts)])
    return sorted(((trunk, [row.request.row for row in rows]) for trunk, rows in found), key=lambda entry: entry[1])


def join(*parts: tuple[int, int]) -> np.ndarray:
    """Prompt made of (length, seed) parts."""
    return np.concatenate([random_ids(length, seed) for length, seed in parts])


def test_rows_that_differ_stand_alone() -> None:
    assert groups(join((200, 1)), join((200, 2)), join((10, 3))) == [(0, [0]), (0, [1]), (0, [2])]


@pytest.mark.parametrize(("common", "trunk"), [(63, 0), (64, 64), (100, 64), (127, 64), (128, 128), (200, 192)])
def test_whole_pages_are_shared(common: int, trunk: int) -> None:
    found = groups(join((common, 1), (40, 2)), join((common, 1), (70, 3)))
    assert found == ([(trunk, [0, 1])] if trunk else [(0, [0]), (0, [1])])


@pytest.mark.parametrize(("length", "trunk"), [(64, 0), (65, 64), (128, 64), (129, 128)])
def test_equal_prompts_keep_their_last_token(length: int, trunk: int) -> None:
    found = groups(*[join((length, 1))] * 3)
    assert found == ([(trunk, [0, 1, 2])] if trunk else [(0, [0]), (0, [1]), (0, [2])])


def test_a_prompt_that_is_the_beginning_of_another() -> None:
    assert groups(join((65, 1)), join((65, 1), (300, 2))) == [(64, [0, 1])]
    assert groups(join((64, 1)), join((64, 1), (300, 2))) == [(0, [0]), (0, [1])]


@pytest.mark.parametrize("task", ["score", "embed", "classify"])
def test_only_rows_that_generate_share(task: str) -> None:
    assert groups(*[join((200, 1))] * 2, task=task) == [(0, [0]), (0, [1])]


def test_interleaved_rows() -> None:
    prompts = [join((130, row % 2), (20, row)) for row in range(6)]
    assert groups(*prompts) == [(128, [0, 2, 4]), (128, [1, 3, 5])]


def test_documents_behind_one_system_prompt() -> None:
    """Two documents of 640 tokens, three questions each, after 64 common tokens: the documents are shared."""
    prompts = [join((64, 0), (640, 1 + row // 3), (10, 50 + row)) for row in range(6)]
    assert groups(*prompts) == [(704, [0, 1, 2]), (704, [3, 4, 5])]


def test_many_short_tails_behind_one_system_prompt() -> None:
    """Sharing 640 tokens among all saves more than sharing 704 between two."""
    prompts = [join((640, 0), (100, 1 + row // 2), (10, 50 + row)) for row in range(6)]
    assert groups(*prompts) == [(640, [0, 1, 2, 3, 4, 5])]


def test_a_short_row_does_not_spoil_the_others() -> None:
    prompts = [join((70, 0))] + [join((70, 0), (1000, 1), (5, 50 + row)) for row in range(3)]
    assert groups(*prompts) == [(0, [0]), (1024, [1, 2, 3])]


def test_rows_of_different_kinds_do_not_share() -> None:
    rows = [sequence(row, join((128, 1), (10 + 10 * row, 50 + row))) for row in range(4)]
    found = group(rows, kind=lambda row: len(row.prompt.ids) >= 158)
    assert [(trunk, [row.request.row for row in alike]) for trunk, alike in found] == [(128, [0, 1]), (128, [2, 3])]
