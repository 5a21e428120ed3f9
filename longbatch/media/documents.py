"""Text of documents: plain text, Markdown, the visible text of HTML, and of PDF where pypdf is installed."""

from __future__ import annotations

import codecs
import os
import re
import stat
from pathlib import Path

from longbatch.core import MediaRef
from longbatch.errors import RowError
from longbatch.media.html_text import declared_encoding, html_text
from longbatch.media.pdf_text import pdf_text

_HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})
_HTML_START = re.compile(r"\s*(?:<!--.*?-->\s*)?<(?:!doctype\s+html|html)\b", re.IGNORECASE | re.DOTALL)

# First bytes of formats that are often taken for text -> what turns them into text.
_CONVERTERS = {
    b"PK\x03\x04": "a zip file (docx, odt, epub?); convert it first: pandoc FILE -t plain -o FILE.txt",
    b"\xd0\xcf\x11\xe0": "an old Office file; convert it first: soffice --convert-to txt FILE",
    b"\x1f\x8b": "a gzip file; decompress it first: gunzip FILE",
    b"\x28\xb5\x2f\xfd": "a zstd file; decompress it first: unzstd FILE",
    b"{\\rtf": "an RTF file; convert it first: pandoc FILE -t plain -o FILE.txt",
}
# Longest first: the mark of UTF-32 begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Control characters that no text holds: all but tab, line ends, form feed and escape.
_BINARY = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f]")
_SAMPLE_BYTES = 64 << 10


def load_document(ref: MediaRef, root: Path | None, max_bytes: int) -> str:
    """The text of a document.

    ref: kind `document`. root: the only folder from which a path may be read. max_bytes: largest file.
    Raises RowError: file_missing, file_refused, file_too_large, unsupported_media, undecodable_text, io_error.
    """
    if ref.data is not None:
        data, suffix = ref.data, ""
        if len(data) > max_bytes:
            raise _too_large(len(data), max_bytes, ref.field)
    elif ref.path is not None:
        data, suffix = _read_below(root, ref.path, max_bytes, ref.field), os.path.splitext(ref.path)[1].lower()
    else:
        raise ValueError("a MediaRef has a path or data")

    if data.startswith(b"%PDF-"):
        return pdf_text(data, ref.field)
    for magic, what in _CONVERTERS.items():
        if data.startswith(magic):
            raise RowError("unsupported_media", f"the document is {what}", field=ref.field)
    may_be_html = suffix in _HTML_SUFFIXES or not suffix
    text = decode_text(data, ref.field, declared_encoding(data) if may_be_html else None)
    if suffix in _HTML_SUFFIXES or (may_be_html and _HTML_START.match(text)):
        return html_text(text)
    return text


def decode_text(data: bytes, field: str, declared: str | None = None) -> str:
    """Bytes as text: by byte order mark, else UTF-8, UTF-16 without a mark, `declared`, or cp1252.

    Line ends become line feeds. Raises RowError undecodable_text.
    """
    encoding = _encoding_by_zeros(data, field)
    try:
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            if encoding != "utf-8" or _BINARY.search(data) is not None:
                raise
            text = data.decode(declared or "cp1252")
    except UnicodeError:
        message = "not text in UTF-8, UTF-16 or cp1252; convert it to UTF-8"
        raise RowError("undecodable_text", message, field=field) from None
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _encoding_by_zeros(data: bytes, field: str) -> str:
    """A Unicode encoding, from the byte order mark or from where zero bytes stand: ASCII text in UTF-16 is valid
    UTF-8, full of null characters."""
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return encoding
    sample = data[:_SAMPLE_BYTES]
    if b"\0" not in sample:
        return "utf-8"
    even, odd = sample[0::2].count(0), sample[1::2].count(0)
    if len(data) % 2 == 0 and max(even, odd) > len(sample) // 8 and min(even, odd) <= len(sample) // 128:
        return "utf-16-le" if odd > even else "utf-16-be"
    raise RowError("undecodable_text", "not text: it holds null bytes; convert it to text first", field=field)


def _read_below(root: Path | None, path: str, max_bytes: int, field: str) -> bytes:
    """The content of a regular file below root, whatever links there are on the way and whoever changes them."""
    if root is None:
        raise RowError("file_refused", "there is no folder for documents; pass --media-root", field=field)
    if "\0" in path:
        raise RowError("file_refused", "a path must not hold a null character", field=field)
    real_root = os.path.realpath(root)
    real_path = os.path.realpath(os.path.join(real_root, path))
    if not real_path.startswith(os.path.join(real_root, "")):
        raise RowError("file_refused", "the path leads out of the document folder; see --media-root", field=field)
    try:
        file = _open_below(real_root, os.path.relpath(real_path, real_root))
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise RowError("file_refused", "must be a regular file", field=field)
            if status.st_size > max_bytes:
                raise _too_large(status.st_size, max_bytes, field)
            with os.fdopen(file, "rb", closefd=False) as stream:
                data = stream.read(max_bytes + 1)
        finally:
            os.close(file)
    except (FileNotFoundError, NotADirectoryError):
        raise RowError("file_missing", "there is no such file", field=field) from None
    except PermissionError:
        raise RowError("file_refused", "this user may not read the file", field=field) from None
    except OSError as error:
        raise RowError("io_error", f"the file cannot be read: {error.strerror}", field=field) from None
    if len(data) > max_bytes:  # it has grown since fstat
        raise _too_large(len(data), max_bytes, field)
    return data


def _open_below(root: str, relative: str) -> int:
    """Opens step by step without following links: `relative` is resolved, so a link means that someone has changed
    the folder since then. O_NONBLOCK keeps a named pipe from blocking."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        *parents, name = relative.split(os.sep)
        for parent in parents:
            step = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = step
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)


def _too_large(size: int, max_bytes: int, field: str) -> RowError:
    return RowError("file_too_large", f"the document has {size} bytes, and the limit is {max_bytes}", field=field)
