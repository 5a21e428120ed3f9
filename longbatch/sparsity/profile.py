"""A profile: the pattern of every head of a model, why it was chosen, and the JSON file that keeps it. Torch-free."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from longbatch import __version__
from longbatch.errors import DiskError, UsageError
from longbatch.sparsity.patterns import LayerPatterns, PatternSpec

FORMAT = "longbatch-profile"
# Raised when a reader of the older version would misread a newer file.
VERSION = 1
_MAX_BYTES = 256 << 20
_MEND = "make the profile again, or restore the file"


class ProfileError(UsageError):
    """A profile cannot be read, or is not this model's; the message names the file and the field."""


class LayerShape(Protocol):
    """What a profile asks of a layer."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...


class ModelShape(Protocol):
    """What a profile asks of a model's spec."""

    @property
    def layers(self) -> Sequence[LayerShape]: ...


@dataclass(frozen=True, slots=True)
class HeadChoice:
    """The pattern of one selection, and what was measured with it.

    error: relative L2 distance of the head's attention output from dense, worst document. density: selected pairs of
    query and key over causal pairs. Both None where nothing was measured. runner_up: the next best choice.
    """

    spec: PatternSpec
    error: float | None = None
    density: float | None = None
    runner_up: HeadChoice | None = None


@dataclass(frozen=True, slots=True)
class LayerChoices:
    """The choices of one layer: one per query head, or per key/value head when `shared`."""

    heads: tuple[HeadChoice, ...]
    shared: bool = False

    @property
    def patterns(self) -> LayerPatterns:
        return LayerPatterns(tuple(choice.spec for choice in self.heads), self.shared)

    def wrong_count(self, num_heads: int, num_kv_heads: int) -> str | None:
        """What is wrong with the number of choices in a layer of so many heads; None where it is right."""
        wanted = num_kv_heads if self.shared else num_heads
        if len(self.heads) == wanted:
            return None
        per = "key/value head" if self.shared else "head"
        return f"has {len(self.heads)} entries; one per {per} makes {wanted}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Patterns for a whole model.

    model_hash: the model it was made for; None for any model of these dimensions. num_heads, num_kv_heads: of every
    layer; num_kv_heads None for any number, where no layer is shared. tolerance: largest `error` that the search
    allowed; None where it did not search. source: how it came to be. calibration: facts about the search as JSON
    values (documents, lengths, device). tool_version: the longbatch that made it. created: ISO 8601 time.
    """

    choices: tuple[LayerChoices, ...]
    num_heads: int
    num_kv_heads: int | None
    model_hash: str | None
    tolerance: float | None
    source: str
    tool_version: str = __version__
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    calibration: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        if not 1 <= kv_heads <= self.num_heads or self.num_heads % kv_heads:
            raise ProfileError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads} in the profile"
            )
        if not self.choices:
            raise ProfileError("layers of the profile is empty; a model has one layer at least")
        for index, layer in enumerate(self.choices):
            if layer.shared and self.num_kv_heads is None:
                raise ProfileError(f"layers[{index}] of the profile is shared, which needs num_kv_heads")
            if wrong := layer.wrong_count(self.num_heads, kv_heads):
                raise ProfileError(f"layers[{index}].heads of the profile {wrong}")

    @property
    def num_layers(self) -> int:
        return len(self.choices)

    @property
    def layers(self) -> tuple[LayerPatterns, ...]:
        """The patterns of each layer."""
        return tuple(layer.patterns for layer in self.choices)

    def check(self, model_hash: str, model: ModelShape) -> None:
        """Raise ProfileError unless the profile is for this model."""
        mend = "make one with `longbatch profile MODEL --calibration MANIFEST -o FILE`, or leave --profile out"
        if self.model_hash is not None and self.model_hash != model_hash:
            raise ProfileError(
                f"the profile is for another model: its model_hash is {self.model_hash}, this model's {model_hash}",
                hint=mend,
            )
        if len(model.layers) != self.num_layers:
            raise ProfileError(
                f"the profile has {self.num_layers} layers, the model {len(model.layers)}",
                hint=mend,
            )
        for index, layer in enumerate(model.layers):
            for name, own, found in (
                ("heads", self.num_heads, layer.num_heads),
                ("key/value heads", self.num_kv_heads, layer.num_kv_heads),
            ):
                if own is not None and own != found:
                    raise ProfileError(
                        f"the profile has {own} {name} in each layer, layer {index} of the model {found}", hint=mend
                    )

    def save(self, path: Path) -> None:
        """Write the file, durably and whole; an older one is replaced. Raises DiskError."""
        text = json.dumps(self.as_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise DiskError(f"cannot write the profile {path}: {error.strerror or error}") from error

    def as_json(self) -> dict[str, Any]:
        """The content of the file."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "model_hash": self.model_hash,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "tolerance": self.tolerance,
            "source": self.source,
            "tool_version": self.tool_version,
            "created": self.created,
            "calibration": dict(self.calibration),
            "layers": [layer_as_json(layer) for layer in self.choices],
        }

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read the file. Raises ProfileError naming the file, the field at fault and what would mend it."""
        value = read_json(path)
        if isinstance(value, list):
            raise ProfileError(
                f"{path} is not a profile but looks like a MInference pattern file",
                hint="turn it into one with `longbatch profile --import-minference FILE -o PROFILE`",
            )
        fields = Fields(path, value)
        if fields.take("format", str) != FORMAT:
            raise fields.fault("format", f"must be {FORMAT!r}: this is no profile")
        version = fields.take("version", int)
        if version != VERSION:
            raise ProfileError(
                f"{path} is a profile of version {version}; this longbatch reads version {VERSION}",
                hint="use the longbatch that wrote it, or make the profile again",
            )
        layers = [Fields(path, layer, f"layers[{i}]") for i, layer in enumerate(fields.take("layers", list))]
        if fields.take("num_layers", int) != len(layers):
            raise fields.fault("num_layers", f"differs from the {len(layers)} layers listed")
        try:
            return cls(
                choices=tuple(layer_from_json(layer) for layer in layers),
                num_heads=fields.take("num_heads", int),
                num_kv_heads=fields.take("num_kv_heads", int, optional=True),
                model_hash=fields.take("model_hash", str, optional=True),
                tolerance=fields.number("tolerance"),
                source=fields.take("source", str),
                tool_version=fields.take("tool_version", str),
                created=fields.take("created", str),
                calibration=_calibration(fields),
            )
        except ProfileError as error:
            if str(path) in error.message:
                raise
            raise ProfileError(f"{path}: {error.message}", hint=error.hint or _MEND) from None


class Fields:
    """Reads one JSON object of a file, with the field's place in every complaint. where: the object's place in the
    file. mend: what helps where a field is wrong."""

    def __init__(self, path: Path, value: Any, where: str = "", mend: str = _MEND) -> None:
        self.path, self.where, self.mend = path, where, mend
        if not isinstance(value, dict):
            raise ProfileError(f"{where or 'the content'} in {path} must be an object", hint=mend)
        self.values: dict[str, Any] = value

    def inner(self, value: Any, name: str) -> Fields:
        """An object inside this one."""
        return Fields(self.path, value, self.place(name), self.mend)

    def place(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def fault(self, name: str, text: str) -> ProfileError:
        return ProfileError(f"{self.place(name)} in {self.path} {text}", hint=self.mend)

    def take(self, name: str, kind: type[Any], *, optional: bool = False) -> Any:
        if name not in self.values:
            raise self.fault(name, "is missing")
        value = self.values[name]
        if optional and value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            names = {str: "a text", int: "an integer", bool: "true or false", list: "a list", dict: "an object"}
            raise self.fault(name, f"must be {names[kind]}{' or null' if optional else ''}")
        if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            # JSON can say what UTF-8 cannot, and no terminal shows it.
            raise self.fault(name, "holds half a character")
        return value

    def number(self, name: str, maximum: float = sys.float_info.max) -> float | None:
        """A finite number that is not negative, or null."""
        if name not in self.values:
            raise self.fault(name, "is missing")
        value = self.values[name]
        if value is None:
            return None
        # Integers are as long as the file says; the comparison is exact for them too.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= maximum:
            most = "" if maximum == sys.float_info.max else f", at most {maximum:g}"
            raise self.fault(name, f"must be a number, not negative{most}, or null")
        return float(value)


def _choice_as_json(choice: HeadChoice) -> dict[str, Any]:
    value: dict[str, Any] = {"pattern": str(choice.spec), "error": choice.error, "density": choice.density}
    if choice.runner_up is not None:
        value["runner_up"] = _choice_as_json(choice.runner_up)
    return value


def layer_as_json(layer: LayerChoices) -> dict[str, Any]:
    """The entry of a layer in the file."""
    return {"shared": layer.shared, "heads": [_choice_as_json(choice) for choice in layer.heads]}


def layer_from_json(layer: Fields) -> LayerChoices:
    """What `layer_as_json` described. Raises ProfileError."""
    heads = [
        _choice_from_json(layer.inner(head, f"heads[{place}]")) for place, head in enumerate(layer.take("heads", list))
    ]
    return LayerChoices(tuple(heads), layer.take("shared", bool))


def _choice_from_json(head: Fields, *, may_have_runner_up: bool = True) -> HeadChoice:
    text = head.take("pattern", str)
    try:
        spec = PatternSpec.parse(text)
    except UsageError as error:
        raise ProfileError(
            f"{head.place('pattern')} in {head.path}: {error.message}", hint=error.hint or head.mend
        ) from None
    runner_up = None
    if (other := head.values.get("runner_up")) is not None:
        if not may_have_runner_up:
            # One behind the other they could be as many as the file is long.
            raise head.fault("runner_up", "is the runner-up of a runner-up, which has none")
        runner_up = _choice_from_json(head.inner(other, "runner_up"), may_have_runner_up=False)
    return HeadChoice(spec, head.number("error"), head.number("density", 1.0), runner_up)


def _calibration(fields: Fields) -> Mapping[str, Any]:
    """Facts about the search, of which those that are counted with are of the right kind."""
    found: dict[str, Any] = fields.take("calibration", dict)
    facts = fields.inner(found, "calibration")
    if "lengths" in found:
        lengths = facts.take("lengths", list)
        if any(isinstance(length, bool) or not isinstance(length, int) or length < 1 for length in lengths):
            raise facts.fault("lengths", "must be a list of positive integers")
    for name in ("seconds", "dense_seconds"):
        if name in found:
            facts.number(name)
    return found


def read_json(path: Path) -> Any:
    """A JSON file of patterns. Raises ProfileError naming the file."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ProfileError(f"{path} is larger than {_MAX_BYTES >> 20} MiB: not a profile")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ProfileError(f"the profile {path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path} is not valid JSON: {error}", hint=_MEND) from None
