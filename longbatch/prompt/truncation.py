"""`--overlong truncate-middle` and `truncate-left`: which tokens go when a prompt is too long.

Tokens are removed from one text of the row, so that the template around it stays whole, and a cut never falls
inside a character.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Encoding


def keep_tokens(encoding: Encoding, span: tuple[int, int], num_excess: int, policy: str) -> np.ndarray | None:
    """Which tokens stay: bool [T], or None where the text is too short to give up so many.

    span: first and one-past-last character of the text that may be cut. num_excess: tokens too many. policy:
    `truncate-middle` or `truncate-left`. At most a few tokens more than num_excess go, where a cut would have
    fallen inside a character.
    """
    offsets: Sequence[tuple[int, int]] = encoding.offsets
    starts = np.fromiter((start for start, _ in offsets), np.int64, len(offsets))
    ends = np.fromiter((end for _, end in offsets), np.int64, len(offsets))
    inside = np.flatnonzero((starts >= span[0]) & (ends <= span[1]) & (ends > starts))
    if not len(inside):
        return None
    # Some tokenizers trim spaces off their offsets, so tokens in between may seem to be empty.
    begin, end = int(inside[0]), int(inside[-1]) + 1
    num_kept = end - begin - num_excess
    if num_kept <= 0:
        return None
    first = begin if policy == "truncate-left" else begin + (num_kept + 1) // 2
    last = first + num_excess
    # Tokens of one character share it: byte pieces of an emoji have the same offsets.
    while first > begin and starts[first] < ends[first - 1]:
        first -= 1
    while last < end and starts[last] < ends[last - 1]:
        last += 1
    keep = np.ones(len(offsets), dtype=bool)
    keep[first:last] = False
    return keep
