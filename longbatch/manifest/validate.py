"""All faults of a manifest at once, counted by kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from longbatch.core import Fault
from longbatch.manifest.manifest import Manifest

NUM_EXAMPLES = 5


@dataclass(slots=True)
class ValidationReport:
    """What `validate` found. num_rows: manifest rows. num_answers: requests they ask for (`n` makes more).

    counts: rows by error type, most frequent first. examples: the first few of each type; their messages begin with
    the place, as file:line or file, row group, row. Tokens are counted by `longbatch plan`, not here.
    """

    num_rows: int = 0
    num_ok: int = 0
    num_answers: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[Fault]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def num_failed(self) -> int:
        """Rows that cannot run."""
        return self.num_rows - self.num_ok

    def render(self) -> Iterator[str]:
        """The report as lines of plain text."""
        yield f"{self.num_rows:,} rows: {self.num_ok:,} ok, {self.num_failed:,} with errors; tokens not counted"
        for kind, count in self.counts.items():
            yield f"{kind}: {count:,}"
            for fault in self.examples[kind]:
                at = f" [{fault.error.field}]" if fault.error.field else ""
                yield f"  {fault.error.message}{at}"
            if count > len(self.examples[kind]):
                yield f"  ... and {count - len(self.examples[kind]):,} more"
        for warning in self.warnings:
            yield f"warning: {warning}"

    def as_dict(self) -> dict[str, Any]:
        """The report for `--json`."""
        return {
            "num_rows": self.num_rows,
            "num_ok": self.num_ok,
            "num_failed": self.num_failed,
            "num_answers": self.num_answers,
            "num_tokens": None,
            "errors": {
                kind: {
                    "count": count,
                    "examples": [
                        {"row": fault.row, "id": fault.id, "field": fault.error.field, "message": fault.error.message}
                        for fault in self.examples[kind]
                    ],
                }
                for kind, count in self.counts.items()
            },
            "warnings": self.warnings,
        }


def validate(manifest: Manifest) -> ValidationReport:
    """Reads every row and reports. Raises ManifestError where there is no row at all."""
    report = ValidationReport()
    for answer in manifest.rows():
        if isinstance(answer, Fault):
            report.num_rows += 1
            kind = answer.error.type
            report.counts[kind] = report.counts.get(kind, 0) + 1
            examples = report.examples.setdefault(kind, [])
            if len(examples) < NUM_EXAMPLES:
                examples.append(answer)
            continue
        report.num_answers += 1
        if answer.sample == 0:
            report.num_rows += 1
            report.num_ok += 1
    report.counts = dict(sorted(report.counts.items(), key=lambda item: -item[1]))
    report.warnings = manifest.warnings
    return report
