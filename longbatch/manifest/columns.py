"""Rows whose prompt stands in columns: `prompt` or the `--prompt` template, documents, sampling columns."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from longbatch.core import MediaRef, Message
from longbatch.errors import RowError
from longbatch.manifest import fields
from longbatch.manifest.chat import read_messages, unsupported_media, with_system
from longbatch.manifest.documents import DocumentFolder
from longbatch.manifest.draft import Draft
from longbatch.manifest.options import ManifestOptions
from longbatch.manifest.sampling import SAMPLING_NAMES, merge_sampling, read_num_samples, read_sampling
from longbatch.manifest.template import PromptTemplate

DOCUMENT_NAMES = ("document", "documents", "document_path")
# A template places these as files; text in them is placed as it is.
_PLACED_TYPES: dict[str, tuple[type, ...]] = {"document": (dict,), "documents": (dict,), "document_path": (str, dict)}
_MEDIA_NAMES = ("image", "images", "video", "videos", "audio", "audios")
# OpenAI fields that appear as columns too and would change the answer.
_UNSUPPORTED = [
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "logit_bias",
    "response_format",
    "frequency_penalty",
    "presence_penalty",
]
_OFF = {"tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "response_format": ({"type": "text"},)}

_REFUSED_NAMES = frozenset(_MEDIA_NAMES) | frozenset(_UNSUPPORTED)

COLUMN_NAMES = (
    SAMPLING_NAMES
    | set(DOCUMENT_NAMES)
    | _REFUSED_NAMES
    | {"prompt", "messages", "system", "sampling", "n", "chat_template_kwargs"}
)

# Between documents, and between the last one and the prompt.
SEPARATOR = "\n\n"


def read_chat(values: Mapping[str, Any], options: ManifestOptions) -> Draft:
    """A row with `messages`. Raises RowError."""
    draft = _read_settings(values, options)
    messages = read_messages(values["messages"], "messages", ignore_unsupported=options.ignore_unsupported)
    draft.messages = with_system(messages, _read_system(values), options.system, "system")
    return draft


def read_columns(
    values: Mapping[str, Any], options: ManifestOptions, template: PromptTemplate | None, folder: DocumentFolder
) -> Draft:
    """A row with `prompt`, documents or template columns. Raises RowError.

    Documents stand before the prompt, except those that the template places. A document alone is the prompt.
    """
    draft = _read_settings(values, options)
    placed = template.columns if template else ()
    for name in DOCUMENT_NAMES:
        if name in placed and isinstance(values.get(name), _PLACED_TYPES[name]):
            values = {**values, name: _read_document(values[name], name, folder)}
    parts: list[str | MediaRef] = []
    for name in DOCUMENT_NAMES:
        if name not in placed and values.get(name) is not None:
            _add_documents(parts, values[name], name, folder)
    if template is not None:
        parts += template.fill(values)
    elif values.get("prompt") is not None:
        parts.append(fields.text(values["prompt"], "prompt"))
    elif parts:
        parts.pop()  # the separator after the last document
    else:
        raise RowError(
            "missing_field",
            "the row has none of prompt, messages, document, body and params; add one, or pass --prompt '... {column}'",
            field="prompt",
        )
    # A changed file changes the row's fingerprint.
    files = [part for part in parts if isinstance(part, MediaRef)]
    draft.stamps = [folder.stamp(file.path, file.field) for file in files if file.path is not None]
    draft.messages = with_system((Message("user", _merge_text(parts)),), _read_system(values), options.system, "system")
    return draft


def _read_settings(values: Mapping[str, Any], options: ManifestOptions) -> Draft:
    if not _REFUSED_NAMES.isdisjoint(values):
        _refuse(values, options)
    sampling = read_sampling(values)
    if values.get("sampling") is not None:
        inner = fields.mapping(values["sampling"], "sampling")
        fields.refuse_unsupported(inner, SAMPLING_NAMES, ignore=options.ignore_unsupported, prefix="sampling.")
        merge_sampling(sampling, read_sampling(inner, "sampling."), "sampling.")
    draft = Draft(sampling=sampling, num_samples=read_num_samples(values.get("n"), "n"))
    if values.get("chat_template_kwargs") is not None:
        draft.template_kwargs = fields.mapping(values["chat_template_kwargs"], "chat_template_kwargs")
    return draft


def _refuse(values: Mapping[str, Any], options: ManifestOptions) -> None:
    for name in _MEDIA_NAMES:
        if not fields.is_off(values.get(name)):
            raise unsupported_media(name)
    unsupported = {name: values[name] for name in _UNSUPPORTED if name in values}
    fields.refuse_unsupported(unsupported, (), (), _OFF, ignore=options.ignore_unsupported, prefix="")


def _read_system(values: Mapping[str, Any]) -> str | None:
    system = values.get("system")
    return None if system is None else fields.text(system, "system")


def _add_documents(parts: list[str | MediaRef], value: Any, name: str, folder: DocumentFolder) -> None:
    if name == "documents" and isinstance(value, list):
        items = [(item, f"documents[{index}]") for index, item in enumerate(value)]
    else:
        items = [(value, name)]
    for item, field in items:
        if isinstance(item, str) and name != "document_path":
            parts += (item, SEPARATOR)
        else:
            parts += (_read_document(item, field, folder), SEPARATOR)


def _read_document(value: Any, field: str, folder: DocumentFolder) -> MediaRef:
    """A document given by path, by {path, bytes} (bytes win), or made by the reader of text files."""
    if isinstance(value, MediaRef):
        return value
    path, data = value, None
    if isinstance(value, dict):
        path, data = value.get("path"), value.get("bytes")
    if data is not None:
        return MediaRef("document", None, _read_bytes(data, f"{field}.bytes"), field)
    if path is None:
        raise RowError("missing_field", "a document needs path or bytes", field=field)
    if not isinstance(path, str):
        raise fields.wrong_type("a path, or an object with path or bytes", path, field)
    return MediaRef("document", folder.locate(path, field), None, field)


def _read_bytes(value: Any, field: str) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return base64.b64decode(fields.text(value, field), validate=True)
    except (binascii.Error, ValueError):
        raise RowError("invalid_value", "bytes in JSON must be base64", field=field) from None


def _merge_text(parts: list[str | MediaRef]) -> tuple[str | MediaRef, ...]:
    if all(isinstance(part, str) for part in parts):
        return ("".join(part for part in parts if isinstance(part, str)),)
    merged: list[str | MediaRef] = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        elif part:
            merged.append(part)
    return tuple(merged)
