"""Rows of one prefill that begin alike: their common beginning is prefilled once and its pages are shared.

Exact: a trunk's K/V are the same numbers whichever row computes them. Only whole units of tokens are shared, at least
pages, and never the last token of a row, whose hidden state the row itself must compute.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np

from longbatch.cache import PAGE_TOKENS
from longbatch.engine.sequence import Sequence

Group = tuple[int, list[Sequence]]


def group(
    sequences: list[Sequence], unit: int = PAGE_TOKENS, kind: Callable[[Sequence], Hashable] = lambda sequence: None
) -> list[Group]:
    """(tokens of the trunk, rows) for rows that generate and share at least one unit of tokens; the rest alone with
    a trunk of 0. unit: a multiple of PAGE_TOKENS. kind: only rows that are equal in it share.

    A trunk is one level deep. Where rows share a little and some of them much more (one system prompt, several
    documents, several questions each), the cut that saves more tokens is taken.
    """
    kinds: dict[Hashable, list[Sequence]] = {}
    for sequence in sequences:
        kinds.setdefault(kind(sequence), []).append(sequence)
    return [found for alike in kinds.values() for rows in _by_unit(alike, 0, unit) for found in _cut(rows, unit)]


def _cut(rows: list[Sequence], unit: int) -> list[Group]:
    """One trunk for rows that share a unit, or the trunks of the parts that share more."""
    if len(rows) == 1:
        return [(0, rows)]
    trunk = _common(rows, unit)
    finer = [found for part in _by_unit(rows, trunk, unit) for found in _cut(part, unit)]
    return finer if _saved(finer) > _saved([(trunk, rows)]) else [(trunk, rows)]


def _saved(groups: list[Group]) -> int:
    """Tokens that need not be computed."""
    return sum(trunk * (len(rows) - 1) for trunk, rows in groups)


def _by_unit(rows: list[Sequence], start: int, unit: int) -> list[list[Sequence]]:
    """Rows by their tokens of one unit, in the order of their first rows; a row that cannot share it alone."""
    found: dict[object, list[Sequence]] = {}
    for row in rows:
        ids = row.prompt.ids
        shareable = row.request.task.decodes and len(ids) > start + unit
        found.setdefault(ids[start : start + unit].tobytes() if shareable else id(row), []).append(row)
    return list(found.values())


def _common(rows: list[Sequence], unit: int) -> int:
    """Tokens of the longest shared beginning, in whole units, that leaves each row at least one token."""
    first = rows[0].prompt.ids
    length = min(len(row.prompt.ids) for row in rows) - 1
    for row in rows[1:]:
        differing = np.flatnonzero(row.prompt.ids[:length] != first[:length])
        if len(differing):
            length = int(differing[0])
    return length // unit * unit
