"""Where the document paths of one manifest file may lead."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from longbatch.errors import RowError


@dataclass(frozen=True, slots=True)
class DocumentFolder:
    """The folder that paths in a manifest file are relative to. None of it exists for a remote manifest.

    folder: absolute. root: the folder that `MediaRef.path` is relative to, at or above `folder`.
    """

    folder: Path | None
    root: Path | None

    def locate(self, path: str, field: str) -> str:
        """The path relative to root; raises RowError for one that would leave the folder.

        Only names are judged here, so `..` and URLs stay out; symbolic links are judged when the file is read.
        """
        if "://" in path or "\0" in path:
            raise RowError("file_refused", "must be the path of a local file; a row cannot name a URL", field=field)
        if self.folder is None or self.root is None:
            raise RowError("file_refused", "this manifest has no folder for documents; pass --media-root", field=field)
        full = os.path.normpath(os.path.join(self.folder, path))
        if not full.startswith(os.path.join(self.folder, "")):
            message = "the path leaves the manifest's folder; move the file, or pass --media-root"
            raise RowError("file_refused", message, field=field)
        return os.path.relpath(full, self.root)

    def stamp(self, path: str, field: str) -> tuple[int, int]:
        """Size and time of change (mtime_ns) of a located file. Raises RowError if it is missing or not a file."""
        assert self.root is not None, "only located paths have stamps"
        try:
            status = os.stat(os.path.join(self.root, path))
        except (FileNotFoundError, NotADirectoryError):
            raise RowError("file_missing", "there is no such file", field=field) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "the path is not valid"
            raise RowError("file_refused", f"the file cannot be read: {reason}", field=field) from None
        if not stat.S_ISREG(status.st_mode):
            raise RowError("file_refused", "must be a regular file", field=field)
        return status.st_size, status.st_mtime_ns
