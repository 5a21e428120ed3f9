"""What an engine may do at once, and what it has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """step_tokens: most tokens in one prefill step. tile_rows: rows per tile of a layer. decode_rows: most sequences
    decoded together. max_tokens: answers of rows that set no limit. run_seed: seed of rows that set none. row_seconds:
    longest time of a row, None for any. chunk_tokens: most tokens in one step of a row that is prefilled alone, None
    for step_tokens."""

    step_tokens: int
    tile_rows: int
    decode_rows: int
    max_tokens: int
    run_seed: int = 0
    row_seconds: float | None = None
    chunk_tokens: int | None = None


@dataclass(slots=True)
class Counters:
    """Totals so far. busy_seconds: wall time in which the device worked for rows; failed attempts do not count."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def busy_seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds
