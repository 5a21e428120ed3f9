"""Typed reading of a model's config.json: numbers checked one by one, rope settings old and new, layer types.

Transformers 5 keeps rope settings in `rope_parameters` (possibly one entry per layer type), older versions in
`rope_theta`, `rope_scaling` and `partial_rotary_factor`; both are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from longbatch.errors import UsageError
from longbatch.models.spec import RopeSpec

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
SLIDING, FULL = "sliding_attention", "full_attention"
_MISSING: Any = object()


class Config:
    """One JSON object of a config.json. Every getter raises `UsageError` naming the key that is absent or odd.

    A key that is absent or null takes the default; without a default it is required.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int = _MISSING, *, least: int = 1) -> int:
        """A whole number of at least `least`."""

        def check(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and least <= value <= 2**40

        return int(self._read(key, default, check, f"a whole number of at least {least}"))

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """A whole number of at least 1; null means None, absent means the default."""
        if key in self.values and self.values[key] is None:
            return None
        return default if key not in self.values else self.integer(key)

    def number(self, key: str, default: float = _MISSING) -> float:
        """A finite number."""
        return float(self._read(key, default, _is_number, "a number"))

    def optional_number(self, key: str) -> float | None:
        """A finite number or None."""
        return self.number(key) if self.has(key) else None

    def flag(self, key: str, default: bool = _MISSING) -> bool:
        """true or false."""
        return bool(self._read(key, default, lambda value: isinstance(value, bool), "true or false"))

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers of at least 0; absent means empty."""
        return tuple(self._read(key, [], _is_index_list, "a list of whole numbers"))

    def numbers(self, key: str, length: int) -> list[float]:
        """A list of exactly `length` finite numbers."""

        def check(value: object) -> bool:
            return isinstance(value, list) and len(value) == length and all(map(_is_number, value))

        return [float(value) for value in self._read(key, _MISSING, check, f"a list of {length} numbers")]

    def section(self, key: str) -> Config:
        """An object within the object."""
        value = self._read(key, _MISSING, lambda value: isinstance(value, dict), "an object")
        return Config(value, f"{self.where}: {key}")

    def activation(self, key: str, default: str = "silu") -> str:
        """The MLP's activation in our naming: silu or gelu_tanh."""
        name = self._read(key, default, lambda value: isinstance(value, str), "a string")
        if name not in ACTIVATIONS:
            raise UsageError(f"{self.where}: {key} {name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def heads(self, default_head_dim: int | None = None) -> tuple[int, int, int]:
        """Attention heads, K/V heads, head dimension."""
        heads = self.integer("num_attention_heads")
        groups = self.integer("num_key_value_heads", heads)
        if heads % groups:
            raise UsageError(f"{self.where}: {heads} attention heads cannot share {groups} key-value heads")
        dim = self.integer("head_dim", default_head_dim or self.integer("hidden_size") // heads)
        return heads, groups, dim

    def layer_types(self, default: Callable[[int], str]) -> tuple[str, ...]:
        """The attention kind of every layer: `layer_types`, else `default(layer number)`."""
        count = self.integer("num_hidden_layers")
        if not self.has("layer_types"):
            return tuple(default(number) for number in range(count))
        types = self.values["layer_types"]
        if not isinstance(types, list) or len(types) != count:
            raise UsageError(f"{self.where}: layer_types must be a list of {count} names")
        unknown = ", ".join(sorted({str(name) for name in types} - {SLIDING, FULL}))
        if unknown:
            raise UsageError(f"{self.where}: layer type {unknown} is not supported; known: {SLIDING}, {FULL}")
        return tuple(types)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of ids; absent or null means none."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not _is_index_list(ids):
            raise UsageError(f"{self.where}: {key} must be a token id or a list of them")
        return tuple(ids)

    def _read(self, key: str, default: Any, check: Callable[[Any], bool], wanted: str) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise UsageError(f"{self.where} lacks {key}")
            return default
        if not check(value):
            raise UsageError(f"{self.where}: {key} must be {wanted}")
        return value


def rope_spec(
    config: Config, head_dim: int, *, theta: float = 10000.0, layer_type: str | None = None, scaling: bool = True
) -> RopeSpec:
    """The rope of one layer type. theta: the family's default base. scaling: whether an old-style `rope_scaling`
    applies to this layer type."""
    entry = _rope_entry(config, layer_type, scaling)
    kind = entry.values.get("rope_type", entry.values.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise UsageError(f"{entry.where}: rope type {kind!r} is not supported; known: {', '.join(ROPE_KINDS)}")
    factor = entry.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    dim = int(head_dim * factor)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise UsageError(f"{entry.where}: cannot rotate {dim} dimensions of a head of {head_dim}")
    max_length = config.integer("max_position_embeddings")
    original = entry.integer("original_max_position_embeddings", max_length)
    original = config.integer("original_max_position_embeddings", original)
    return RopeSpec(
        kind=kind,
        theta=entry.number("rope_theta", theta),
        dim=dim,
        original_length=original,
        max_length=max_length,
        parameters=_scaling(entry, kind, dim, max_length / original),
    )


def _rope_entry(config: Config, layer_type: str | None, scaling: bool) -> Config:
    """The rope settings of a layer type, whichever way the config keeps them, `rope_theta` among them if given."""
    if config.has("rope_parameters"):
        entry = config.section("rope_parameters")
        if layer_type is not None and entry.has(layer_type):
            entry = entry.section(layer_type)
    elif config.has("rope_scaling") and scaling:
        entry = config.section("rope_scaling")
    else:
        entry = Config({}, config.where)
    if entry.has("rope_theta") or not config.has("rope_theta"):
        return entry
    return Config({**entry.values, "rope_theta": config.number("rope_theta")}, entry.where)


def _scaling(entry: Config, kind: str, dim: int, default_factor: float) -> dict[str, float | list[float] | bool]:
    """The numbers that a kind of scaling reads, with transformers' defaults filled in."""
    if kind == "default":
        return {}
    if kind in ("linear", "dynamic"):
        return {"factor": entry.number("factor")}
    if kind == "llama3":
        return {name: entry.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    parameters: dict[str, float | list[float] | bool] = {"factor": entry.number("factor", default_factor)}
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if entry.has(name):
            parameters[name] = entry.number(name)
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            parameters[name] = entry.numbers(name, dim // 2)
    else:
        parameters["beta_fast"] = entry.number("beta_fast", 32.0) or 32.0
        parameters["beta_slow"] = entry.number("beta_slow", 1.0) or 1.0
        parameters["truncate"] = entry.flag("truncate", True)
    return parameters


def longest_sequence(rope: RopeSpec) -> int:
    """Most tokens of a sequence: `max_position_embeddings`, stretched where it states the length before scaling."""
    factor = rope.parameters.get("factor", 1.0)
    assert isinstance(factor, float)
    if rope.kind in ("linear", "dynamic"):
        return int(rope.max_length * factor)
    if rope.kind == "yarn":
        return max(rope.max_length, int(rope.original_length * factor))
    return rope.max_length


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _is_index_list(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )
