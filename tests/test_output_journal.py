"""The journal under every kind of harm: what is read back is what was written, or nothing."""

import resource
import signal
from pathlib import Path

import pyarrow as pa
import pytest

from longbatch.output.journal import Journal, JournalReader, JournalReport

SCHEMA = pa.schema([("number", pa.int64()), ("text", pa.large_string())])
BATCHES = [[(row * 10 + place, "x" * place) for place in range(row + 1)] for row in range(4)]


def record_batch(rows: list[tuple[int, str]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(column) for column in zip(*rows, strict=True)], schema=SCHEMA)


def write(path: Path) -> list[int]:
    """A journal of four writes that is never closed properly; returns its size after each."""
    journal = Journal(path, SCHEMA)
    sizes = [journal.size]
    for rows in BATCHES:
        journal.append(record_batch(rows))
        sizes.append(journal.size)
    journal.close()
    assert path.stat().st_size == sizes[-1]
    return sizes


def read(path: Path) -> tuple[list[list[tuple[int, str]]], JournalReport]:
    reader = JournalReader(path)
    batches = [[tuple(row.values()) for row in batch.to_pylist()] for batch in reader.batches()]
    return batches, reader.report


def test_everything_written_is_read_back(tmp_path: Path) -> None:
    write(tmp_path / "journal")
    assert read(tmp_path / "journal") == (BATCHES, JournalReport(num_rows=10, torn=0, num_damaged=0))


def test_a_journal_is_an_arrow_stream_that_other_tools_can_open(tmp_path: Path) -> None:
    write(tmp_path / "journal")
    table = pa.ipc.open_stream(tmp_path / "journal").read_all()
    assert table.schema.names == ["crc32", "payload"]
    assert len(table) == 1 + len(BATCHES)


def test_cut_at_any_byte_the_whole_writes_before_it_are_read(tmp_path: Path) -> None:
    sizes = write(tmp_path / "journal")
    content = (tmp_path / "journal").read_bytes()
    for length in range(len(content)):
        (tmp_path / "cut").write_bytes(content[:length])
        num_whole = sum(size <= length for size in sizes)
        batches, report = read(tmp_path / "cut")
        assert batches == BATCHES[: max(0, num_whole - 1)]
        assert report.num_damaged == 0
        if num_whole:
            assert report.torn == length - sizes[num_whole - 1]


def test_with_any_bit_flipped_no_wrong_row_is_read(tmp_path: Path) -> None:
    write(tmp_path / "journal")
    content = (tmp_path / "journal").read_bytes()
    num_found = 0
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        (tmp_path / "flipped").write_bytes(flipped)
        batches, report = read(tmp_path / "flipped")
        assert all(batch in BATCHES for batch in batches)
        assert len(batches) == len(BATCHES) or report.torn or report.num_damaged
        num_found += len(batches) < len(BATCHES)
    assert num_found > len(content) / 3


def test_a_damaged_write_does_not_cost_the_later_ones(tmp_path: Path) -> None:
    sizes = write(tmp_path / "journal")
    content = bytearray((tmp_path / "journal").read_bytes())
    content[sizes[2] - 9] ^= 1  # in the last buffer of the second write
    (tmp_path / "journal").write_bytes(content)
    batches, report = read(tmp_path / "journal")
    assert batches == [BATCHES[0], *BATCHES[2:]]
    assert report == JournalReport(num_rows=8, torn=0, num_damaged=1)


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"PAR1", b"\xff" * 300], ids=["empty", "zeros", "text", "ones"])
def test_what_is_no_journal_holds_no_rows(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal").write_bytes(content)
    batches, report = read(tmp_path / "journal")
    assert batches == []
    assert report.num_rows == 0


def test_zeros_at_the_end_after_a_power_cut_are_a_torn_tail(tmp_path: Path) -> None:
    sizes = write(tmp_path / "journal")
    with (tmp_path / "journal").open("ab") as file:
        file.write(b"\0" * 4096)
    batches, report = read(tmp_path / "journal")
    assert batches == BATCHES
    assert 0 < report.torn <= 4096
    assert sizes[-1] + 4096 == (tmp_path / "journal").stat().st_size


def test_an_existing_journal_is_never_written_to(tmp_path: Path) -> None:
    write(tmp_path / "journal")
    before = (tmp_path / "journal").read_bytes()
    with pytest.raises(FileExistsError):
        Journal(tmp_path / "journal", SCHEMA)
    assert (tmp_path / "journal").read_bytes() == before


def test_a_write_that_the_disk_refuses_half_way_leaves_no_trace(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", SCHEMA)
    journal.append(record_batch(BATCHES[0]))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.size + 100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            journal.append(record_batch(BATCHES[1]))
        assert (tmp_path / "journal").stat().st_size == journal.size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    journal.append(record_batch(BATCHES[2]))
    journal.close()
    assert read(tmp_path / "journal")[0] == [BATCHES[0], BATCHES[2]]
