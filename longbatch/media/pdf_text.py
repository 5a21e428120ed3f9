"""The text of a PDF file, read by pypdf in a limited child process: PDFs are programs of a kind, and some never end."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

from longbatch.errors import RowError
from longbatch.sandbox import SandboxError, run_limited

_SECONDS = 120.0
_MEMORY_BYTES = 2 << 30
_LARGEST_TEXT = 256 << 20
_CONVERT = "convert it first: pdftotext FILE.pdf FILE.txt"


def pdf_text(data: bytes, field: str) -> str:
    """The text of all pages, a form feed between them. Raises RowError: unsupported_media without pypdf, and
    undecodable_text for a file that cannot be read, or not in time, or holds no text."""
    if importlib.util.find_spec("pypdf") is None:
        message = f"the document is a PDF file; pip install 'longbatch[documents]', or {_CONVERT}"
        raise RowError("unsupported_media", message, field=field)
    with tempfile.TemporaryDirectory(prefix="longbatch-") as folder:
        pdf, text = Path(folder, "document.pdf"), Path(folder, "document.txt")
        pdf.write_bytes(data)
        try:
            run_limited(
                "longbatch.media.pdf_text:extract",
                {"pdf": str(pdf), "text": str(text)},
                seconds=_SECONDS,
                memory_bytes=_MEMORY_BYTES,
                max_file_bytes=_LARGEST_TEXT,
            )
        except SandboxError as error:
            message = f"the PDF file cannot be read ({type(error).__name__}); {_CONVERT}"
            raise RowError("undecodable_text", message, field=field) from None
        found = text.read_text(encoding="utf-8")
    if not found.strip("\f\n "):
        message = "the PDF file holds no text, perhaps only scanned pages; run OCR on it first"
        raise RowError("undecodable_text", message, field=field)
    return found


def extract(pdf: str, text: str) -> None:
    """Write the text of a PDF file to a file. Runs in the child."""
    from pypdf import PdfReader

    with open(text, "w", encoding="utf-8", errors="replace") as file:
        for number, page in enumerate(PdfReader(pdf).pages):
            file.write(("\f" if number else "") + page.extract_text())
