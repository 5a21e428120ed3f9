"""The end of a run: results merged in manifest order, what a person reads, and the exit code."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from longbatch.config import Settings
from longbatch.errors import ExitCode, FidelityError, InterruptedRun
from longbatch.output import Fidelity, MergeSummary, RunFolder, fidelity, merge, recover, result_files
from longbatch.report.units import count_text, rate_text, seconds_text
from longbatch.run.attention import RunAttention
from longbatch.run.index import RowIndex
from longbatch.run.job import SPOOL
from longbatch.run.owner import WHOLE_RUN, Owner
from longbatch.run.planning import index_path
from longbatch.run.sample import Sample, read_sample
from longbatch.run.stored import read_command
from longbatch.run.supervisor import Tally


@dataclass(frozen=True, slots=True)
class Work:
    """What this process did: rows and tokens, and the seconds it took, start-up apart. ready_at: the wall clock (Unix
    time) when the first wave could begin; 0.0 where none did."""

    rows: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    ready_at: float = 0.0
    startup_seconds: float = 0.0
    seconds: float = 0.0
    busy_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def __add__(self, later: Work) -> Work:
        """Both together; the start is that of the first."""
        sums = {item.name: getattr(self, item.name) + getattr(later, item.name) for item in fields(self)}
        return Work(**{**sums, "ready_at": self.ready_at or later.ready_at})

    @classmethod
    def of(cls, tally: Tally) -> Work:
        """What the workers have done together."""
        return cls(
            rows=tally.rows,
            prompt_tokens=tally.prompt_tokens,
            generated_tokens=tally.generated_tokens,
            ready_at=tally.ready_at,
            startup_seconds=tally.startup_seconds,
            seconds=max(0.0, tally.seconds - tally.startup_seconds),
            busy_seconds=tally.prefill_seconds + tally.decode_seconds,
            prefill_seconds=tally.prefill_seconds,
            decode_seconds=tally.decode_seconds,
        )


def exit_code(settings: Settings, summary: MergeSummary, gap_error: FidelityError | None) -> ExitCode:
    """OK; FIDELITY when --max-gap is not kept, whatever else; or FAILED_ROWS when more rows failed than
    --allow-failures lets pass."""
    if gap_error is not None:
        return ExitCode.FIDELITY
    if summary.num_failed > settings.allowed_failures(summary.num_rows):
        return ExitCode.FAILED_ROWS
    return ExitCode.OK


def too_far(worst_gap: float, max_gap: float | None) -> bool:
    """Whether a measured gap is larger than allowed."""
    return max_gap is not None and worst_gap > max_gap


def too_far_error(max_gap: float | None) -> FidelityError:
    """What a run ends with then; its results are complete all the same."""
    return FidelityError(
        f"the gap between sparse and dense attention is larger than --max-gap {max_gap:g}",
        hint="the column attention.gap shows the rows; run with a profile of smaller --tolerance, or --attention dense",
    )


def gap_error(found: Fidelity, max_gap: float | None) -> FidelityError | None:
    """What a run ends with when --max-gap is not kept, or when rows ran sparse and nothing says whether it is."""
    if too_far(found.worst_gap, max_gap):
        return too_far_error(max_gap)
    if max_gap is None or not found.num_sparse or found.num_measured:
        return None
    return FidelityError(
        f"rows ran sparse and none could be measured, so that nothing says whether --max-gap {max_gap:g} is kept",
        hint="the summary says why; the same command tries again what may succeed. Embeddings have nothing to compare",
    )


def merge_folder(out: Path, *, partial: bool) -> ExitCode:
    """`longbatch merge`: by the index that the run stored. Raises UsageError, InterruptedRun, DiskError; RunningError
    while the run or one of its shares is under way; FidelityError as the run does, and InterruptedRun where --max-gap
    was given and rows are left to measure."""
    folder = RunFolder.open(out)
    with Owner.acquire(folder.work, WHOLE_RUN):
        recover(folder)
        index = RowIndex.load(index_path(folder), None)
        if index is None:
            raise InterruptedRun(
                f"{out} holds no index of its rows yet", hint="run it once more; it continues where it stopped"
            )
        summary = merge(folder, index.keys, partial=partial)
        if not summary.num_missing:
            remove_copies(folder)
    found = fidelity(result_files(folder))
    command = read_command(folder.work).values
    wanted, max_gap = int(command.get("verify_sample") or 0), command.get("max_gap")
    sample = read_sample(folder, wanted, found.num_sparse) if wanted and found.num_sparse else None
    told = [f"attention: {_sparse_text(found)}", *_gap_lines(found, sample)] if found.num_sparse else []
    print("\n".join(summary_lines(folder, summary, Work(), told)), file=sys.stderr)
    error: FidelityError | InterruptedRun | None = gap_error(found, max_gap)
    if sample is not None and sample.num_left and max_gap is not None and not too_far(found.worst_gap, max_gap):
        error = InterruptedRun(
            f"the results are written; {sample.num_left:,} rows that ran sparse were not measured, so that nothing "
            f"says whether --max-gap {max_gap:g} is kept",
            hint="run the same command again to measure them",
        )
    if error is not None:
        raise error
    return ExitCode.FAILED_ROWS if summary.num_failed else ExitCode.OK


def remove_copies(folder: RunFolder, spill: Path | None = None) -> None:
    """Remove the local copies of compressed and remote sources: the prompts in them are needed no more. And what rows
    left in the spill folder whose worker was killed between their result and its own tidying."""
    shutil.rmtree(folder.work / SPOOL, ignore_errors=True)
    if spill is not None:
        shutil.rmtree(spill / folder.run_id, ignore_errors=True)


def summary_lines(folder: RunFolder, summary: MergeSummary, work: Work, attention: list[str]) -> list[str]:
    """What stands on the screen at the end. attention: the lines about it."""
    failed = [f"{count:,} {kind}" for kind, count in summary.counts.items() if kind != "ok"]
    lines = [f"{summary.num_rows:,} rows: {summary.counts['ok']:,} ok" + "".join(f", {text}" for text in failed)]
    if summary.num_missing:
        lines[0] += f", {summary.num_missing:,} not finished"
    if work.rows:
        tokens = f"{count_text(work.prompt_tokens)} tokens read, {count_text(work.generated_tokens)} generated"
        rate = rate_text((work.prompt_tokens + work.generated_tokens) / max(work.seconds, 1e-9))
        lines.append(f"this run: {work.rows:,} rows, {tokens} in {seconds_text(work.seconds)} ({rate} tok/s)")
    lines += attention
    lines.append(f"results: {folder.results}/*.parquet")
    if failed:
        lines.append(f"failed rows have the reason in the column error; longbatch export {folder.path} - shows them")
    return lines


def attention_lines(
    attention: RunAttention, found: Fidelity, settings: Settings, sample: Sample | None = None
) -> list[str]:
    """How the rows attended, and how far that is from dense attention where it was measured. sample: what came of the
    rows that were to be measured."""
    if not attention.is_sparse:
        return [f"attention: dense ({attention.why})"]
    if not found.num_sparse:
        length = f"prompts of {attention.min_length:,} tokens and more do"
        return [f"attention: dense (no row ran sparse, {length}; {attention.source})"]
    lines = [f"attention: {_sparse_text(found, attention.source)}", *_gap_lines(found, sample)]
    if too_far(found.worst_gap, settings.max_gap):
        lines[-1] += f": more than --max-gap {settings.max_gap:g}"
    return lines


def _sparse_text(found: Fidelity, source: str = "") -> str:
    rows = rows_text(found.num_sparse)
    return f"sparse{f' ({source})' if source else ''}, {rows}, mean density {found.mean_density:.1%}"


def _gap_lines(found: Fidelity, sample: Sample | None) -> list[str]:
    missing = "" if sample is None else sample.describe()
    if not found.num_measured:
        return [f"gap to dense attention: {missing}"] if missing else []
    gaps = f"{found.mean_gap:.3g} nats a token over {rows_text(found.num_measured)}, at most {found.worst_gap:.3g}"
    return [f"gap to dense attention: {gaps}{f'; {missing}' if missing else ''}"]


def rows_text(number: int) -> str:
    """`1 row`, `2 rows`."""
    return "1 row" if number == 1 else f"{number:,} rows"


def attention_json(attention: RunAttention, found: Fidelity) -> dict[str, Any]:
    """The same for programs."""
    return {"mode": "sparse" if found.num_sparse else "dense", "settings": attention.describe(), **asdict(found)}


def summary_json(
    folder: RunFolder, summary: MergeSummary, work: Work, attention: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The whole summary for programs."""
    return {
        "out": str(folder.path),
        "rows": summary.num_rows,
        "ok": summary.counts["ok"],
        "failed": summary.num_failed,
        "errors": {kind: count for kind, count in summary.counts.items() if kind != "ok"},
        "missing": summary.num_missing,
        "results": [str(folder.results / name) for name in summary.files],
        "attention": attention,
        "run": asdict(work),
    }


def print_json(value: dict[str, Any]) -> None:
    """On standard output, which holds nothing else."""
    print(json.dumps(value, indent=2))
