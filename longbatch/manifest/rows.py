"""From the values of one row, whatever its dialect, to Requests or a Fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import orjson

from longbatch.core import TASKS, Fault, Location, MediaRef, Request, Task
from longbatch.errors import RowError
from longbatch.manifest import anthropic, fields, openai
from longbatch.manifest.columns import COLUMN_NAMES, DOCUMENT_NAMES, read_chat, read_columns
from longbatch.manifest.documents import DocumentFolder
from longbatch.manifest.draft import Draft
from longbatch.manifest.options import ManifestOptions
from longbatch.manifest.template import PromptTemplate

ID_NAMES = ("id", "custom_id", "request_id", "uid", "key")
_TASK_NAMES = frozenset({"task", "continuation", "labels", "pooling"})

# Every column that means something to longbatch; all others are the user's own.
KNOWN_NAMES = frozenset(ID_NAMES) | _TASK_NAMES | COLUMN_NAMES | openai.LINE_NAMES | anthropic.LINE_NAMES

_POOLINGS = ("last", "mean")
_MOST_COLUMNS_WATCHED = 10_000


class RowReader:
    """Turns the values of rows into Requests; one for all files of a manifest.

    It also counts what deserves a warning: column names that are probably slips, and samples of greedy rows.
    """

    def __init__(self, options: ManifestOptions) -> None:
        self.options = options
        self.template = PromptTemplate(options.prompt) if options.prompt is not None else None
        self._defaults = options.defaults
        self._keep = frozenset(options.keep_columns)
        self._all_names = KNOWN_NAMES | self._keep | frozenset(self.template.columns if self.template else ())
        self._watched: dict[str, str | None] = {}
        self._slips: Counter[str] = Counter()
        self._num_greedy_samples = 0

    @property
    def columns(self) -> frozenset[str] | None:
        """The columns that can matter, or None for all: what a reader of tables has to decode."""
        return None if "*" in self._keep else self._all_names

    @property
    def warnings(self) -> list[str]:
        """What was counted since the last `reset`."""
        found = [
            f"column `{name}` is not read; did you mean `{self._watched[name]}`? ({count} rows)"
            for name, count in sorted(self._slips.items())
        ]
        if self._num_greedy_samples:
            count = self._num_greedy_samples
            found.append(f"n > 1 with temperature 0 gives the same answer n times ({count} rows)")
        return found

    def reset(self) -> None:
        """Starts counting warnings anew."""
        self._slips.clear()
        self._num_greedy_samples = 0

    def watch(self, names: Iterable[str], num_rows: int = 1) -> None:
        """Takes note of column names, to warn of those that are probably slips."""
        for name in frozenset(names) - self._all_names:
            near = self._watched.get(name, "")
            if near == "" and len(self._watched) < _MOST_COLUMNS_WATCHED:
                near = self._watched[name] = fields.nearest(name, KNOWN_NAMES)
            if near:
                self._slips[name] += num_rows

    def read(
        self, values: dict[str, Any], row: int, location: Location, folder: DocumentFolder, where: str
    ) -> list[Request | Fault]:
        """All samples of one row, or its Fault. where: the row's place, for messages."""
        id = None
        carried: dict[str, Any] = {}
        try:
            carried = self._carried(values)
            id = read_id(values)
            return self._requests(values, row, id, location, folder, carried)
        except RowError as error:
            return [self.fault(error, values, row, id, location, where, carried)]

    def fault(
        self,
        error: RowError,
        values: dict[str, Any],
        row: int,
        id: str | None,
        location: Location,
        where: str,
        carried: dict[str, Any] | None = None,
    ) -> Fault:
        """The Fault for an error, its message led by the row's place."""
        located = RowError(error.type, f"{where}: {error.message}", field=error.field)
        kind = [error.type, error.message, error.field]
        try:
            digest = _digest([*kind, values])
        except RowError:
            digest = _digest(kind)
        return Fault(row, id, location, located, carried or {}, digest)

    def _requests(
        self,
        values: dict[str, Any],
        row: int,
        id: str | None,
        location: Location,
        folder: DocumentFolder,
        carried: dict[str, Any],
    ) -> list[Request | Fault]:
        draft = self._draft(values, folder)
        task = self._task(values, draft)
        continuation = labels = pooling = None
        if task.name == "score" and values.get("continuation") is not None:
            continuation = fields.text(values["continuation"], "continuation")
        elif task.name == "classify":
            labels = _read_labels(values.get("labels"))
        elif task.name == "embed" and values.get("pooling") is not None:
            pooling = fields.text(values["pooling"], "pooling")
            if pooling not in _POOLINGS:
                raise RowError("invalid_value", f"must be one of {', '.join(_POOLINGS)}", field="pooling")
        sampling = replace(self._defaults, **draft.sampling) if draft.sampling else self._defaults
        if draft.num_samples > 1 and sampling.temperature == 0:
            self._num_greedy_samples += 1
        # Defaults of the run are not the row's: they stand in the run's own identity.
        content = [
            task.name,
            draft.messages,
            draft.text,
            draft.sampling,
            continuation,
            labels,
            pooling,
            draft.template_kwargs,
            draft.stamps,
        ]
        return [
            Request(
                row=row,
                id=id,
                location=location,
                task=task,
                sampling=sampling,
                messages=draft.messages,
                text=draft.text,
                sample=sample,
                continuation=continuation,
                labels=labels or (),
                pooling=pooling or "last",
                template_kwargs=draft.template_kwargs,
                carried=carried,
                fingerprint=_digest(content),
            )
            for sample in range(draft.num_samples)
        ]

    def _draft(self, values: dict[str, Any], folder: DocumentFolder) -> Draft:
        """The dialect is recognised row by row, so one file may mix them."""
        body, params, messages = values.get("body"), values.get("params"), values.get("messages")
        has_custom_id = values.get("custom_id") is not None
        dialects = []
        if isinstance(body, dict) or (body is not None and has_custom_id):
            dialects.append("body")
        if isinstance(params, dict) or (params is not None and has_custom_id):
            dialects.append("params")
        if messages is not None:
            dialects.append("messages")
        if self.template is not None:
            dialects.append("--prompt")
        elif values.get("prompt") is not None:
            dialects.append("prompt")
        if dialects and dialects[0] not in ("--prompt", "prompt"):
            dialects += [name for name in DOCUMENT_NAMES if values.get(name) is not None]
        if len(dialects) > 1:
            raise RowError("ambiguous_row", f"the row is described twice, by {' and by '.join(dialects)}; keep one")
        kind = dialects[0] if dialects else None
        if kind == "body":
            return openai.read_openai(values, self.options)
        if kind == "params":
            return anthropic.read_anthropic(values, self.options)
        if kind == "messages":
            return read_chat(values, self.options)
        return read_columns(values, self.options, self.template, folder)

    def _task(self, values: dict[str, Any], draft: Draft) -> Task:
        name = values.get("task")
        task = TASKS.get(self.options.task if name is None else fields.text(name, "task"))
        if task is None:
            message = f"must be one of {', '.join(TASKS)}; rename the column if it means something else"
            raise RowError("invalid_value", message, field="task")
        if (task.decodes or task.branches) and draft.messages and draft.messages[-1].role == "assistant":
            message = "the last message is the assistant's, so there is nothing to answer; end with a user turn"
            raise RowError("assistant_last", message, field="messages")
        if draft.num_samples > 1 and not task.decodes:
            raise RowError("invalid_value", f"`{task.name}` has one answer; remove n", field="n")
        return task

    def _carried(self, values: dict[str, Any]) -> dict[str, Any]:
        if not self._keep:
            return {}
        everything = "*" in self._keep
        return {
            name: value
            for name, value in values.items()
            if (name in self._keep or (everything and name not in KNOWN_NAMES)) and not isinstance(value, MediaRef)
        }


def read_id(values: dict[str, Any]) -> str | None:
    """The row's id: text, or an integer as text. None where there is none. Raises RowError."""
    for name in ID_NAMES:
        value = values.get(name)
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            message = f"an id must be text or an integer, got {fields.describe(value)}; write it as text"
            raise RowError("invalid_id", message, field=name)
        if not value or "\0" in value or not (value.isascii() or _is_unicode(value)):
            message = "an id must not be empty, hold a null character or half a surrogate pair"
            raise RowError("invalid_id", message, field=name)
        return value
    return None


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_labels(value: Any) -> tuple[str, ...]:
    if value is None:
        raise RowError("missing_field", "classify needs labels, a list of text", field="labels")
    if not isinstance(value, list):
        raise fields.wrong_type("a list of text", value, "labels")
    labels = fields.texts(value, "labels")
    if not labels or len(set(labels)) < len(labels):
        raise RowError("invalid_value", "must hold at least one label, and none twice", field="labels")
    return labels


def _plain(value: object) -> object:
    """What orjson cannot write itself, for fingerprints: bytes by their hash, numbers and times as text."""
    if isinstance(value, bytes):
        return blake2b(value, digest_size=16).hexdigest()
    return repr(value)


def _digest(content: list[Any]) -> bytes:
    try:
        packed = orjson.dumps(content, default=_plain, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except TypeError:
        raise RowError("invalid_value", "the row is nested too deeply") from None
    return blake2b(packed, digest_size=16).digest()
