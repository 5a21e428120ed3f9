"""Parts: small immutable Parquet files of finished results, made from journals.

A part has the name of its journal, so publishing the same journal twice is seen and does nothing. Each
worker notes in a ledger what it published (rows, bytes, crc32), so that a missing or a damaged part is found.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from longbatch.output.files import disk_errors, file_checksum, fsync_folder, publish, temporary_path
from longbatch.output.folder import RunFolder
from longbatch.output.journal import JournalReader, JournalReport
from longbatch.output.parquet import READ_ERRORS, FileFacts, ParquetSink, open_checked

LEDGER = "published.jsonl"
JOURNAL_NAME = re.compile(r"journal-(\d+)-(\d+)\.arrows")
WORKER_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


@dataclass(frozen=True, slots=True)
class Damage:
    """A file that is not what was written, and in what way."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def diagnose(path: Path, error: Exception, facts: FileFacts | None) -> Damage:
    """What it means that a Parquet file could not be read: its content is damaged, or (raised as DiskError) the
    disk, the memory or a limit of this machine refuses, and the file is not to blame."""
    with disk_errors("read", path):
        if isinstance(error, OSError) and error.errno is not None:
            raise error
        if facts is not None and file_checksum(path) == facts.crc32:
            raise OSError(f"the file is intact, but reading it fails with {type(error).__name__}") from error
    return Damage(path, f"the file cannot be read ({type(error).__name__})")


def journal_path(folder: RunFolder, worker: str, attempt: int, sequence: int) -> Path:
    return folder.worker(worker) / f"journal-{attempt}-{sequence}.arrows"


def part_path(folder: RunFolder, worker: str, attempt: int, sequence: int) -> Path:
    return folder.parts / f"part-{worker}-{attempt}-{sequence}.parquet"


def list_parts(folder: RunFolder) -> list[Path]:
    """Every published part, in a fixed order."""
    return sorted(folder.parts.glob("part-*.parquet"))


def list_journals(folder: RunFolder, worker: str = "*") -> list[Path]:
    """The journals that are not yet parts, of one worker or of all."""
    return sorted(path for path in folder.work.glob(f"{worker}/journal-*.arrows") if JOURNAL_NAME.fullmatch(path.name))


def read_ledgers(folder: RunFolder) -> dict[str, FileFacts]:
    """What all workers say they published, by file name. A torn line (its writer was killed) is left out."""
    ledger: dict[str, FileFacts] = {}
    for path in sorted(folder.work.glob(f"*/{LEDGER}")):
        for line in path.read_bytes().split(b"\n"):
            with suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                ledger[entry["part"]] = FileFacts(entry["rows"], entry["bytes"], entry["crc32"])
    return ledger


@dataclass(frozen=True, slots=True)
class Published:
    """One journal that became a part. part: None when the journal held nothing valid."""

    journal: Path
    part: Path | None
    report: JournalReport


def publish_journal(folder: RunFolder, journal: Path) -> Published:
    """Turn a journal that nobody writes any more into a part, and remove it.

    A kill at any point leaves the journal, the part, or both with the same rows. Raises DiskError.
    """
    worker = journal.parent.name
    match = JOURNAL_NAME.fullmatch(journal.name)
    if match is None:
        raise ValueError(f"not a journal: {journal}")
    attempt, sequence = int(match[1]), int(match[2])
    with disk_errors("publish the results of", journal):
        reader = JournalReader(journal)
        part = _write_part(folder, reader, worker, attempt, sequence)
        journal.unlink()
        fsync_folder(journal.parent)
    return Published(journal, part, reader.report)


def _write_part(folder: RunFolder, reader: JournalReader, worker: str, attempt: int, sequence: int) -> Path | None:
    sink: ParquetSink | None = None
    temporary = temporary_path(part_path(folder, worker, attempt, sequence), folder.worker(worker))
    try:
        for batch in reader.batches():
            sink = sink or ParquetSink(temporary, batch.schema)
            sink.write(batch)
        if sink is None:
            return None
        facts = sink.finish()
        while True:
            part = part_path(folder, worker, attempt, sequence)
            try:
                publish(temporary, part)
                break
            except FileExistsError:
                if _num_rows(part) == facts.num_rows:
                    facts = FileFacts(facts.num_rows, part.stat().st_size, file_checksum(part))
                    break
                sequence += 1
        _note(folder.worker(worker) / LEDGER, part, facts)
        return part
    finally:
        if sink is not None:
            sink.discard()


def _num_rows(part: Path) -> int | None:
    try:
        with open_checked(part) as file:
            num_rows: int = file.metadata.num_rows
            return num_rows
    except READ_ERRORS:
        return None


def _note(ledger: Path, part: Path, facts: FileFacts) -> None:
    entry = {"part": part.name, "rows": facts.num_rows, "bytes": facts.size, "crc32": facts.crc32}
    is_new = not ledger.exists()
    with ledger.open("ab", buffering=0) as file:
        # The line break comes first, so that a line which a kill cut short cannot swallow this one.
        file.write(b"\n" + json.dumps(entry).encode())
        os.fsync(file.fileno())
    if is_new:
        fsync_folder(ledger.parent)


def recover(folder: RunFolder, worker: str = "*") -> list[Published]:
    """Publish what dead workers left in their journals, and remove their temporary files.

    worker: one worker's name; all by default. Only for workers that are known to be dead: a live one would
    lose its open journal. Raises DiskError.
    """
    published = [publish_journal(folder, journal) for journal in list_journals(folder, worker)]
    with disk_errors("clean up in", folder.work):
        for stale in folder.work.glob(f"{worker}/.*.tmp"):
            stale.unlink(missing_ok=True)
    return published


def set_aside(folder: RunFolder, path: Path) -> Path:
    """Move a damaged file out of the way, so that its rows count as missing and run again."""
    with disk_errors("set aside", path):
        folder.damaged.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = folder.damaged / path.name
        number = 1
        while target.exists():
            target = folder.damaged / f"{path.name}.{number}"
            number += 1
        os.rename(path, target)
        fsync_folder(path.parent)
        fsync_folder(target.parent)
    return target
