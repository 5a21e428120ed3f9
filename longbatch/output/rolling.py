"""The journals of one worker, one after another: each becomes a part when it is large or old enough."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from longbatch.core import Result
from longbatch.errors import RowError
from longbatch.output.carried import CarriedColumns
from longbatch.output.files import disk_errors
from longbatch.output.folder import RunFolder
from longbatch.output.journal import Journal
from longbatch.output.parts import journal_path, part_path, publish_journal
from longbatch.output.rows import Stamp, results_to_batch

PART_BYTES = 64 << 20
PART_SECONDS = 300.0
SYNC_ROWS = 32
SYNC_SECONDS = 2.0


class RollingJournal:
    """Where one worker's results go, on one thread. Every method that writes raises DiskError, loses nothing
    that it was given before, and can be called again."""

    def __init__(self, folder: RunFolder, worker: str, attempt: int, stamp: Stamp, carried: CarriedColumns) -> None:
        self._folder = folder
        self._worker = worker
        self._attempt = attempt
        self._stamp = stamp
        self._carried = carried
        self._sequence = 0
        self._journal: Journal | None = None
        self._unpublished: list[Journal] = []
        self._opened = 0.0
        self._unsynced_rows = 0
        self._unsynced_since = 0.0
        with disk_errors("create the folder of a worker", folder.worker(worker)):
            folder.worker(worker).mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, results: Sequence[Result]) -> None:
        """Put results into the journal, all or none; they are safe from a kill when this returns."""
        batch = self._batch(results)
        if self._journal is not None and self._journal.schema != batch.schema:  # a carried column was widened
            self._roll()
        with disk_errors("write to the journal in", self._folder.worker(self._worker)):
            journal = self._journal or self._open(batch.schema)
            journal.append(batch)
        if self._unsynced_rows == 0:
            self._unsynced_since = time.monotonic()
        self._unsynced_rows += batch.num_rows

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        if self._journal is not None and self._unsynced_rows:
            with disk_errors("sync", self._journal.path):
                self._journal.sync()
        self._unsynced_rows = 0

    def keep_up(self) -> None:
        """Do what is due: sync after 32 rows or 2 seconds, publish a part at 64 MiB or after 5 minutes."""
        now = time.monotonic()
        if self._unsynced_rows >= SYNC_ROWS or (self._unsynced_rows and now - self._unsynced_since >= SYNC_SECONDS):
            self.sync()
        if self._journal is not None and (self._journal.size >= PART_BYTES or now - self._opened >= PART_SECONDS):
            self._roll()
            self.publish()

    def idle_seconds(self) -> float | None:
        """How long nothing is due if nothing is written; None for ever."""
        if self._journal is None:
            return None
        due = self._opened + PART_SECONDS
        if self._unsynced_rows:
            due = min(due, self._unsynced_since + SYNC_SECONDS)
        return max(0.0, due - time.monotonic())

    def publish(self) -> None:
        """Make parts of the journals that are complete."""
        while self._unpublished:
            publish_journal(self._folder, self._unpublished[0].path)
            del self._unpublished[0]

    def close(self, *, publish: bool) -> None:
        """Sync, and publish everything; without `publish` the journal stays for `recover`."""
        self.sync()
        if self._journal is not None:
            self._roll()
        if publish:
            self.publish()

    def _roll(self) -> None:
        journal = self._journal
        if journal is None:
            return
        self.sync()
        with disk_errors("close", journal.path):
            journal.close()
        self._unpublished.append(journal)
        self._journal = None

    def _open(self, schema: pa.Schema) -> Journal:
        while True:
            path = journal_path(self._folder, self._worker, self._attempt, self._sequence)
            part = part_path(self._folder, self._worker, self._attempt, self._sequence)
            self._sequence += 1
            if part.exists():
                continue
            try:
                self._journal = Journal(path, schema)
            except FileExistsError:  # left by a dead process; `recover` publishes it under its own name
                continue
            self._opened = time.monotonic()
            return self._journal

    def _batch(self, results: Sequence[Result]) -> pa.RecordBatch:
        try:
            return results_to_batch(results, self._stamp, self._carried)
        except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
            return results_to_batch([self._storable(result) for result in results], self._stamp, self._carried)

    def _storable(self, result: Result) -> Result:
        """The result itself, or an error row in its place if one of its values fits no column."""
        try:
            results_to_batch([result], self._stamp, self._carried)
        except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError) as error:
            message = f"the result could not be stored ({type(error).__name__}); this is a bug, please report it"
            bare = Result(key=result.key, row=result.row, status="error", error=RowError("internal", message))
            return replace(bare, attempt=result.attempt, fingerprint=result.fingerprint)
        return result
