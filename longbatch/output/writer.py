"""One worker's way out: results go to a journal at once and to a part now and then, off the engine's thread."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from itertools import islice
from types import TracebackType

import pyarrow as pa

from longbatch.core import Result
from longbatch.errors import DiskError
from longbatch.output.carried import CarriedColumns
from longbatch.output.files import is_full
from longbatch.output.folder import RunFolder
from longbatch.output.parts import WORKER_NAME
from longbatch.output.reserve import RESERVE_BYTES, Reserve
from longbatch.output.rolling import RollingJournal
from longbatch.output.rows import Placement, Stamp

QUEUE_ROWS = 8192
QUEUE_BYTES = 64 << 20
BATCH_ROWS = 1024
BATCH_BYTES = 4 << 20


class ResultWriter:
    """Journals results in a thread of its own, so that the engine never waits for the disk.

    `append` returns at once; the result is in the journal (safe from a kill) a moment later, and on the disk
    (safe from a power cut) after 32 results or 2 seconds. Whatever comes while the disk is busy is written
    and synced together. The journal becomes a part at 64 MiB, after 5 minutes, and on `close`.

    When the disk refuses a write, the next call raises DiskError, and everything appended and not yet written
    stays in memory: `flush` and `close` try again. When the disk is full, a reserve of 64 MiB is given up first,
    so that in practice everything finished is in the journal before the run ends with that error.

    worker: names the folder `_work/<worker>`, which only this process may write to. attempt: how many times
    this worker has been started. carried: types of the carried columns where they are known.
    """

    def __init__(
        self,
        folder: RunFolder,
        worker: str,
        attempt: int = 1,
        placement: Placement | None = None,
        carried: pa.Schema | None = None,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        if not WORKER_NAME.fullmatch(worker):
            raise ValueError(f"a worker's name has letters, digits, '_', '-' and single dots only, got {worker!r}")
        stamp = Stamp(folder.run_id, folder.config_hash, placement or Placement())
        self._journal = RollingJournal(folder, worker, attempt, stamp, CarriedColumns(carried))
        self._reserve = Reserve(folder.worker(worker), reserve_bytes)
        self._changed = threading.Condition()  # guards everything below
        self._queue: deque[tuple[Result, int]] = deque()  # each with its size in bytes
        self._queued_bytes = 0
        self._num_written = 0
        self._flushes_wanted = 0
        self._flushes_done = 0
        self._closing = False
        self._error: BaseException | None = None  # raised by the next call
        self._stuck = False  # after an error, until `flush` asks to try again
        self._thread = threading.Thread(target=self._run, name=f"results-{worker}", daemon=True)
        self._thread.start()

    @property
    def num_written(self) -> int:
        """How many of the results handed over, in their order, are in the journal and so safe from a kill.

        Raises DiskError if an earlier write failed.
        """
        with self._changed:
            self._raise_error()
            return self._num_written

    def append(self, *results: Result) -> None:
        """Hand over finished results; waits only while 8,192 of them or 64 MiB are queued.

        Raises DiskError if an earlier write failed; these results are kept all the same.
        """
        with self._changed:
            if self._closing:
                raise ValueError("the writer is closed")
            for result in results:
                size = _size(result)
                self._queue.append((result, size))
                self._queued_bytes += size
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._has_room() or self._error is not None)
            self._raise_error()

    def flush(self) -> None:
        """Return when everything appended so far is on the disk. Raises DiskError, and can be called again."""
        with self._changed:
            self._error, self._stuck = None, False
            self._flushes_wanted += 1
            wanted = self._flushes_wanted
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._flushes_done >= wanted or self._error is not None)
            self._raise_error()

    def close(self, *, publish: bool = True) -> None:
        """Flush, publish the last part and end the thread; without `publish` the journal stays for `recover`.

        Raises DiskError; the writer can then be closed again, when there is space.
        """
        if not self._closing:
            self.flush()
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            self._thread.join()
        self._reserve.release()  # the last part may need it
        self._journal.close(publish=publish)

    def __enter__(self) -> ResultWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # the error that is under way matters more than a second one
            with suppress(DiskError):
                self.close()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        """The writer's thread. After an error it goes on if the reserve made room, else when `flush` says so."""
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, self._patience())
                if self._closing and (not self._queue or self._stuck):
                    return
                if self._stuck:
                    continue
                results = self._next_results()
                wanted = self._flushes_wanted if len(results) == len(self._queue) else self._flushes_done
            try:
                if results:
                    self._journal.write(results)
                    with self._changed:
                        for _ in results:
                            self._queued_bytes -= self._queue.popleft()[1]
                        self._num_written += len(results)
                        self._changed.notify_all()
                if wanted > self._flushes_done:
                    self._journal.sync()
                self._journal.keep_up()
            except BaseException as error:
                has_room = is_full(error) and self._reserve.release()
                with self._changed:
                    self._error, self._stuck = error, not has_room
                    self._changed.notify_all()
            else:
                with self._changed:
                    self._flushes_done = wanted
                    self._changed.notify_all()

    def _has_work(self) -> bool:
        wanted = bool(self._queue) or self._flushes_wanted > self._flushes_done
        return self._closing or (wanted and not self._stuck)

    def _patience(self) -> float | None:
        return None if self._stuck else self._journal.idle_seconds()

    def _has_room(self) -> bool:
        return len(self._queue) < QUEUE_ROWS and self._queued_bytes < QUEUE_BYTES

    def _next_results(self) -> list[Result]:
        """The queued results that make one write: at most 1,024 rows or about 4 MiB."""
        taken: list[Result] = []
        num_bytes = 0
        for result, size in islice(self._queue, BATCH_ROWS):
            taken.append(result)
            num_bytes += size
            if num_bytes >= BATCH_BYTES:
                break
        return taken


def _size(result: Result) -> int:
    """About how many bytes a result takes in a journal."""
    size = 600 + len(result.text or "") + len(result.reasoning or "")
    if result.embedding is not None:
        size += int(result.embedding.nbytes)
    return size + 32 * len(result.logprobs or ())
