"""The columns of a result, one schema for every task and for ok and error rows alike.

Parts hold these columns, then the internal `_key` and `_fingerprint`, then carried columns; merged results
hold the same without the internal ones. Strings and lists are the large kind, which has no 2 GiB limit.
"""

from __future__ import annotations

import pyarrow as pa

SCHEMA_VERSION = 1
METADATA = {b"schema_version": str(SCHEMA_VERSION).encode()}

TOP = pa.struct([pa.field("id", pa.int32()), pa.field("token", pa.large_string()), pa.field("logprob", pa.float32())])
LOGPROB = pa.struct(
    [
        pa.field("id", pa.int32()),
        pa.field("token", pa.large_string()),
        pa.field("logprob", pa.float32()),
        pa.field("top", pa.large_list(TOP)),
    ]
)
ERROR = pa.struct(
    [
        pa.field("type", pa.large_string()),
        pa.field("message", pa.large_string()),
        pa.field("field", pa.large_string()),
        pa.field("retryable", pa.bool_()),
    ]
)
USAGE_TOKENS = (
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "image_tokens",
    "video_tokens",
    "audio_tokens",
)
USAGE = pa.struct([pa.field(name, pa.int64()) for name in USAGE_TOKENS] + [pa.field("gpu_seconds", pa.float64())])
TIMING_PHASES = ("queued", "fetch", "load", "tokenize", "encode", "prefill", "ttft", "decode", "total")
TIMING = pa.struct([pa.field(name, pa.float64()) for name in TIMING_PHASES])
ATTENTION = pa.struct(
    [
        pa.field("mode", pa.large_string()),
        pa.field("density", pa.float64()),
        pa.field("patterns", pa.large_list(pa.large_string())),
        pa.field("gap", pa.float64()),
    ]
)
PLACEMENT = pa.struct(
    [
        pa.field("host", pa.large_string()),
        pa.field("device", pa.large_string()),
        pa.field("rank", pa.int32()),
        pa.field("wave", pa.int32()),
        pa.field("width", pa.int32()),
        pa.field("slurm_job_id", pa.large_string()),
        pa.field("slurm_task", pa.large_string()),
    ]
)
MEDIA = pa.struct(
    [
        pa.field("kind", pa.large_string()),
        pa.field("sha256", pa.large_string()),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
        pa.field("frames", pa.int32()),
        pa.field("frame_times", pa.large_list(pa.float64())),
        pa.field("duration", pa.float64()),
        pa.field("tokens", pa.int64()),
        pa.field("note", pa.large_string()),
    ]
)

RESULT_FIELDS: tuple[pa.Field, ...] = (
    pa.field("id", pa.large_string()),
    pa.field("row", pa.int64()),
    pa.field("sample", pa.int32()),
    pa.field("status", pa.large_string()),
    pa.field("text", pa.large_string()),
    pa.field("reasoning", pa.large_string()),
    pa.field("label", pa.large_string()),
    pa.field("embedding", pa.large_list(pa.float32())),
    pa.field("logprobs", pa.large_list(LOGPROB)),
    pa.field("finish_reason", pa.large_string()),
    pa.field("error", ERROR),
    pa.field("usage", USAGE),
    pa.field("timing", TIMING),
    pa.field("attention", ATTENTION),
    pa.field("placement", PLACEMENT),
    pa.field("media", pa.large_list(MEDIA)),
    pa.field("notes", pa.large_list(pa.large_string())),
    pa.field("attempt", pa.int32()),
    pa.field("run_id", pa.large_string()),
    pa.field("config_hash", pa.large_string()),
)
INTERNAL_FIELDS: tuple[pa.Field, ...] = (
    pa.field("_key", pa.binary(16)),
    pa.field("_fingerprint", pa.binary(16)),
)
RESULT_NAMES = frozenset(field.name for field in RESULT_FIELDS)

# Leaf columns with few distinct values; the others gain nothing from a dictionary.
DICTIONARY_COLUMNS = [
    "status",
    "label",
    "finish_reason",
    "error.type",
    "error.message",
    "error.field",
    "attention.mode",
    "placement.host",
    "placement.device",
    "placement.slurm_job_id",
    "placement.slurm_task",
    "run_id",
    "config_hash",
]
STATISTICS_COLUMNS = ["id", "row", "sample", "status"]


def result_schema(carried: pa.Schema | None = None) -> pa.Schema:
    """Columns of the merged results: the result's own, then carried ones (already renamed, see `carried_name`)."""
    return pa.schema([*RESULT_FIELDS, *(carried or ())], metadata=METADATA)


def part_schema(carried: pa.Schema | None = None) -> pa.Schema:
    """Columns of journals and parts: as `result_schema` with `_key` and `_fingerprint` before the carried ones."""
    return pa.schema([*RESULT_FIELDS, *INTERNAL_FIELDS, *(carried or ())], metadata=METADATA)


def carried_fields(schema: pa.Schema) -> list[pa.Field]:
    """The carried columns of a part's schema."""
    own = len(RESULT_FIELDS) + len(INTERNAL_FIELDS)
    return [schema.field(index) for index in range(own, len(schema))]


def carried_name(name: str) -> str:
    """The output name of a carried column: its own, unless that would hide a result column or an internal one.

    Compared without case, because SQL engines fold it. Different names stay different.
    """
    folded = name.lower()
    reserved = folded in RESULT_NAMES or folded.startswith(("carried_", "_")) or not name
    return f"carried_{name}" if reserved else name
