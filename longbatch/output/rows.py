"""Results as Arrow record batches in the part schema."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from longbatch.core import Result, TokenLogprob
from longbatch.output.carried import CarriedColumns, clean_text
from longbatch.output.keys import digest_of, padded_fingerprint
from longbatch.output.schema import (
    ATTENTION,
    ERROR,
    INTERNAL_FIELDS,
    LOGPROB,
    MEDIA,
    METADATA,
    PLACEMENT,
    RESULT_FIELDS,
    TIMING,
    TIMING_PHASES,
    TOP,
    USAGE,
    USAGE_TOKENS,
)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a worker runs: the same for all of its results. device such as `cuda:0` or `cpu`."""

    device: str | None = None
    rank: int | None = None
    host: str | None = field(default_factory=socket.gethostname)
    slurm_job_id: str | None = field(default_factory=lambda: os.environ.get("SLURM_JOB_ID"))
    slurm_task: str | None = field(default_factory=lambda: os.environ.get("SLURM_ARRAY_TASK_ID"))


@dataclass(frozen=True, slots=True)
class Stamp:
    """What every result of a worker carries beside its own fields."""

    run_id: str
    config_hash: str
    placement: Placement


def results_to_batch(results: Sequence[Result], stamp: Stamp, carried: CarriedColumns) -> pa.RecordBatch:
    """The results as one record batch of `part_schema`, carried columns included.

    Raises ValueError or pyarrow's errors when a field of a result has a value that its column cannot hold.
    """
    num_rows = len(results)
    carried_fields, carried_arrays = carried.arrays([result.carried for result in results])
    columns = {
        "id": _texts([result.key.id for result in results]),
        "row": pa.array([result.row for result in results], pa.int64()),
        "sample": pa.array([result.key.sample for result in results], pa.int32()),
        "status": _texts([result.status for result in results]),
        "text": _texts([result.text for result in results]),
        "reasoning": _texts([result.reasoning for result in results]),
        "label": _texts([result.label for result in results]),
        "embedding": _embeddings([result.embedding for result in results]),
        "logprobs": _logprobs([result.logprobs for result in results]),
        "finish_reason": _texts([result.finish_reason for result in results]),
        "error": _errors(results),
        "usage": _usage(results),
        "timing": _timing(results),
        "attention": _attention(results),
        "placement": _placement(results, stamp.placement),
        "media": pa.nulls(num_rows, pa.large_list(MEDIA)),
        "notes": pa.array([result.notes or None for result in results], pa.large_list(pa.large_string())),
        "attempt": pa.array([result.attempt for result in results], pa.int32()),
        "run_id": pa.repeat(pa.scalar(stamp.run_id, pa.large_string()), num_rows),
        "config_hash": pa.repeat(pa.scalar(stamp.config_hash, pa.large_string()), num_rows),
        "_key": pa.array([digest_of(result) for result in results], pa.binary(16)),
        "_fingerprint": pa.array([padded_fingerprint(result.fingerprint) for result in results], pa.binary(16)),
    }
    fields = [*RESULT_FIELDS, *INTERNAL_FIELDS]
    arrays = [columns[field.name] for field in fields]
    schema = pa.schema([*fields, *carried_fields], metadata=METADATA)
    return pa.RecordBatch.from_arrays([*arrays, *carried_arrays], schema=schema)


def _texts(values: list[str | None]) -> pa.Array:
    try:
        return pa.array(values, pa.large_string())
    except UnicodeEncodeError:
        return pa.array([None if value is None else clean_text(value) for value in values], pa.large_string())


def _struct(kind: pa.StructType, columns: list[pa.Array], absent: list[bool] | None = None) -> pa.Array:
    mask = None if absent is None else pa.array(absent, pa.bool_())
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=mask)


def _lists(values: Sequence[Sequence[Any] | None], flatten: Callable[[list[Any]], pa.Array]) -> pa.Array:
    """A large_list column whose items are built all at once by `flatten`, null where a value is None."""
    offsets = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum([0 if value is None else len(value) for value in values], out=offsets[1:])
    items = flatten([item for value in values if value is not None for item in value])
    mask = pa.array([value is None for value in values], pa.bool_())
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), items, mask=mask)


def _embeddings(values: list[np.ndarray | None]) -> pa.Array:
    present = [np.asarray(value, dtype=np.float32).reshape(-1) for value in values if value is not None]
    if not present:
        return pa.nulls(len(values), pa.large_list(pa.float32()))
    offsets = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum([0 if value is None else value.size for value in values], out=offsets[1:])
    mask = pa.array([value is None for value in values], pa.bool_())
    items = pa.array(np.concatenate(present), pa.float32())
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), items, mask=mask)


def _logprobs(values: list[list[TokenLogprob] | None]) -> pa.Array:
    if all(value is None for value in values):
        return pa.nulls(len(values), pa.large_list(LOGPROB))
    return _lists(values, _tokens)


def _tokens(tokens: list[TokenLogprob]) -> pa.Array:
    columns = [
        pa.array([token.id for token in tokens], pa.int32()),
        _texts([token.token for token in tokens]),
        pa.array([token.logprob for token in tokens], pa.float32()),
        _lists([token.top or None for token in tokens], _alternatives),
    ]
    return _struct(LOGPROB, columns)


def _alternatives(tops: list[tuple[int, str, float]]) -> pa.Array:
    columns = [
        pa.array([top[0] for top in tops], pa.int32()),
        _texts([top[1] for top in tops]),
        pa.array([top[2] for top in tops], pa.float32()),
    ]
    return _struct(TOP, columns)


def _errors(results: Sequence[Result]) -> pa.Array:
    errors = [result.error for result in results]
    absent = [error is None for error in errors]
    if all(absent):
        return pa.nulls(len(results), ERROR)
    columns = [
        _texts([None if error is None else error.type for error in errors]),
        _texts([None if error is None else error.message for error in errors]),
        _texts([None if error is None else error.field for error in errors]),
        pa.array([None if error is None else error.retryable for error in errors], pa.bool_()),
    ]
    return _struct(ERROR, columns, absent)


def _usage(results: Sequence[Result]) -> pa.Array:
    usages = [result.usage for result in results]
    columns = [pa.array([getattr(usage, name) for usage in usages], pa.int64()) for name in USAGE_TOKENS]
    columns.append(pa.array([usage.gpu_seconds for usage in usages], pa.float64()))
    return _struct(USAGE, columns)


def _timing(results: Sequence[Result]) -> pa.Array:
    timings = [result.timing for result in results]
    columns = [pa.array([getattr(timing, name) for timing in timings], pa.float64()) for name in TIMING_PHASES]
    return _struct(TIMING, columns)


def _attention(results: Sequence[Result]) -> pa.Array:
    columns = [
        _texts([result.attention_mode for result in results]),
        pa.array([result.attention_density for result in results], pa.float64()),
        pa.array([result.attention_patterns for result in results], pa.large_list(pa.large_string())),
        pa.array([result.attention_gap for result in results], pa.float64()),
    ]
    return _struct(ATTENTION, columns)


def _placement(results: Sequence[Result], placement: Placement) -> pa.Array:
    num_rows = len(results)

    def text(value: str | None) -> pa.Array:
        return pa.repeat(pa.scalar(value, pa.large_string()), num_rows)

    columns = [
        text(placement.host),
        text(placement.device),
        pa.repeat(pa.scalar(placement.rank, pa.int32()), num_rows),
        pa.array([result.wave for result in results], pa.int32()),
        pa.array([result.width for result in results], pa.int32()),
        text(placement.slurm_job_id),
        text(placement.slurm_task),
    ]
    return _struct(PLACEMENT, columns)
