"""Types of carried columns, found as values come: JSON has no schema, and row 700,000 may differ from row 1.

A column starts at the type of its first values and widens when later ones do not fit: integers to floats,
anything else to text, in which strings stay as they are and other values are written as JSON. Parts written
before and after a widening differ in schema; `unify` gives the merged type, and `cast` brings both to it.
"""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from longbatch.output.schema import carried_name

SCALARS: dict[type, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.large_string(),
    bytes: pa.large_binary(),
}
INFERRED = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)


def clean_text(value: str) -> str:
    """The string without lone surrogates, which no UTF-8 column can hold."""
    return value.encode("utf-8", "replace").decode("utf-8")


def as_text(value: Any) -> str | None:
    """A value of a mixed column as text: strings as they are, everything else as JSON."""
    if value is None:
        return None
    if isinstance(value, str):
        return clean_text(value)
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    except orjson.JSONEncodeError:  # integers beyond 64 bits, lone surrogates inside a nested value
        return json.dumps(value, default=str, separators=(",", ":"))


def unify(left: pa.DataType, right: pa.DataType) -> pa.DataType:
    """The narrowest type that holds both."""
    if left == right or pa.types.is_null(right):
        return left
    if pa.types.is_null(left):
        return right
    if {left, right} == {pa.int64(), pa.float64()}:
        return pa.float64()
    return pa.large_string()


def infer(values: Sequence[Any]) -> pa.DataType:
    """The type of some JSON or Parquet values; nested and mixed ones become text."""
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        return pa.null()
    if kinds == {int, float}:
        return pa.float64()
    if len(kinds) == 1:
        kind = kinds.pop()
        if kind in SCALARS:
            return SCALARS[kind]
        if issubclass(kind, INFERRED):
            inferred: pa.DataType = pa.array(values).type
            return inferred
    return pa.large_string()


def cast(column: pa.Array, target: pa.DataType) -> pa.Array:
    """A carried column in the type that `unify` chose for it."""
    if column.type == target:
        return column
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), target)
    if target == pa.large_string():
        return pa.array([as_text(value) for value in column.to_pylist()], pa.large_string())
    return pc.cast(column, target, safe=False)


class CarriedColumns:
    """The carried columns of one writer and their types so far.

    schema: types known beforehand (a Parquet manifest); None where they are to be found.
    """

    def __init__(self, schema: pa.Schema | None = None) -> None:
        self._types: dict[str, pa.DataType] = {field.name: _large(field.type) for field in schema or ()}

    def arrays(self, rows: Sequence[dict[str, Any]]) -> tuple[list[pa.Field], list[pa.Array]]:
        """Fields and columns of these rows, widening types where a value asks for it."""
        for name in dict.fromkeys(name for row in rows for name in row):
            self._types.setdefault(name, pa.null())
        fields, columns = [], []
        for name in self._types:
            column = self._column(name, [row.get(name) for row in rows])
            fields.append(pa.field(carried_name(name), column.type))
            columns.append(column)
        return fields, columns

    def _column(self, name: str, values: list[Any]) -> pa.Array:
        known = self._types[name]
        wanted = known if _is_declared(known) else unify(known, infer(values))
        try:
            if wanted == pa.large_string():
                column = pa.array([as_text(value) for value in values], wanted)
            else:
                column = pa.array(values, wanted)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            column = pa.array([as_text(value) for value in values], pa.large_string())
        self._types[name] = column.type
        return column


def _large(kind: pa.DataType) -> pa.DataType:
    """The kind of text or bytes column without a 2 GiB limit."""
    if pa.types.is_string(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary(kind) else kind


def _is_declared(known: pa.DataType) -> bool:
    """Whether a type can only come from a Parquet schema, so that values are to be tried against it."""
    return not pa.types.is_null(known) and known not in SCALARS.values()


def unify_fields(schemas: Iterable[list[pa.Field]]) -> list[pa.Field]:
    """One list of carried fields for parts that differ; a column without any value becomes text."""
    types: dict[str, pa.DataType] = {}
    for fields in schemas:
        for field in fields:
            types[field.name] = unify(types[field.name], field.type) if field.name in types else field.type
    return [pa.field(name, pa.large_string() if pa.types.is_null(kind) else kind) for name, kind in types.items()]
