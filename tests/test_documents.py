"""Documents: which files may be read, in which encodings, and what of a page is visible."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from longbatch.core import MediaRef
from longbatch.errors import RowError
from longbatch.media import load_document
from longbatch.media.html_text import html_text

TEXT = "Grüße, naïve façade, “quoted” €5\nsecond line\n"
LIMIT = 1 << 20


def by_path(path: str) -> MediaRef:
    return MediaRef("document", path, None, "document_path")


def by_data(data: bytes) -> MediaRef:
    return MediaRef("document", None, data, "document")


def load(data: bytes) -> str:
    return load_document(by_data(data), None, LIMIT)


def fault(ref: MediaRef, root: Path | None, max_bytes: int = LIMIT) -> str:
    with pytest.raises(RowError) as caught:
        load_document(ref, root, max_bytes)
    assert caught.value.field == ref.field
    return caught.value.type


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252"])
def test_encodings(encoding: str) -> None:
    assert load(TEXT.encode(encoding)) == TEXT


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_of_two_letters_without_a_mark(encoding: str) -> None:
    assert load("ab".encode(encoding)) == "ab"


def test_line_ends_and_empty_documents() -> None:
    assert load(b"a\r\nb\rc\n") == "a\nb\nc\n"
    assert load(b"") == ""


@pytest.mark.parametrize(
    "data",
    [
        b"caf\xe9\x01\x02",  # control characters, not UTF-8
        b"caf\xe9 \x81",  # a byte that cp1252 does not have
        b"text\0text",
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
        "text".encode("utf-16")[:-1],
        bytes(range(256)),
    ],
)
def test_data_that_is_no_text(data: bytes) -> None:
    assert fault(by_data(data), None) == "undecodable_text"


@pytest.mark.parametrize(
    ("data", "mend"),
    [(b"PK\x03\x04...", "pandoc"), (b"\x1f\x8b\x08", "gunzip"), (b"{\\rtf1", "pandoc")],
)
def test_other_formats_name_the_mend(tmp_path: Path, data: bytes, mend: str) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    for ref in (by_data(data), by_path("a.txt")):
        with pytest.raises(RowError, match=mend) as caught:
            load_document(ref, tmp_path, LIMIT)
        assert caught.value.type == "unsupported_media"


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "a", "sub/a.txt", "./sub/../sub/a.txt", "ü.txt"])
def test_files_below_root(tmp_path: Path, name: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / name).write_text(TEXT, encoding="utf-8")
    assert load_document(by_path(name), tmp_path, LIMIT) == TEXT


def test_absolute_path_below_root_and_root_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("x")
    (tmp_path / "link").symlink_to("real")
    assert load_document(by_path("a.txt"), tmp_path / "link", LIMIT) == "x"
    assert load_document(by_path(str(tmp_path / "real" / "a.txt")), tmp_path / "link", LIMIT) == "x"


@pytest.mark.parametrize("name", ["../outside.txt", "link-out.txt", "folder-out/outside.txt", "/etc/passwd", "", "."])
def test_paths_that_leave_root(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "outside.txt").write_text("secret")
    (root / "link-out.txt").symlink_to(tmp_path / "outside.txt")
    (root / "folder-out").symlink_to(tmp_path)
    assert fault(by_path(name), root) == "file_refused"


def test_root_that_is_a_prefix_of_a_sibling(tmp_path: Path) -> None:
    for name in ("root", "root2"):
        (tmp_path / name).mkdir()
    (tmp_path / "root2" / "a.txt").write_text("secret")
    assert fault(by_path("../root2/a.txt"), tmp_path / "root") == "file_refused"


def test_link_inside_root_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").symlink_to("a.txt")
    assert load_document(by_path("b.txt"), tmp_path, LIMIT) == "x"


def test_link_put_in_place_after_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever swaps a folder for a link between check and opening gains nothing."""
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "a.txt").write_text("x")
    (tmp_path / "a.txt").write_text("secret")
    real = os.path.realpath

    def swap(path: str | Path) -> str:
        found = real(path)
        if str(path).endswith("a.txt"):
            (root / "sub").rename(root / "moved")
            (root / "sub").symlink_to(tmp_path)
        return found

    monkeypatch.setattr(os.path, "realpath", swap)
    with pytest.raises(RowError) as caught:
        load_document(by_path("sub/a.txt"), root, LIMIT)
    assert caught.value.type in ("file_missing", "io_error")


@pytest.mark.timeout(10)
def test_files_that_are_not_regular(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "folder.txt").mkdir()
    assert fault(by_path("pipe.txt"), tmp_path) == "file_refused"
    assert fault(by_path("folder.txt"), tmp_path) == "file_refused"


def test_missing_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "dangling.txt").symlink_to("nowhere")
    for name in ("missing.txt", "a.txt/b.txt", "dangling.txt", "no/such/folder.txt"):
        assert fault(by_path(name), tmp_path) == "file_missing"
    assert fault(by_path("a\0b"), tmp_path) == "file_refused"
    assert fault(by_path("a.txt"), None) == "file_refused"


def test_size_limit_is_exact(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    for ref in (by_path("a.txt"), by_data(b"x" * 100)):
        assert len(load_document(ref, tmp_path, 100)) == 100
        assert fault(ref, tmp_path, 99) == "file_too_large"


def test_no_file_stays_open(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "folder.txt").mkdir()
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(20):
        load_document(by_path("a.txt"), tmp_path, LIMIT)
        fault(by_path("a.txt"), tmp_path, 0)
        fault(by_path("folder.txt"), tmp_path)
        fault(by_path("missing.txt"), tmp_path)
    after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    assert after == before


PAGE = """<!DOCTYPE html>
<html><head><meta charset=utf-8><title>Title</title><style>p { color: red }</style></head>
<body><!-- a <b>comment</b> --><script>if (a < b) { document.write("</p>") }</script>
<h1>Head &amp; shoulders</h1><p>One
  line of <b>bold</b> text, 1 < 2.<p hidden>no<p class="hidden md:block">yes
<ul><li>first<li>second</ul>
<table><tr><th>a</th><th>b</th></tr><tr><td>1<td>2</table>
<pre>  kept
    as is</pre><div style="color:red; display : none">gone<div>too</div>gone</div>
<svg/><noscript>plain</noscript><br>last</body></html>"""

SEEN = """Head & shoulders

One line of bold text, 1 < 2.

yes

first
second

a\tb
1\t2

  kept
    as is

plain
last"""


def test_visible_text_of_a_page(tmp_path: Path) -> None:
    for name in ("a.html", "a.HTM"):
        (tmp_path / name).write_text(PAGE)
        assert load_document(by_path(name), tmp_path, LIMIT) == SEEN
    assert load(PAGE.encode("utf-16")) == SEEN
    (tmp_path / "a.txt").write_text(PAGE)
    assert load_document(by_path("a.txt"), tmp_path, LIMIT) == PAGE, "a text file about HTML stays as it is"


def test_declared_encoding_of_a_page() -> None:
    page = '<html><meta http-equiv="Content-Type" content="text/html; charset={}"><p>{}'
    assert load(page.format("koi8-r", "Привет").encode("koi8-r")) == "Привет"
    assert load(page.format("iso-8859-1", "“a”").encode("cp1252")) == "“a”"
    assert load(page.format("base64", "é").encode("cp1252")) == "é"
    assert load(page.format("utf-16", "é").encode("utf-8")) == "é"


@pytest.mark.parametrize(
    ("page", "seen"),
    [
        ("", ""),
        ("no markup", "no markup"),
        ("a&nbsp;b &lt;i&gt; &#8364; &unknown;", "a\xa0b <i> € &unknown;"),
        ("<p>unclosed <b", "unclosed "),
        ("<p>a<!-- never closed", "a"),
        ("a<script>never closed", "a"),
        ("<textarea><b>raw</b></textarea>", "<b>raw</b>"),
        ("<p title='a > b'>c", "c"),
        ("<head><title>t</title><body>b", "b"),
        ("<template><p>a</template>b", "b"),
        ("<div hidden><div>a</div>b</div>c", "c"),
        ("<li hidden>a<li>b", "b"),
        ("<x-tag>a</x-tag>b", "ab"),
        ("a<br><br>b<br/>c", "a\n\nb\nc"),
        ("<p>a</p> <p> b </p>", "a\n\nb"),
    ],
)
def test_odd_pages(page: str, seen: str) -> None:
    assert html_text(page).rstrip() == seen.rstrip()


@pytest.mark.parametrize(
    "piece",
    ["<a ", "<!--", '<a "', "<script>", "<", "&", "<p hidden>", "</", "<b x='", "<p style=", "<![CDATA[", "<pre>"],
)
def test_time_grows_with_length_only(piece: str) -> None:
    page = piece * (1_000_000 // len(piece))
    start = time.perf_counter()
    html_text(page)
    html_text(f"<p {page}>")
    assert time.perf_counter() - start < 5, "a quadratic parser takes minutes"


@pytest.mark.parametrize("entity", ["&#1;", "&#11;", "&#31;", "&#xfffe;"])
def test_entities_that_mean_nothing(entity: str) -> None:
    page = f"<html><td>{entity}</td><p>{entity} text {entity}</p>".encode()
    assert load_document(by_data(page), None, LIMIT).split() == ["text"]


@pytest.mark.parametrize("codec", ["unicode_escape", "raw_unicode_escape", "punycode", "idna"])
def test_pages_cannot_name_codecs_of_pythons_own(codec: str) -> None:
    page = f"<html><meta charset={codec}><p>".encode() + b"caf\xe9 \\ud800"
    text = load_document(by_data(page), None, LIMIT)
    assert "caf\u00e9" in text
    text.encode()
