"""PDF documents: text in page order; damage, missing text and a missing reader are row errors."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from longbatch.core import MediaRef
from longbatch.errors import RowError
from longbatch.media import load_document


def make_pdf(pages: list[str]) -> bytes:
    """A PDF file with one line of text a page, written by hand."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"
        resources = "/MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >>"
        objects.append(f"<< /Type /Page /Parent 2 0 R {resources} /Contents {5 + 2 * i} 0 R >>")
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    content, places = "%PDF-1.4\n", []
    for number, item in enumerate(objects, 1):
        places.append(len(content))
        content += f"{number} 0 obj\n{item}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    head = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    tail = f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(content)}\n%%EOF\n"
    return f"{content}{head}{tail}".encode()


def load(data: bytes) -> str:
    return load_document(MediaRef("document", None, data, "document_path"), None, 1 << 20)


def test_text_of_all_pages(tmp_path: Path) -> None:
    (tmp_path / "book.pdf").write_bytes(make_pdf(["The first page", "The second page"]))
    text = load_document(MediaRef("document", "book.pdf", None, "document_path"), tmp_path, 1 << 20)
    assert [page.strip() for page in text.split("\f")] == ["The first page", "The second page"]


def test_without_text() -> None:
    with pytest.raises(RowError, match="holds no text") as caught:
        load(make_pdf([""]))
    assert caught.value.type == "undecodable_text"


@pytest.mark.parametrize("kept", [9, 300])
def test_damaged(kept: int) -> None:
    with pytest.raises(RowError) as caught:
        load(make_pdf(["text"])[:kept])
    assert caught.value.type == "undecodable_text"


def test_without_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RowError, match=r"pip install 'longbatch\[documents\]'") as caught:
        load(make_pdf(["text"]))
    assert caught.value.type == "unsupported_media"
