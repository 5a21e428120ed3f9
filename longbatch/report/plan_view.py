"""A plan as a person reads it: totals, prompt lengths, memory, waves, and the rows that cannot run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longbatch.device import DeviceInfo
from longbatch.errors import RowError
from longbatch.plan import Plan
from longbatch.report.console import plain_table, standard_output
from longbatch.report.units import bytes_text, money_text, seconds_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NUM_EXAMPLES = 5
NUM_WAVES = 12
BAR_CELLS = 30


@dataclass(slots=True)
class Refusals:
    """Rows that cannot run, counted by error type, with the first few of each kept as text."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, error: RowError) -> None:
        """Count one. name: the row as a person finds it, by id, number or place."""
        self.counts[error.type] = self.counts.get(error.type, 0) + 1
        kept = self.examples.setdefault(error.type, [])
        if len(kept) < NUM_EXAMPLES:
            kept.append(f"{name}: {error.message}" if name else error.message)

    @property
    def num_rows(self) -> int:
        """All of them."""
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan with what it was made for. Set by `longbatch.run.make_plan`.

    model: name or folder. dtype: resolved. num_rows: answers that the manifest asks for. num_finished: answered by
    an earlier run. refusals: rows that cannot run, for whatever reason, those the plan refused included.
    stored: where the plan was saved. price_per_gpu_hour: as the user set it. attention: how the rows will attend.
    kv_dtype: how K/V are stored, None for in the dtype.
    weights_dtype: of the layers' matrices, auto for dtype. break_even_tokens: of a wave from which streamed layers keep
    up with it, None where none are or it is not known.
    """

    plan: Plan
    model: str
    dtype: str
    device: DeviceInfo
    num_rows: int
    num_finished: int = 0
    refusals: Refusals = field(default_factory=Refusals)
    stored: Path | None = None
    price_per_gpu_hour: float | None = None
    attention: str = "dense"
    kv_dtype: str | None = None
    weights_dtype: str = "auto"
    break_even_tokens: int | None = None

    @property
    def price(self) -> float | None:
        """What the device time of the plan costs at most; more devices share the time, not the price."""
        if self.price_per_gpu_hour is None:
            return None
        return self.plan.totals.seconds / 3600 * self.price_per_gpu_hour

    def as_dict(self) -> dict[str, Any]:
        """The view as JSON values, for `--json`."""
        plan = self.plan
        return {
            "model": self.model,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype or self.dtype,
            "weights_dtype": self.weights_dtype,
            "weights": plan.budget.weights,
            "break_even_tokens": self.break_even_tokens,
            "device": self.device.name,
            "attention": self.attention,
            "num_rows": self.num_rows,
            "num_finished": self.num_finished,
            "num_refused": self.refusals.num_rows,
            "totals": {**asdict(plan.totals), "seconds": plan.totals.seconds},
            "histogram": [asdict(bucket) for bucket in plan.histogram],
            "memory": {
                "device_bytes": plan.budget.memory_bytes,
                "wave_tokens": plan.budget.wave_tokens,
                "kv_tokens": plan.budget.kv_tokens,
                "parts": dict(plan.budget.parts),
                "host_bytes": plan.budget.host_bytes,
            },
            "waves": [
                {"rows": len(wave.rows), "tokens": wave.tokens, "width": wave.width, "seconds": wave.seconds}
                for wave in plan.waves
            ],
            "refused": {
                kind: {"count": count, "examples": self.refusals.examples[kind]}
                for kind, count in self.refusals.counts.items()
            },
            "price": self.price,
            "stored": str(self.stored) if self.stored else None,
        }


def print_plan(view: PlanView) -> None:
    """Print a plan on standard output."""
    console = standard_output()
    console.print(_facts(view))
    if view.plan.totals.num_rows:
        _section(console, "prompt lengths", _histogram(view.plan, ascii_only=not _can_draw(console)))
    _section(console, "memory", _memory(view.plan))
    if view.plan.totals.num_rows:
        _section(console, "waves", _waves(view.plan))
    if view.refusals.num_rows:
        console.print("\ncannot run", style="bold")
        for line in _refusal_lines(view.refusals):
            console.print(line)
    if view.stored:
        console.print(f"\nstored in {view.stored}; `longbatch run` with the same -o uses it")


def _facts(view: PlanView) -> Table:
    totals = view.plan.totals
    rows = [f"{view.num_rows:,} rows: {totals.num_rows:,} run in {_number(totals.num_waves, 'wave')}"]
    if view.num_finished:
        rows.append(f"{view.num_finished:,} are finished")
    if view.refusals.num_rows:
        rows.append(f"{view.refusals.num_rows:,} cannot run")
    table = plain_table("", "")
    weights = "" if view.weights_dtype == "auto" else f", weights {view.weights_dtype}"
    table.add_row("model", f"{view.model}, {view.dtype}{weights}")
    table.add_row("K/V", view.kv_dtype or view.dtype)
    if view.plan.budget.weights != "resident":
        table.add_row("weights", _streaming(view))
    table.add_row("device", view.device.name)
    table.add_row("attention", view.attention)
    table.add_row("rows", ", ".join(rows))
    table.add_row(
        "tokens",
        f"{totals.prompt_tokens:,} to read, at most {totals.longest_prompt:,} in a row; "
        f"at most {totals.generated_tokens:,} to generate",
    )
    table.add_row(
        "time",
        f"about {seconds_text(totals.seconds)}: prefill {seconds_text(totals.prefill_seconds)}, "
        f"decode at most {seconds_text(totals.decode_seconds)}",
    )
    if view.price is not None:
        table.add_row(
            "price", f"about {money_text(view.price)}, at {money_text(view.price_per_gpu_hour or 0.0)} an hour"
        )
    return table


def _streaming(view: PlanView) -> str:
    """Where the layers' weights are and what that costs."""
    budget = view.plan.budget
    if budget.weights == "host":
        text = f"in host memory, {bytes_text(budget.host_bytes)}" if budget.host_bytes else "in host memory"
    else:
        text = "on disk, read for every wave and every token"
    if view.break_even_tokens is None:
        return text
    limit = "hide their copies" if budget.weights == "host" else "hide their copies, if the disk is as fast"
    return f"{text}; waves of {view.break_even_tokens:,} tokens or more {limit}"


def _histogram(plan: Plan, *, ascii_only: bool) -> Table:
    table = plain_table("tokens", ">rows", ">tokens in them", "")
    buckets = plan.histogram
    most = max(bucket.num_tokens for bucket in buckets)
    for bucket in buckets:
        cells = -(-BAR_CELLS * bucket.num_tokens // most) if most else 0
        length = f"{bucket.low:,} - {bucket.high:,}"
        table.add_row(length, f"{bucket.num_rows:,}", f"{bucket.num_tokens:,}", ("#" if ascii_only else "█") * cells)
    return table


def _memory(plan: Plan) -> Table:
    budget = plan.budget
    table = plain_table("", ">", "")
    notes = {"K/V pages": f"{budget.kv_tokens:,} tokens", "wave": f"{budget.wave_tokens:,} tokens"}
    for name, num_bytes in budget.parts:
        table.add_row(name, bytes_text(num_bytes), notes.get(name, ""))
    table.add_row("together", bytes_text(budget.used_bytes), f"of {bytes_text(budget.memory_bytes)}")
    return table


def _waves(plan: Plan) -> Table:
    table = plain_table(">wave", ">rows", ">tokens", ">longest", ">prefill")
    waves = plan.waves
    for wave in waves[:NUM_WAVES]:
        longest = max(size.prompt for size in wave.rows)
        table.add_row(
            str(wave.index + 1), f"{len(wave.rows):,}", f"{wave.tokens:,}", f"{longest:,}", seconds_text(wave.seconds)
        )
    if len(waves) > NUM_WAVES:
        table.add_row("...", f"{len(waves) - NUM_WAVES:,} more", "", "", "")
    return table


def _refusal_lines(refusals: Refusals) -> Iterable[str]:
    for kind, count in sorted(refusals.counts.items(), key=lambda item: -item[1]):
        yield f"  {kind}: {count:,}"
        examples = refusals.examples[kind]
        yield from (f"    {example}" for example in examples)
        if count > len(examples):
            yield f"    ... and {count - len(examples):,} more"


def _section(console: Console, title: str, table: Table) -> None:
    console.print(f"\n{title}", style="bold")
    console.print(table)


def _can_draw(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
