"""Every setting of a run: its type, its range, its default, and whether it can change answers. Torch-free."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from longbatch.config.kv_formats import KV_DTYPES
from longbatch.errors import UsageError
from longbatch.sparsity import PatternSpec

_SIZE_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def _setting(
    default: Any,
    help: str,
    *,
    output_changing: bool = False,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    pattern: str | None = None,
    check: Callable[[Any], object] | None = None,
) -> Any:
    metadata = {
        "help": help,
        "output_changing": output_changing,
        "choices": choices,
        "minimum": minimum,
        "pattern": pattern,
        "check": check,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting of a run. Raises UsageError when a value is outside its range.

    `output_changing` in a field's metadata says that another value can change answers, so that a run folder
    made with one value refuses to be continued with another.
    """

    model: str | None = _setting(
        None,
        "model folder, hub id, or nothing for the small default model",
        output_changing=True,
    )
    dtype: str = _setting(
        "auto",
        "number format of weights and activations; auto is bfloat16 on GPUs that have it, float16 on older "
        "ones, float32 on a CPU",
        output_changing=True,
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    weights_dtype: str = _setting(
        "auto",
        "number format of the layers' matrices; auto is --dtype; fp8, with a scale per row, halves bfloat16's memory, "
        "and is faster on GPUs from compute capability 8.9 on and slower elsewhere",
        output_changing=True,
        choices=("auto", "fp8"),
    )
    adapter: Path | None = _setting(
        None, "folder of a LoRA adapter (PEFT) that is merged into the model when it is loaded", output_changing=True
    )
    weights: str = _setting(
        "auto",
        "where the layers' weights are kept: resident on the device, or in host memory or on disk, from where each "
        "layer arrives while the one before it computes; auto is the first of these that fits",
        choices=("auto", "resident", "host", "disk"),
    )
    out: Path | None = _setting(None, "run folder; the same folder again continues the run")
    gpus: str = _setting(
        "auto",
        "number of GPUs, or all; 0 is the CPU; auto is all GPUs, or the CPU where there is none",
        pattern=r"auto|all|\d+",
    )
    threads: int | None = _setting(None, "CPU threads of the engine; torch's own choice if unset", minimum=1)
    task: str = _setting(
        "generate",
        "task of rows that name none",
        output_changing=True,
        choices=("generate", "score", "embed", "classify"),
    )
    prompt: str | None = _setting(
        None,
        "prompt template with {column} places; {text} is a text file's content",
        output_changing=True,
    )
    system: str | None = _setting(None, "system message of rows that bring none", output_changing=True)
    prompt_format: str = _setting(
        "auto",
        "chat: through the model's chat template; raw: as it stands; auto: chat where the model has a template",
        output_changing=True,
        choices=("auto", "chat", "raw"),
    )
    overlong: str = _setting(
        "error",
        "what becomes of a prompt that is too long for the model",
        output_changing=True,
        choices=("error", "truncate-middle", "truncate-left"),
    )
    max_tokens: int = _setting(
        1024, "most tokens generated for a row that sets no limit", output_changing=True, minimum=1
    )
    generation_config: str = _setting(
        "greedy",
        "sampling of rows that set none: greedy, or model for the model's generation_config.json",
        output_changing=True,
        choices=("greedy", "model"),
    )
    seed: int = _setting(
        0, "seed of the run; a row's own seed comes from it, the id and the sample", output_changing=True
    )
    attention: str = _setting(
        "auto",
        "prefill of long rows: auto is sparse with a --profile of this model and dense without one; dense; or one "
        "pattern for every head, such as a_shape:sinks=128,window=3968",
        output_changing=True,
        check=lambda text: text in ("auto", "dense") or PatternSpec.parse(text),
    )
    profile: Path | None = _setting(
        None, "file of `longbatch profile` that names each head's pattern", output_changing=True
    )
    min_sparse_length: int | None = _setting(
        None,
        "tokens from which a prompt is prefilled sparse; where sparse gets faster on the device if unset",
        output_changing=True,
        minimum=0,
    )
    verify_sample: int = _setting(
        0, "rows that ran sparse, short and long ones, run dense again at the end to measure the gap", minimum=0
    )
    max_gap: float | None = _setting(
        None,
        "largest measured gap, the mean distance of a token's log-probability from dense in nats, without exit code 7",
        minimum=0,
    )
    ignore_unsupported: bool = _setting(
        False,
        "run rows with request fields that have no effect here, such as tools, instead of refusing them",
        output_changing=True,
    )
    keep_columns: tuple[str, ...] = _setting(
        (),
        "manifest columns carried into the results; * is all",
        output_changing=True,
    )
    media_root: Path | None = _setting(
        None,
        "folder that document paths are relative to and must stay inside; the manifest's folder if unset",
    )
    max_row_bytes: int = _setting(64 << 20, "largest manifest row in bytes", minimum=1)
    limit: int | None = _setting(None, "run only the first N rows", minimum=1)
    only: str | None = _setting(None, "run only the row with this id, even if it is finished")
    max_wave_seconds: float = _setting(300.0, "longest planned time of a wave of rows, in seconds", minimum=0.001)
    wave_tokens: int | None = _setting(None, "most tokens of a wave; from the device's memory if unset", minimum=64)
    kv_dtype: str = _setting(
        "auto",
        "number format of stored K/V: auto is the dtype; bf16; fp8 holds about twice as many tokens as bf16",
        output_changing=True,
        choices=KV_DTYPES,
    )
    kv_tokens: int | None = _setting(None, "tokens of K/V cache; from the device's memory if unset", minimum=64)
    decode_batch: int | None = _setting(None, "most rows decoded together; from the device if unset", minimum=1)
    allow_failures: str = _setting(
        "0",
        "failed rows, a number or a percentage such as 2%, up to which the exit code is 0",
        pattern=r"\d+|\d+(\.\d+)?%",
    )
    abort_on_failures: str = _setting(
        "50%",
        "failed rows at which the run stops with exit code 8: a number, a percentage of the first 100 rows, or off",
        pattern=r"off|\d+|\d+(\.\d+)?%",
    )
    update: bool = _setting(False, "answer rows again whose content changed since they were answered")
    shard: str | None = _setting(
        None, "share i/n of the rows, or auto for the share of a Slurm array element", pattern=r"auto|\d+/\d+"
    )
    grace: float = _setting(20.0, "seconds in which a run that is told to stop finishes what it can", minimum=0)
    max_time: str | None = _setting(None, "stop and save after this long, such as 90m or 2h30m")
    max_gpu_hours: float | None = _setting(None, "stop and save after this many GPU hours", minimum=0)
    row_timeout: float | None = _setting(None, "longest time of a row in seconds, from its first work on", minimum=1)
    skip_if_running: bool = _setting(False, "end at once with exit code 0 when the run is already under way, for cron")
    price_per_gpu_hour: float | None = _setting(None, "shows money in plan and status", minimum=0)
    on_finish: str | None = _setting(None, "shell command run at the end, with LONGBATCH_EXIT_CODE and LONGBATCH_OUT")
    spill: Path | None = _setting(None, "folder in which a long row keeps its state, to resume inside the row")
    progress: str = _setting(
        "auto",
        "bar on a terminal, log lines otherwise",
        choices=("auto", "bar", "log", "none"),
    )
    quiet: bool = _setting(False, "print errors only")
    json: bool = _setting(False, "print a machine-readable summary on standard output")

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None:
                _check(item.name, value, item.metadata)
        if self.max_gap is not None and not self.verify_sample:
            raise UsageError("max_gap needs rows to measure", hint="give --verify-sample N, such as 20")

    def allowed_failures(self, num_rows: int) -> int:
        """Failed rows among `num_rows` that still count as success."""
        if self.allow_failures.endswith("%"):
            return int(num_rows * float(self.allow_failures[:-1]) / 100)
        return int(self.allow_failures)

    def as_dict(self) -> dict[str, Any]:
        """Every setting as a JSON value, by name."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """The settings that `as_dict` described; no file and no variable is read."""
        return cls(**{name: convert(name, value, "settings") for name, value in values.items() if value is not None})

    def identity(self) -> dict[str, Any]:
        """The settings that can change answers, as JSON values, by name."""
        return {
            item.name: _plain(getattr(self, item.name)) for item in fields(self) if item.metadata["output_changing"]
        }


def flag_name(name: str) -> str:
    """The long flag of a setting: `max_tokens` -> `--max-tokens`."""
    return "--" + name.replace("_", "-")


def help_text(name: str) -> str:
    """What a setting does, for `--help`."""
    return str(_METADATA[name]["help"])


def choices(name: str) -> tuple[str, ...]:
    """The values a setting may take, or () where they are not a closed list."""
    values: tuple[str, ...] = _METADATA[name]["choices"]
    return values


def is_switch(name: str) -> bool:
    """Whether a setting is true or false."""
    return _HINTS[name] is bool


def convert(name: str, value: Any, origin: str) -> Any:
    """`value`, from TOML, the environment or a flag, as the setting's type, checked."""
    kind = _HINTS[name]
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(item for item in get_args(kind) if item is not type(None))
    try:
        converted = _as_kind(kind, value)
        _check(name, converted, _METADATA[name])
    except UsageError as error:
        raise UsageError(f"{origin}: {error.message}", hint=error.hint) from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"{origin}: {name} {error}") from None
    return converted


def _as_kind(kind: Any, value: Any) -> Any:
    if get_origin(kind) is tuple:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
            return tuple(value)
        raise ValueError("must be a list of names")
    if kind is bool:
        text = str(value).lower()
        if text in _TRUE | _FALSE:
            return text in _TRUE
        raise ValueError("must be true or false")
    if isinstance(value, (bool, list, dict)):
        raise ValueError(f"must be a {_KIND_NAMES[kind]}")
    if kind is int:
        return _as_integer(value)
    if kind is float:
        try:
            return float(value)
        except ValueError:
            raise ValueError("must be a number") from None
    return kind(str(value))


def _as_integer(value: Any) -> int:
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"\s*(-?\d[\d_]*)\s*([a-z]*)\s*", str(value), re.IGNORECASE)
    if match is None or match[2].lower() not in _SIZE_UNITS:
        raise ValueError("must be a whole number, or one with a unit such as 64MiB")
    return int(match[1]) * _SIZE_UNITS[match[2].lower()]


def _check(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    allowed = metadata["choices"]
    if allowed and value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"did you mean {near[0]}?" if near else None
        raise UsageError(f"{name} must be one of {', '.join(allowed)}, not {value!r}", hint=hint)
    minimum = metadata["minimum"]
    # Written so that NaN fails too.
    if minimum is not None and not value >= minimum:
        raise UsageError(f"{name} must be at least {minimum}, not {value}")
    if metadata["pattern"] and re.fullmatch(metadata["pattern"], value) is None:
        raise UsageError(f"{name} has no meaning as {value!r}", hint=f"{name}: {metadata['help']}")
    if metadata["check"]:
        metadata["check"](value)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


_KIND_NAMES: dict[Any, str] = {int: "whole number", float: "number", str: "string", Path: "path"}
_HINTS: dict[str, Any] = get_type_hints(Settings)
_METADATA: dict[str, Mapping[str, Any]] = {item.name: item.metadata for item in fields(Settings)}
# Every setting by name.
NAMES = tuple(_HINTS)
