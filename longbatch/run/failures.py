"""Failed rows counted by reason, and the rule that ends a run in which too many fail."""

from __future__ import annotations

import logging
from collections import Counter

# A percentage is taken over the first rows that have a result.
FIRST_ROWS = 100
_log = logging.getLogger("longbatch")


class Failures:
    """rule: `off`, a number of failed rows, or a percentage of the first FIRST_ROWS rows (`50%`)."""

    def __init__(self, rule: str) -> None:
        self.counts: Counter[str] = Counter()
        self.too_many = False
        self.reason = ""
        self._rule = rule
        self._rows = 0
        self._failed = 0

    def add(self, error: str | None) -> None:
        """Count the result of one row, by its error type. A kind of failure is logged the first time only."""
        self._rows += 1
        if error is not None:
            if not self.counts[error]:
                _log.warning("first row failed with %s; further ones are counted only", error)
            self.counts[error] += 1
            self._failed += 1
        if self._rule == "off" or self.too_many:
            return
        if not self._rule.endswith("%"):
            self._judge(self._failed >= max(1, int(self._rule)), f"{self._failed} rows failed")
        elif self._rows == FIRST_ROWS:
            limit = FIRST_ROWS * float(self._rule[:-1]) / 100
            self._judge(self._failed >= max(1.0, limit), f"{self._failed} of the first {FIRST_ROWS} rows failed")

    def _judge(self, too_many: bool, reason: str) -> None:
        if too_many:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.counts.most_common(3))
            self.too_many, self.reason = True, f"stopped: {reason} ({kinds})"
