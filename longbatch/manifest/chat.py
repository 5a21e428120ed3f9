"""Chat turns: a list of {role, content}, whose content is text or a list of typed parts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from longbatch.core import MediaRef, Message
from longbatch.errors import RowError
from longbatch.manifest import fields

# Names in manifests -> the role a template knows. `developer` is what newer OpenAI models call `system`.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

TEXT_PARTS = frozenset({"text"})
MEDIA_PARTS = frozenset(
    [
        "image_url",
        "image",
        "input_image",
        "video_url",
        "video",
        "input_video",
        "audio_url",
        "audio",
        "input_audio",
        "file",
        "document",
    ]
)
_HARMLESS = ("cache_control",)


def read_messages(value: Any, field: str, *, ignore_unsupported: bool) -> tuple[Message, ...]:
    """The turns of `messages` (a list, or a JSON string of one). Raises RowError."""
    value = fields.from_json(value, field)
    if not isinstance(value, list):
        raise fields.wrong_type("a list of messages", value, field)
    if not value:
        raise RowError("empty_messages", "there is no message; give at least one user turn", field=field)
    messages = tuple(_read_message(item, f"{field}[{index}]", ignore_unsupported) for index, item in enumerate(value))
    if not any(part for message in messages for part in message.parts):
        raise RowError("empty_messages", "no message holds any text", field=field)
    return messages


def _read_message(value: Any, field: str, ignore_unsupported: bool) -> Message:
    if not isinstance(value, dict):
        raise fields.wrong_type("an object with role and content", value, field)
    role = value.get("role")
    if role is None:
        raise RowError("missing_field", "a message needs a role", field=f"{field}.role")
    role = ROLES.get(fields.text(role, f"{field}.role"))
    if role is None:
        raise RowError("unknown_role", f"the role is not one of {', '.join(ROLES)}", field=f"{field}.role")
    fields.refuse_unsupported(
        value, ("role", "content", "name"), _HARMLESS, ignore=ignore_unsupported, prefix=f"{field}."
    )
    name = value.get("name")
    if name is not None:
        fields.text(name, f"{field}.name")
    parts = read_content(value.get("content"), f"{field}.content", ignore_unsupported=ignore_unsupported)
    return Message(role, parts, name)


def read_content(
    value: Any, field: str, *, ignore_unsupported: bool, allowed: Collection[str] = TEXT_PARTS
) -> tuple[str | MediaRef, ...]:
    """The parts of a message's content, text merged with the text beside it."""
    if isinstance(value, str):
        return (value,)
    if value is None:
        raise RowError("missing_field", "a message needs content", field=field)
    if not isinstance(value, list):
        raise fields.wrong_type("text or a list of parts", value, field)
    return (
        "".join(_read_text_part(part, f"{field}[{i}]", ignore_unsupported, allowed) for i, part in enumerate(value)),
    )


def _read_text_part(part: Any, field: str, ignore_unsupported: bool, allowed: Collection[str]) -> str:
    if not isinstance(part, dict):
        raise fields.wrong_type("a part such as {type: text, text: ...}", part, field)
    kind = part.get("type")
    if kind is None:
        raise RowError("missing_field", "a part needs a type", field=f"{field}.type")
    fields.text(kind, f"{field}.type")
    if kind in MEDIA_PARTS:
        raise unsupported_media(field)
    if kind not in allowed:
        raise RowError("unknown_part", "longbatch does not know parts of this type; give text", field=f"{field}.type")
    fields.refuse_unsupported(part, ("type", "text"), _HARMLESS, ignore=ignore_unsupported, prefix=f"{field}.")
    text = part.get("text")
    if text is None:
        raise RowError("missing_field", "a text part needs its text", field=f"{field}.text")
    return fields.text(text, f"{field}.text")


def unsupported_media(field: str) -> RowError:
    """The error for a picture, film or sound. It is never dropped: the answer would be confidently wrong."""
    return RowError("unsupported_media", "the model reads text only; remove this input", field=field)


def with_system(messages: tuple[Message, ...], row: str | None, default: str | None, field: str) -> tuple[Message, ...]:
    """Adds a system turn in front: the row's own, else the run's where the chat brings none."""
    has_system = any(message.role == "system" for message in messages)
    if row is not None:
        if has_system:
            raise RowError("ambiguous_row", "the row has a system text and a system turn; keep one", field=field)
        return (Message("system", (row,)), *messages)
    if default is None or has_system:
        return messages
    return (Message("system", (default,)), *messages)
