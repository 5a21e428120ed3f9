"""The `--prompt` template: text with `{column}` places; `{{` and `}}` stand for braces."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from longbatch.core import MediaRef
from longbatch.errors import RowError, UsageError
from longbatch.manifest.fields import describe

_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class PromptTemplate:
    """A parsed template. A column's name is everything between the braces, so odd names work too.

    columns: names in order of first use. Raises UsageError for a lone brace or an empty place.
    """

    def __init__(self, source: str) -> None:
        self._pieces: list[tuple[str, str | None]] = []  # text, then the column that follows it
        text, end = "", 0
        for match in _TOKEN.finditer(source):
            text += source[end : match.start()]
            end = match.end()
            token, column = match.group(), match.group(1)
            if token in ("{{", "}}"):
                text += token[0]
            elif column:
                self._pieces.append((text, column))
                text = ""
            else:
                raise UsageError(
                    f"the prompt template has a lone {token!r} at character {match.start()}",
                    hint="write {{ and }} for braces, {column} for a column",
                )
        self._tail = text + source[end:]
        self.columns = tuple(dict.fromkeys(column for _, column in self._pieces if column))

    def fill(self, values: Mapping[str, Any]) -> tuple[str | MediaRef, ...]:
        """The parts of the user turn. Raises RowError where a column is absent or holds no text."""
        parts: list[str | MediaRef] = []
        text = ""
        for before, column in self._pieces:
            text += before
            value = values.get(column or "")
            if isinstance(value, str):
                text += value
            elif isinstance(value, MediaRef):
                parts += (text, value) if text else (value,)
                text = ""
            elif value is None:
                raise RowError(
                    "missing_field", "the prompt template asks for a column that the row lacks", field=column
                )
            elif isinstance(value, (bool, int, float)):
                text += str(value)
            else:
                raise RowError("invalid_type", f"the prompt template needs text, got {describe(value)}", field=column)
        text += self._tail
        if text:
            parts.append(text)
        return tuple(parts)
