"""A plan on disk: one Parquet file with a row for each row of the plan, in running order, refused rows last."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from longbatch.core import RowSize
from longbatch.errors import DiskError, RowError, UsageError
from longbatch.plan.memory import Budget
from longbatch.plan.packing import ROW_DTYPE, Plan, Totals

VERSION = 1
_KEY = b"longbatch.plan"


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan; an older file of the same name is replaced in one step. Raises DiskError."""
    sizes = np.array([tuple(size) for size, _ in plan.refused], dtype=ROW_DTYPE)
    errors = [error for _, error in plan.refused]
    table = np.concatenate([plan.table, sizes])
    waves = np.repeat(np.arange(len(plan.bounds) - 1, dtype=np.int32), np.diff(plan.bounds))
    blank = pa.nulls(len(plan.table), pa.string())

    def text(values: list[str | None]) -> Any:
        return pa.chunked_array([blank, pa.array(values, pa.string())])

    columns: dict[str, Any] = {name: pa.array(np.ascontiguousarray(table[name])) for name in ROW_DTYPE.names or ()}
    columns["wave"] = pa.chunked_array([pa.array(waves), pa.nulls(len(errors), pa.int32())])
    columns["error_type"] = text([error.type for error in errors])
    columns["error_message"] = text([error.message for error in errors])
    columns["error_field"] = text([error.field for error in errors])
    facts = {
        "version": VERSION,
        "budget": asdict(plan.budget),
        "totals": asdict(plan.totals),
        "wave_seconds": plan.wave_seconds.tolist(),
        "identity": plan.identity,
    }
    written = pa.table(columns).replace_schema_metadata({_KEY: json.dumps(facts).encode()})
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(written, temporary, compression="zstd", write_page_checksum=True)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DiskError(f"cannot write the plan to {path}: {error.strerror or error}") from error


def load_plan(path: Path) -> Plan:
    """Read a plan. Raises UsageError."""
    hint = "make it again with `longbatch plan`"
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        facts = json.loads((table.schema.metadata or {})[_KEY])
        version = facts["version"]
    except FileNotFoundError as error:
        raise UsageError(f"there is no plan at {path}", hint=hint) from error
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is not a readable plan: {error}", hint=hint) from error
    if version != VERSION:
        raise UsageError(f"the plan at {path} was made by another version of longbatch", hint=hint)
    rows = np.empty(len(table), dtype=ROW_DTYPE)
    for name in ROW_DTYPE.names or ():
        rows[name] = table[name].to_numpy()
    num_rows = facts["totals"]["num_rows"]
    waves = table["wave"].slice(0, num_rows).to_numpy()
    bounds = np.searchsorted(waves, np.arange(facts["totals"]["num_waves"] + 1))
    refused = [
        (RowSize._make(size), RowError(error["error_type"], error["error_message"], field=error["error_field"]))
        for size, error in zip(
            rows[num_rows:].tolist(),
            table.slice(num_rows).select(["error_type", "error_message", "error_field"]).to_pylist(),
            strict=True,
        )
    ]
    stored = facts["budget"]
    stored["parts"] = tuple((name, num_bytes) for name, num_bytes in stored["parts"])
    return Plan(
        rows[:num_rows],
        bounds,
        np.array(facts["wave_seconds"]),
        refused,
        Budget(**stored),
        Totals(**facts["totals"]),
        facts["identity"],
    )
