"""Manifests written to disk for the tests of `longbatch.manifest`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longbatch.core import Fault, Request
from longbatch.manifest import Manifest, ManifestOptions


def write_lines(path: Path, *rows: dict[str, Any] | bytes) -> Path:
    """One line per row: dicts as JSON, bytes as they are."""
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


def read_all(path: Path | str, **options: Any) -> list[Request | Fault]:
    """Every answer that the manifest asks for."""
    return list(Manifest.open([str(path)], ManifestOptions(**options)).rows())


def one_request(tmp_path: Path, row: dict[str, Any] | bytes, **options: Any) -> Request:
    """The only request of a manifest of one row."""
    (answer,) = read_all(write_lines(tmp_path / "one.jsonl", row), **options)
    assert isinstance(answer, Request), answer
    return answer


def one_fault(tmp_path: Path, row: dict[str, Any] | bytes, **options: Any) -> tuple[str, str | None]:
    """Type and field of the fault of a row that stands between two good ones, which must not suffer."""
    before, after = {"id": "before", "prompt": "a"}, {"id": "after", "prompt": "b"}
    if options.get("task") == "classify":
        before["labels"] = after["labels"] = ["yes", "no"]  # type: ignore[assignment]
    first, fault, last = read_all(write_lines(tmp_path / "one.jsonl", before, row, after), **options)
    assert isinstance(first, Request)
    assert isinstance(last, Request)
    assert (first.id, first.row, last.id, last.row) == ("before", 0, "after", 2)
    assert isinstance(fault, Fault), fault
    assert fault.row == 1
    assert fault.error.message.startswith("one.jsonl:2: ")
    return fault.error.type, fault.error.field
