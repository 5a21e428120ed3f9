"""Text files given instead of a manifest: one row per file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from longbatch.core import Location, MediaRef
from longbatch.errors import RowError
from longbatch.manifest.lines import Record, Rejected
from longbatch.manifest.sources import Source


def read_text_file(
    source: Source, index: int, root: Path | None, field: str, max_bytes: int, copy: Path | None = None
) -> Iterator[Record]:
    """The one row of a text file: its id is the path below root, `field` holds its content as a MediaRef.

    copy: a local copy of a remote file.
    """
    name = os.path.relpath(source.uri, root) if root else source.name
    yield Record(Location(index, 0, 0), source.name, _values(source, name, root, field, max_bytes, copy))


def _values(
    source: Source, name: str, root: Path | None, field: str, max_bytes: int, copy: Path | None = None
) -> dict[str, object] | Rejected:
    values: dict[str, object] = {"id": name}
    if source.size > max_bytes:
        message = f"the file has {source.size} bytes, and the limit is {max_bytes}"
        return Rejected(RowError("file_too_large", message), values)
    # A path is read later, and only below root; a link that leads elsewhere was named by the user and is read here.
    if root is not None and _is_below(source.uri, root):
        return {**values, field: MediaRef("document", name, None, field)}
    try:
        with open(copy, "rb") if copy else source.open() as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        return Rejected(RowError("unreadable_input", f"the file cannot be read ({error.strerror or error})"), values)
    if len(data) > max_bytes:
        return Rejected(RowError("file_too_large", f"the file is larger than the limit of {max_bytes} bytes"), values)
    return {**values, field: MediaRef("document", None, data, field)}


def _is_below(path: str, root: Path) -> bool:
    real_root = os.path.join(os.path.realpath(root), "")
    return os.path.realpath(path).startswith(real_root)
