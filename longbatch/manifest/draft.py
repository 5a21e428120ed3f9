"""What a dialect makes of a row, before the fields that all dialects share are added."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from longbatch.core import Message


@dataclass(slots=True)
class Draft:
    """The part of a `Request` that a dialect reads.

    sampling: the fields of `Sampling` that the row sets. stamps: size and time of each file that the row names,
    so that a changed file changes the fingerprint.
    """

    messages: tuple[Message, ...] = ()
    text: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    num_samples: int = 1
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    stamps: list[tuple[int, int]] = field(default_factory=list)
