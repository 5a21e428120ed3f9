"""The files of a manifest: from paths, folders, globs and URLs to a list of `Source`."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from longbatch.errors import ManifestError

PROTOCOLS = ("file", "s3", "gs", "gcs", "az", "abfs", "hf", "http", "https", "memory")

_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
    ".html": "text",
    ".htm": "text",
}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_ACCEPTED = ".jsonl, .ndjson or .json (each also .gz or .zst), .parquet, .txt, .md, .html"
_DRIVERS = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
}


@dataclass(frozen=True, slots=True)
class Source:
    """One file. uri: an absolute local path, or a URL. kind: jsonl, parquet or text. compression: gzip or zstd.

    size: bytes as stored, mtime_ns: its last change; both 0 where a remote system does not tell.
    """

    uri: str
    kind: str
    size: int
    mtime_ns: int
    compression: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether `uri` is a path."""
        return "://" not in self.uri

    @property
    def name(self) -> str:
        """For messages: the URI without what may be secret in it (a query, a user name)."""
        if self.is_local:
            return os.fsencode(os.path.basename(self.uri)).decode(errors="replace")
        if not self.uri.startswith("http"):
            return self.uri
        parts = urlsplit(self.uri)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def open(self) -> BinaryIO:
        """The stored bytes. Raises OSError."""
        if self.is_local:
            return open(self.uri, "rb", buffering=0)
        filesystem, path = _filesystem(self.uri)
        try:
            return cast(BinaryIO, filesystem.open(path, "rb"))
        except OSError:
            raise
        except Exception as error:  # drivers have exceptions of their own
            raise OSError(type(error).__name__) from error


def find_sources(names: Sequence[str]) -> tuple[Source, ...]:
    """The files that `names` stand for, each once, in the order given and sorted inside a folder or glob.

    Raises ManifestError for what is missing, empty or of no known kind.
    """
    found: dict[str, Source] = {}
    for name in names:
        for source in _find_remote(name) if _is_url(name) else _find_local(name.removeprefix("file://")):
            found.setdefault(source.uri, source)
    if not found:
        raise ManifestError("no manifest was given")
    if all(source.size == 0 and source.is_local and source.kind != "text" for source in found.values()):
        raise ManifestError(f"{', '.join(names)}: the manifest is empty", hint="it needs at least one row")
    return tuple(found.values())


def fingerprint(sources: Sequence[Source]) -> str:
    """A cheap hash over name, size and time of each file: equal means that a stored plan still fits."""
    digest = blake2b(digest_size=16)
    for source in sources:
        digest.update(f"{source.uri}\0{source.size}\0{source.mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _kind(name: str) -> tuple[str, str | None] | None:
    stem, suffix = os.path.splitext(name.lower())
    compression = _COMPRESSIONS.get(suffix)
    kind = _KINDS.get(os.path.splitext(stem)[1] if compression else suffix)
    return None if kind is None or (compression and kind != "jsonl") else (kind, compression)


def _need_kind(name: str) -> tuple[str, str | None]:
    kind = _kind(name)
    if kind is None:
        raise ManifestError(f"{name}: not a kind of file that longbatch reads", hint=f"it reads {_ACCEPTED}")
    return kind


def _choose(paths: Iterator[str] | list[str]) -> list[str]:
    """The files of a folder that are manifest files; text files count only where there are no others, because
    beside a manifest they are its documents. Names that start with `.` or `_` are skipped, as table readers do."""
    visible = sorted(path for path in paths if os.path.basename(path)[:1] not in (".", "_"))
    tables = [path for path in visible if (kind := _kind(path)) and kind[0] != "text"]
    return tables or [path for path in visible if _kind(path)]


def _find_local(name: str) -> list[Source]:
    if os.path.isdir(name):
        paths = _choose(os.path.join(folder, file) for folder, file in _walk(name))
        if not paths:
            raise ManifestError(f"{name}: the folder holds no manifest", hint=f"longbatch reads {_ACCEPTED}")
    elif not os.path.lexists(name) and glob.has_magic(name):
        paths = sorted(path for path in glob.glob(name, recursive=True) if not os.path.isdir(path))
        if not paths:
            raise ManifestError(f"{name}: no file matches")
    else:
        paths = [name]
    return [_local_source(path) for path in paths]


def _walk(folder: str) -> Iterator[tuple[str, str]]:
    for parent, folders, files in os.walk(folder):
        folders[:] = [child for child in folders if child[:1] not in (".", "_")]
        for file in files:
            yield parent, file


def _local_source(path: str) -> Source:
    try:
        status = os.stat(path)
    except OSError as error:
        hint = "a dangling symbolic link" if os.path.islink(path) else None
        raise ManifestError(f"{path}: {error.strerror}", hint=hint) from None
    kind, compression = _need_kind(path)
    if not stat.S_ISREG(status.st_mode):
        raise ManifestError(
            f"{path}: not a regular file", hint="rows are read more than once; save them to a file first"
        )
    if not os.access(path, os.R_OK):
        raise ManifestError(f"{path}: not readable by this user")
    return Source(os.path.abspath(path), kind, status.st_size, status.st_mtime_ns, compression)


def _is_url(name: str) -> bool:
    """Checks the protocol against the closed list. Chains such as zip://x::s3://y could reach anything."""
    if "::" in name:
        raise ManifestError(f"{name}: chained URLs are not read", hint="copy the file out of its archive first")
    protocol, separator, _ = name.partition("://")
    if not separator or os.path.lexists(name):
        return False
    if protocol not in PROTOCOLS:
        hint = f"longbatch reads {', '.join(f'{known}://' for known in PROTOCOLS if known != 'memory')}"
        raise ManifestError(f"{protocol}:// is not read", hint=hint)
    return protocol != "file"


def _filesystem(uri: str) -> tuple[Any, str]:
    import fsspec

    protocol = uri.partition("://")[0]
    try:
        filesystem = fsspec.filesystem(protocol)
    except ImportError:
        driver = _DRIVERS.get(protocol, protocol)
        raise ManifestError(f"{protocol}:// needs a driver", hint=f"pip install {driver}") from None
    return filesystem, filesystem._strip_protocol(uri)


def _find_remote(uri: str) -> list[Source]:
    filesystem, path = _filesystem(uri)
    protocol = uri.partition("://")[0]
    try:
        if not protocol.startswith("http") and glob.has_magic(path):
            paths = sorted(filesystem.glob(path))
        elif not protocol.startswith("http") and filesystem.isdir(path):
            paths = _choose(filesystem.find(path))
        else:
            paths = [path]
        if not paths:
            raise ManifestError(f"{uri}: no file matches", hint=f"longbatch reads {_ACCEPTED}")
        return [_remote_source(filesystem, protocol, path) for path in paths]
    except FileNotFoundError:
        raise ManifestError(f"{Source(uri, '', 0, 0).name}: no such file") from None
    except ManifestError:
        raise
    except Exception as error:  # every driver has exceptions of its own
        name = Source(uri, "", 0, 0).name
        raise ManifestError(
            f"{name}: cannot be listed ({type(error).__name__})", hint="check name and access"
        ) from error


def _remote_source(filesystem: Any, protocol: str, path: str) -> Source:
    uri = path if "://" in path else f"{protocol}://{path.lstrip('/') if protocol == 'memory' else path}"
    kind, compression = _need_kind(urlsplit(uri).path if protocol.startswith("http") else uri)
    info = filesystem.info(path)
    changed = next(
        (info[key] for key in ("mtime", "LastModified", "last_modified", "updated", "created") if info.get(key)), 0
    )
    if isinstance(changed, str):
        changed = int.from_bytes(blake2b(changed.encode(), digest_size=7).digest())
    elif isinstance(changed, datetime):
        changed = int(changed.timestamp() * 1e9)
    return Source(uri, kind, int(info.get("size") or 0), int(changed), compression)


def common_prefix(sources: Sequence[Source]) -> str:
    """What the URIs of all sources begin with, whole folders only: the rest names a file among its fellows."""
    if not sources:
        return ""
    first, last = min(source.uri for source in sources), max(source.uri for source in sources)
    # By characters on purpose: commonpath would fold the `//` of a URL.
    return os.path.commonprefix([first, last]).rpartition("/")[0] + "/"  # noqa: RUF071


def common_folder(sources: Sequence[Source]) -> Path | None:
    """The deepest folder that holds all local files; None if there is none below `/`, or if any file is remote."""
    if not all(source.is_local for source in sources):
        return None
    folders = {os.path.dirname(source.uri) for source in sources}
    common = os.path.commonpath(folders)
    return Path(common) if len(folders) == 1 or common != os.path.sep else None
