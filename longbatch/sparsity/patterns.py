"""The sparse patterns by name, with their parameters, and the pattern of one head or layer. Torch-free.

A pattern's code is the module named here, loaded when a layer first uses it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from longbatch.errors import UsageError

_MODULES = "longbatch.attention.patterns."
_LONGEST = 1 << 30
# More characters than any number here needs; Python refuses to convert integers of thousands of digits.
_NUMBER_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class Parameter:
    """One number of a pattern. choices: the only values allowed, where not every one between the bounds is."""

    default: float
    minimum: float
    maximum: float
    integer: bool = True
    choices: tuple[int, ...] = ()

    @property
    def wanted(self) -> str:
        """The values allowed, for messages."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        return f"{'an integer' if self.integer else 'a number'} from {self.minimum} to {self.maximum}"


Kind = Literal["ranges", "blocks", "runs"]


@dataclass(frozen=True, slots=True)
class PatternInfo:
    """module: where the pattern's code is. kind: `ranges` when the last queries decide for every row, `blocks` when
    each block of queries of a tile decides for itself and chooses key blocks, `runs` when each run of some hundred
    queries does and chooses single keys. parameters: in the order in which they are written."""

    module: str
    kind: Kind
    parameters: Mapping[str, Parameter]
    help: str


def _info(name: str, kind: Kind, help: str, **parameters: Parameter) -> PatternInfo:
    return PatternInfo(_MODULES + name, kind, MappingProxyType(parameters), help)


def _tokens(default: int, minimum: int = 0) -> Parameter:
    return Parameter(default, minimum, _LONGEST)


def _block(default: int) -> Parameter:
    return Parameter(default, 64, 128, choices=(64, 128))


def _share(default: float) -> Parameter:
    return Parameter(default, 0.0, 1.0, integer=False)


# Every pattern: one entry here, one module of that name in `longbatch/attention/patterns`.
PATTERNS: Mapping[str, PatternInfo] = MappingProxyType(
    {
        "dense": _info("dense", "ranges", "every key"),
        "a_shape": _info(
            "a_shape",
            "ranges",
            "the first tokens and a window",
            sinks=_tokens(128),
            window=_tokens(3968, 1),
        ),
        "tri_shape": _info(
            "tri_shape",
            "ranges",
            "the first tokens and a window; every key for the last queries",
            sinks=_tokens(128),
            window=_tokens(3968, 1),
            last=_tokens(100),
        ),
        "vertical_slash": _info(
            "vertical_slash",
            "ranges",
            "the columns and distances that the last queries attend to most",
            vertical=_tokens(1000, 1),
            slash=_tokens(6096, 1),
        ),
        "block_sparse": _info(
            "block_sparse",
            "blocks",
            "key blocks by pooled scores: the best top_k, or as many of them as hold the share mass of the softmax",
            top_k=_tokens(100, 1),
            mass=_share(0.0),
            block=_block(64),
        ),
        "antidiagonal": _info(
            "antidiagonal",
            "blocks",
            "key blocks by antidiagonal scores, until they hold the share threshold of the softmax",
            stride=Parameter(16, 4, 64, choices=(4, 8, 16, 32, 64)),
            threshold=_share(0.9),
            block=_block(128),
        ),
        "strided": _info(
            "strided",
            "blocks",
            "the last local key blocks and each stride-th one before",
            stride=_tokens(16, 1),
            local=_tokens(16, 1),
            block=_block(64),
        ),
        "stripes": _info(
            "stripes",
            "runs",
            "for each run of rows, a window and the keys that every step-th of them looks at, at least the share mass",
            mass=_share(0.95),
            window=_tokens(128, 1),
            rows=Parameter(512, 64, 4096, choices=(64, 128, 256, 512, 1024, 2048, 4096)),
            step=Parameter(16, 1, 256, choices=(1, 2, 4, 8, 16, 32, 64, 128, 256)),
        ),
    }
)


@dataclass(frozen=True, slots=True)
class PatternSpec:
    """A pattern and its numbers, all of them: sorted by name, integers where the pattern wants integers.

    Made by `parse` and `make`, which fill in defaults and raise UsageError for what the pattern does not know.
    """

    name: str
    parameters: tuple[tuple[str, float], ...] = ()

    @classmethod
    def make(cls, name: str, **parameters: float) -> PatternSpec:
        """The pattern with these numbers and its defaults for the rest."""
        info = PATTERNS.get(name)
        if info is None:
            raise UsageError(f"there is no attention pattern {name!r}", hint=f"patterns: {', '.join(PATTERNS)}")
        for key in parameters:
            if key not in info.parameters:
                raise UsageError(f"the pattern {name} has no parameter {key!r}", hint=_usage(name, info))
        values = {
            key: _checked(name, key, parameters.get(key, parameter.default), parameter)
            for key, parameter in info.parameters.items()
        }
        return cls(name, tuple(sorted(values.items())))

    @classmethod
    def parse(cls, text: str) -> PatternSpec:
        """Read `name` or `name:parameter=number,parameter=number`."""
        name, colon, rest = text.strip().partition(":")
        values: dict[str, float] = {}
        for item in rest.split(",") if colon else ():
            key, equals, number = (part.strip() for part in item.partition("="))
            if not equals or not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", number):
                raise UsageError(
                    f"{item.strip()!r} in the attention pattern {text!r} is not of the form parameter=number",
                    hint=_usage(name, PATTERNS[name]) if name in PATTERNS else None,
                )
            if len(number) > _NUMBER_CHARACTERS:
                raise UsageError(
                    f"{key[:_NUMBER_CHARACTERS]} of the pattern {name[:_NUMBER_CHARACTERS]} is a number of "
                    f"{len(number):,} characters",
                    hint=_usage(name, PATTERNS[name]) if name in PATTERNS else None,
                )
            if key in values:
                raise UsageError(f"the attention pattern {text!r} sets {key} twice")
            values[key] = int(number) if re.fullmatch(r"[+-]?\d+", number) else float(number)
        return cls.make(name, **values)

    def __str__(self) -> str:
        """The text that `parse` reads, with every parameter."""
        order = PATTERNS[self.name].parameters
        values = dict(self.parameters)
        return self.name + (":" if order else "") + ",".join(f"{key}={values[key]}" for key in order)

    def __getitem__(self, parameter: str) -> float:
        for key, value in self.parameters:
            if key == parameter:
                return value
        raise KeyError(parameter)

    def count(self, parameter: str) -> int:
        """A parameter that is an integer."""
        return int(self[parameter])

    @property
    def is_dense(self) -> bool:
        return self.name == "dense"

    @property
    def kind(self) -> Kind:
        return PATTERNS[self.name].kind


@dataclass(frozen=True, slots=True)
class LayerPatterns:
    """The patterns of one layer: one per query head, or, when `shared`, one per key/value head, whose query heads
    then use one selection."""

    heads: tuple[PatternSpec, ...]
    shared: bool = False

    @property
    def is_dense(self) -> bool:
        return all(spec.is_dense for spec in self.heads)


def _usage(name: str, info: PatternInfo) -> str:
    if not info.parameters:
        return f"{name} has no parameters"
    return f"{name}: " + "; ".join(f"{key}, {parameter.wanted}" for key, parameter in info.parameters.items())


def _checked(name: str, key: str, value: float, parameter: Parameter) -> float:
    # A bool is an int to Python; an integer that comes as 64.0 is meant as 64.
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not parameter.minimum <= value <= parameter.maximum
        or (parameter.integer and value != int(value))
        or (parameter.choices and value not in parameter.choices)
    ):
        raise UsageError(f"{key} of the pattern {name} is {value!r}, but must be {parameter.wanted}")
    return int(value) if parameter.integer else float(value)
