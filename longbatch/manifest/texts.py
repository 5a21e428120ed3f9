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
    source: Source, index: int, name: str, root: Path | None, field: str, max_bytes: int, copy: Path | None = None
) -> Iterator[Record]:
    """The one row of a text file. name: the row's id. field: the column that holds the content, as a MediaRef.
    copy: a local copy of a remote file."""
    values = {"id": name}
    found = _content(source, root, field, max_bytes, copy)
    row = Rejected(found, values) if isinstance(found, RowError) else {**values, field: found}
    yield Record(Location(index, 0, 0), source.name, row)


def _content(source: Source, root: Path | None, field: str, max_bytes: int, copy: Path | None) -> MediaRef | RowError:
    if source.size > max_bytes:
        return RowError("file_too_large", f"the file has {source.size} bytes, and the limit is {max_bytes}")
    # A path is read later, and only below root; a link that leads elsewhere was named by the user and is read here.
    if source.is_local and root is not None:
        real_root, real_path = os.path.realpath(root), os.path.realpath(source.uri)
        if real_path.startswith(os.path.join(real_root, "")):
            return MediaRef("document", os.path.relpath(real_path, real_root), None, field)
    try:
        with open(copy, "rb") if copy else source.open() as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        return RowError("unreadable_input", f"the file cannot be read ({error.strerror or error})")
    if len(data) > max_bytes:
        return RowError("file_too_large", f"the file is larger than the limit of {max_bytes} bytes")
    return MediaRef("document", None, data, field)
