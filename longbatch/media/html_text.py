"""The visible text of an HTML document, in time proportional to its length whatever is in it.

The standard library's parser takes quadratic time on some damaged pages; this one only ever moves forward.
"""

from __future__ import annotations

import codecs
import re
from html import unescape

# A tag ends at the first `>` outside quotes; at the end of the document everything open is closed.
_MARKUP = re.compile(
    r"""<!--.*?(?:--!?>|\Z)
      | <[!?][^>]*(?:>|\Z)
      | <(?P<close>/?)(?P<name>[a-zA-Z][^\s/>]*)(?P<attributes>(?:[^>"']++|"[^"]*(?:"|\Z)|'[^']*(?:'|\Z))*+)(?:>|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)
# Matches at every name, so that no input makes it start over.
_ATTRIBUTE = re.compile(r"""([^\s"'>/=]++)(?:\s*+=\s*+("[^"]*"?|'[^']*'?|[^\s"']*+))?""")
_NO_DISPLAY = re.compile(r"display\s*+:\s*+none")
_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([a-zA-Z0-9_.:-]{1,40})""", re.IGNORECASE)

# Latin-1 and ASCII, and codecs of Python's own, which may give half surrogate pairs.
_NOT_OF_PAGES = frozenset({"iso8859-1", "ascii", "unicode-escape", "raw-unicode-escape", "punycode", "idna"})

# Content that a browser does not parse: it ends at its own end tag only.
_RAW = frozenset({"script", "style", "textarea", "title", "noembed", "noframes", "xmp", "iframe"})
_FOREIGN = frozenset({"svg", "math"})
_INVISIBLE = frozenset({"script", "style", "title", "noembed", "noframes", "iframe", "head", "template"}) | _FOREIGN
_VOID = frozenset(
    {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
)
_PARAGRAPH = frozenset(
    {"p", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "pre", "ul", "ol", "dl", "table", "figure", "article"}
    | {"section", "header", "footer", "main", "nav", "aside", "hr", "form", "fieldset", "details"}
)
_LINE = frozenset(
    {"br", "div", "li", "dt", "dd", "tr", "caption", "figcaption", "address", "option", "summary", "body", "legend"}
)
# Elements that the next one of their name ends.
_OPEN_ENDED = frozenset({"p", "li", "dt", "dd", "tr", "td", "th", "option"})
_CELL = frozenset({"td", "th"})

_SPACES = re.compile(r"[ \t\n\f\r]+")
_MANY_BREAKS = re.compile(r"\n{3,}")


def declared_encoding(data: bytes) -> str | None:
    """The encoding that a page names in its first KiB, if Python knows it as one of text."""
    match = _CHARSET.search(data[:1024])
    if match is None:
        return None
    try:
        codec = codecs.lookup(match.group(1).decode("ascii"))
        # Browsers read Latin-1 and ASCII as cp1252. A page in UTF-8 or UTF-16 has been recognised before.
        if codec.name in _NOT_OF_PAGES or codec.name.startswith("utf"):
            return "cp1252"
        b"a".decode(codec.name)  # refuses codecs that are not of text, such as base64
    except (LookupError, ValueError):
        return None
    return codec.name


def html_text(page: str) -> str:
    """What a reader sees: no markup, scripts, styles, head or hidden elements; blocks on lines of their own.

    Paragraphs are set apart by an empty line, table cells by a tab; `pre` keeps its line breaks.
    """
    text = _VisibleText()
    position = 0
    while (start := page.find("<", position)) >= 0:
        text.add(page[position:start])
        tag = _MARKUP.match(page, start)
        if tag is None:  # a lone `<` is text
            text.add("<")
            position = start + 1
            continue
        position = tag.end()
        if tag["name"] is None:
            continue
        name = tag["name"].lower()
        if tag["close"]:
            text.end(name)
        elif name in _RAW:
            end = re.compile(rf"</{name}(?=[\s/>]|\Z)", re.IGNORECASE).search(page, position)
            content_end = end.start() if end else len(page)
            if name not in _INVISIBLE:
                text.add(page[position:content_end])
            position = content_end
        else:
            text.start(name, tag["attributes"])
    text.add(page[position:])
    return text.result()


class _VisibleText:
    """Collects text as elements open and close."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._num_pre = 0
        self._hidden: str | None = None  # name of the outermost invisible element that is open
        self._depth = 0  # open elements of that name, itself included

    def add(self, text: str) -> None:
        if self._hidden is not None or not text:
            return
        text = unescape(text)
        if not self._num_pre:
            text = _SPACES.sub(" ", text)
            if text[:1] == " " and (not self._pieces or self._pieces[-1][-1] in " \t\n"):
                text = text[1:]
        if text:
            self._pieces.append(text)

    def start(self, name: str, attributes: str) -> None:
        if self._hidden == name:
            if name not in _OPEN_ENDED:
                self._depth += 1
                return
            self._hidden = None
        elif self._hidden == "head" and name == "body":
            self._hidden = None
        elif self._hidden is not None:
            return
        if name not in _VOID and (name in _INVISIBLE or _is_hidden(attributes)):
            if name not in _FOREIGN or not attributes.endswith("/"):
                self._hidden, self._depth = name, 1
            return
        if name == "pre":
            self._num_pre += 1
        self._break(name)
        if name in _CELL and self._pieces and self._pieces[-1][-1] not in "\t\n":
            self._pieces.append("\t")

    def end(self, name: str) -> None:
        if self._hidden is not None:
            if name == self._hidden:
                self._depth -= 1
                if not self._depth:
                    self._hidden = None
            return
        if name == "pre":
            self._num_pre = max(0, self._num_pre - 1)
        self._break(name)

    def result(self) -> str:
        lines = (line.rstrip() for line in "".join(self._pieces).split("\n"))
        return _MANY_BREAKS.sub("\n\n", "\n".join(lines)).strip("\n")

    def _break(self, name: str) -> None:
        if name in _PARAGRAPH:
            self._pieces.append("\n\n")
        elif name in _LINE and self._pieces and (name == "br" or self._pieces[-1][-1] != "\n"):
            self._pieces.append("\n")


def _is_hidden(attributes: str) -> bool:
    attributes = attributes.lower()
    if "hidden" not in attributes and "display" not in attributes:
        return False
    for match in _ATTRIBUTE.finditer(attributes):
        name, value = match.groups()
        if name == "hidden" or (name == "style" and value and _NO_DISPLAY.search(value)):
            return True
    return False
