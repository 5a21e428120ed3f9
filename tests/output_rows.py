"""Requests, results and run folders for the tests of the output package."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from longbatch.core import TASKS, Location, Request, Result, Sampling
from longbatch.errors import RowError
from longbatch.output import RunFolder

IDENTITY: dict[str, Any] = {"model": "tiny", "task": "generate", "sampling": {"temperature": 0.0}}


def make_folder(path: Path) -> RunFolder:
    return RunFolder.create_or_open(path / "out", IDENTITY, {"version": "1"})


def make_request(row: int, id: str | None = "auto", sample: int = 0, content: str = "") -> Request:
    """Row `row`, named `row-N` unless told otherwise; its fingerprint follows its content."""
    name = f"row-{row}" if id == "auto" else id
    fingerprint = hashlib.blake2b(f"{name} {content}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return Request(
        row, name, Location(0, row, 1), TASKS["generate"], Sampling(), sample=sample, fingerprint=fingerprint
    )


def answer_to(request: Request) -> str:
    """The only right answer to a request."""
    return f"answer {request.row} {request.sample} " + request.fingerprint.hex() * (1 + request.row % 7)


def make_result(request: Request, **fields: Any) -> Result:
    result = Result(
        key=request.key, row=request.row, text=answer_to(request), finish_reason="stop", fingerprint=request.fingerprint
    )
    for name, value in fields.items():
        setattr(result, name, value)
    return result


def make_failure(request: Request, type: str = "prompt_too_long", **fields: Any) -> Result:
    result = Result.failed(request, RowError(type, "what is wrong and the mend"))
    for name, value in fields.items():
        setattr(result, name, value)
    return result
