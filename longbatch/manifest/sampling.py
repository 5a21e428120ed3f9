"""Sampling fields of a row, under all the names that the dialects give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from longbatch.errors import RowError
from longbatch.manifest import fields

MOST_TOKENS = 2**31 - 1
MOST_LOGPROBS = 20
MOST_SAMPLES = 1000


def _max_tokens(value: Any, field: str) -> int:
    return fields.integer(value, field, 1, MOST_TOKENS)


def _top_k(value: Any, field: str) -> int:
    return max(0, fields.integer(value, field, -1, MOST_TOKENS))  # -1 is "off" elsewhere


def _logprobs(value: Any, field: str) -> int | None:
    if isinstance(value, bool):
        return 0 if value else None
    return fields.integer(value, field, 0, MOST_LOGPROBS)


def _token_ids(value: Any, field: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise fields.wrong_type("a list of token ids", value, field)
    return tuple(fields.integer(item, f"{field}[{index}]", 0, MOST_TOKENS) for index, item in enumerate(value))


# Field of `Sampling` -> how its value is checked.
_READERS: dict[str, Callable[[Any, str], Any]] = {
    "max_tokens": _max_tokens,
    "temperature": lambda value, field: fields.number(value, field, 0.0),
    "top_k": _top_k,
    "top_p": lambda value, field: fields.number(value, field, 0.0, 1.0, above=True),
    "min_p": lambda value, field: fields.number(value, field, 0.0, 1.0),
    "repetition_penalty": lambda value, field: fields.number(value, field, 0.0, above=True),
    "seed": lambda value, field: fields.integer(value, field, -(2**63), 2**63 - 1),
    "stop": fields.texts,
    "stop_token_ids": _token_ids,
    "logprobs": _logprobs,
}
_ALIASES = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens", "stop_sequences": "stop"}

SAMPLING_NAMES = frozenset(_READERS) | frozenset(_ALIASES) | {"top_logprobs"}


def read_sampling(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields of `Sampling` that `values` sets. Raises RowError; two names that disagree are ambiguous."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if value is None or name not in SAMPLING_NAMES or name == "top_logprobs":
            continue
        target = _ALIASES.get(name, name)
        merge_sampling(found, {target: _READERS[target](value, prefix + name)}, prefix)
    if values.get("top_logprobs") is not None:
        _count_alternatives(found, values, prefix)
    return found


def _count_alternatives(found: dict[str, Any], values: Mapping[str, Any], prefix: str) -> None:
    """OpenAI's pair: `logprobs` switches log-probabilities on, `top_logprobs` counts the alternatives."""
    count = fields.integer(values["top_logprobs"], prefix + "top_logprobs", 0, MOST_LOGPROBS)
    if found.get("logprobs") is None:
        raise RowError("invalid_value", "needs logprobs to be true", field=prefix + "top_logprobs")
    found["logprobs"] = max(count, found["logprobs"])


def merge_sampling(into: dict[str, Any], more: Mapping[str, Any], prefix: str = "") -> None:
    """Adds `more`; raises RowError where both set one field to different values."""
    for name, value in more.items():
        if into.setdefault(name, value) != value:
            raise RowError("ambiguous_row", f"`{name}` is given twice with different values", field=prefix + name)


def read_num_samples(value: Any, field: str) -> int:
    """`n`: how many answers the row asks for."""
    return 1 if value is None else fields.integer(value, field, 1, MOST_SAMPLES)
