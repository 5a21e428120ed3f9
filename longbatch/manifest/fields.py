"""Checked reading of single values: each function returns the value in its one form or raises RowError.

Messages name the field and the kind of value found, never the value itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import orjson

from longbatch.errors import RowError

_KINDS = {
    str: "text",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "a list",
    tuple: "a list",
    dict: "an object",
    bytes: "bytes",
    type(None): "null",
}


def describe(value: object) -> str:
    """The kind of a value in words, for messages."""
    return _KINDS.get(type(value), type(value).__name__)


def wrong_type(wanted: str, value: object, field: str, mend: str = "") -> RowError:
    """The error for a value of another type."""
    return RowError("invalid_type", f"must be {wanted}, got {describe(value)}{mend and '; '}{mend}", field=field)


def text(value: Any, field: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise wrong_type("text", value, field, "cast the column to string" if isinstance(value, bytes) else "")
    return value


def integer(value: Any, field: str, low: int, high: int) -> int:
    """An integer in low..high; 3.0 counts as one, since data frames write integers beside nulls that way."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        if isinstance(value, float) and not math.isfinite(value):
            raise not_finite(field)
        raise wrong_type("an integer", value, field)
    if not low <= value <= high:
        raise RowError("invalid_value", f"must be from {low} to {high}", field=field)
    return value


def number(value: Any, field: str, low: float, high: float = math.inf, above: bool = False) -> float:
    """A finite number in low..high, or above low."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong_type("a number", value, field)
    result = float(value)
    if not math.isfinite(result):
        raise not_finite(field)
    if not low <= result <= high or (above and result == low):
        span = f"above {low:g}" if above else f"at least {low:g}"
        raise RowError(
            "invalid_value", f"must be {span}" + (f" and at most {high:g}" if high < math.inf else ""), field=field
        )
    return result


def not_finite(field: str | None) -> RowError:
    """The error for NaN and Infinity, in a table or where JSON does not allow them."""
    return RowError("invalid_value", "must be finite: NaN and Infinity are not values; write null instead", field=field)


def texts(value: Any, field: str) -> tuple[str, ...]:
    """A list of non-empty strings; one string counts as a list of one."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise wrong_type("text or a list of text", value, field)
    for index, item in enumerate(value):
        if not text(item, f"{field}[{index}]"):
            raise RowError("invalid_value", "must not be empty", field=f"{field}[{index}]")
    return tuple(value)


def mapping(value: Any, field: str) -> dict[str, Any]:
    """An object, or a JSON string of one (tables often hold it so)."""
    value = from_json(value, field)
    if not isinstance(value, dict):
        raise wrong_type("an object", value, field)
    return value


def from_json(value: Any, field: str) -> Any:
    """The value, parsed if it is a string."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        message = f"the text is not JSON: {error.msg} at character {error.pos}"
        raise RowError("invalid_json", message, field=field) from None


def is_off(value: Any) -> bool:
    """Whether a field's value asks for nothing, so that a reader which cannot honour it may accept it."""
    return value is None or value is False or value in ((), [], {}, "", 0)


def refuse_unsupported(
    values: Mapping[str, Any],
    supported: Collection[str],
    harmless: Collection[str] = (),
    off: Mapping[str, Collection[object]] | None = None,
    *,
    ignore: bool,
    prefix: str,
) -> None:
    """Raises RowError for the first field that would change the answer and is not supported.

    harmless: fields that change nothing. off: further values, by field, that ask for nothing.
    """
    if ignore:
        return
    for name, value in values.items():
        if name in supported or name in harmless or is_off(value):
            continue
        if off and name in off and value in off[name]:
            continue
        near = nearest(name, supported)
        mend = f"did you mean `{near}`?" if near else "remove it, or pass --ignore-unsupported to drop it"
        raise RowError("unsupported_field", f"longbatch does not support this field; {mend}", field=prefix + name)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is probably a slip of, or None."""
    plain = {known_name.replace("_", ""): known_name for known_name in known if len(known_name) > 3}
    matches = get_close_matches(name.lower().replace("_", "").replace("-", ""), plain, n=1, cutoff=0.86)
    return plain[matches[0]] if matches else None
