"""Rows of one prefill that begin alike: their common beginning is prefilled once and its pages are shared.

Exact: a trunk's K/V are the same numbers whichever row computes them. Only whole pages are shared, and never the
last token of a row, whose hidden state the row itself must compute.
"""

from __future__ import annotations

import numpy as np

from longbatch.cache.pages import PAGE_TOKENS
from longbatch.engine.sequence import Sequence


def group(sequences: list[Sequence]) -> list[tuple[int, list[Sequence]]]:
    """(tokens of the trunk, rows) for rows that generate and share at least one page of tokens; the rest alone with
    a trunk of 0. Groups come in the order of their first rows."""
    found: dict[object, list[Sequence]] = {}
    for sequence in sequences:
        ids = sequence.prompt.ids
        shareable = sequence.request.task.decodes and len(ids) > PAGE_TOKENS
        found.setdefault(ids[:PAGE_TOKENS].tobytes() if shareable else id(sequence), []).append(sequence)
    return [(_common(rows) if len(rows) > 1 else 0, rows) for rows in found.values()]


def _common(rows: list[Sequence]) -> int:
    """Tokens of the longest shared beginning, in whole pages, that leaves each row at least one token."""
    first = rows[0].prompt.ids
    length = min(len(row.prompt.ids) for row in rows) - 1
    for row in rows[1:]:
        differing = np.flatnonzero(row.prompt.ids[:length] != first[:length])
        if len(differing):
            length = int(differing[0])
    return length // PAGE_TOKENS * PAGE_TOKENS
