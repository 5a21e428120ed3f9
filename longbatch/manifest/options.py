"""What the command line says about reading a manifest."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from longbatch.core import TASKS, Sampling
from longbatch.errors import UsageError

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class ManifestOptions:
    """Settings that apply to every row; a row's own fields win over `task`, `system` and `defaults`.

    prompt: template of the user turn, `{column}` standing for a column and `{text}` for a text file's content.
    keep_columns: columns carried to the results, `*` for every one that is not an input itself.
    ignore_unsupported: drop fields that longbatch cannot honour instead of failing the row.
    max_row_bytes: longest line, and largest text file. max_expansion: decompressed bytes per compressed byte,
    counted after the first 16 MiB. limit: number of rows read. only: the one id that is read.
    media_root: folder that document paths are relative to, instead of each manifest file's own folder.
    """

    task: str = "generate"
    prompt: str | None = None
    system: str | None = None
    defaults: Sampling = field(default_factory=Sampling)
    keep_columns: tuple[str, ...] = ()
    ignore_unsupported: bool = False
    max_row_bytes: int = 64 * MEBIBYTE
    max_expansion: int = 1000
    limit: int | None = None
    only: str | None = None
    media_root: Path | None = None

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise UsageError(f"unknown task {self.task!r}", hint=f"one of {', '.join(TASKS)}")
        for name in ("max_row_bytes", "max_expansion", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name.replace('_', ' ')} must be at least 1, got {value}")
