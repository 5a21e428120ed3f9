"""What is known to be done, for each way in which a row, a result and a file can stand to each other."""

from pathlib import Path

import pytest
from output_rows import make_failure, make_folder, make_request, make_result

from longbatch.core import Fault, Location, Result
from longbatch.errors import RowError
from longbatch.output import KeyTable, Match, ResultWriter, RowState, RunFolder, recover, scan
from longbatch.output.keys import digest_of, key_digest


def put(folder: RunFolder, *results: Result, worker: str = "w0", publish: bool = True) -> None:
    writer = ResultWriter(folder, worker, reserve_bytes=0)
    writer.append(*results)
    writer.close(publish=publish)


def only_part(folder: RunFolder) -> Path:
    (part,) = folder.parts.iterdir()
    return part


def test_a_new_folder_holds_nothing(tmp_path: Path) -> None:
    done = scan(make_folder(tmp_path))
    assert (len(done), done.counts(), done.damage) == (0, {"ok": 0}, ())
    assert list(done.match([make_request(0)])) == [Match(make_request(0), RowState.MISSING, 0, None)]


@pytest.mark.parametrize("publish", [True, False], ids=["part", "journal"])
def test_every_state_of_a_row(tmp_path: Path, publish: bool) -> None:
    folder = make_folder(tmp_path)
    results = [
        make_result(make_request(0)),
        make_failure(make_request(1), "prompt_too_long", attempt=2),
        make_failure(make_request(2), "out_of_memory", attempt=3),
        make_result(make_request(3, content="old")),
        make_result(make_request(5, sample=1)),
    ]
    put(folder, *results, publish=publish)
    done = scan(folder)
    requests = [make_request(row, content="new" if row == 3 else "") for row in range(6)]
    assert [match[1:] for match in done.match(requests)] == [
        (RowState.OK, 1, None),
        (RowState.FAILED, 2, "prompt_too_long"),
        (RowState.RETRYABLE, 3, "out_of_memory"),
        (RowState.CHANGED, 0, None),
        (RowState.MISSING, 0, None),
        (RowState.MISSING, 0, None),
    ]
    assert done.counts() == {"ok": 3, "prompt_too_long": 1, "out_of_memory": 1}
    assert len(scan(folder, journals=False)) == (5 if publish else 0)


def test_ok_counts_before_error_and_then_the_newest_attempt(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    both, failing = make_request(0), make_request(1)
    put(folder, make_result(both, attempt=1), make_failure(failing, "internal", attempt=1))
    put(folder, make_failure(both, attempt=5), make_failure(failing, "row_timeout", attempt=2), worker="w1")
    put(folder, make_failure(failing, "io_error", attempt=1), worker="w2", publish=False)
    assert [match[1:] for match in scan(folder).match([both, failing])] == [
        (RowState.OK, 1, None),
        (RowState.RETRYABLE, 2, "row_timeout"),
    ]


def test_the_id_7_and_row_7_and_the_samples_of_both_differ() -> None:
    keys = {digest_of(make_request(7, id, sample)) for id in (None, "7", "") for sample in (0, 1)}
    assert len(keys) == 6


def test_a_key_never_changes_between_versions() -> None:
    assert key_digest("row-1", 1, 0).hex() == "e7dd1779dd740d8060a7b8cdc5935cf0"
    assert key_digest(None, 1, 2).hex() == "f5d5a8e08237cd56b5a9b9e8ab00b013"
    assert key_digest("row-1", 1, 0, duplicate=True).hex() == "4c108600125ea5c168b2d89f8331b486"


def test_a_duplicate_does_not_take_the_place_of_the_row_that_owns_the_id(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    owner = make_request(0, "same")
    duplicate = Fault(4, "same", Location(0, 4, 1), RowError("duplicate_id", "row 0 has it"), fingerprint=b"x")
    put(folder, make_result(owner))
    assert [match.state for match in scan(folder).match([owner, duplicate])] == [RowState.OK, RowState.MISSING]
    put(folder, Result.failed(duplicate, duplicate.error))
    assert [match.state for match in scan(folder).match([owner, duplicate])] == [RowState.OK, RowState.FAILED]


def test_many_rows_are_matched_in_order(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    requests = [make_request(row) for row in range(20_000)]
    put(folder, *(make_result(request) for request in requests if request.row % 3))
    states = [match.state for match in scan(folder).match(iter(requests))]
    assert states == [RowState.OK if row % 3 else RowState.MISSING for row in range(20_000)]


def test_the_key_table_holds_the_manifest_in_order() -> None:
    requests = [make_request(row, sample=sample) for row in range(40_000) for sample in range(2)]
    table = KeyTable.of(iter(requests))
    assert len(table) == 80_000
    assert table.rows[[0, 1, -1]].tolist() == [0, 0, 39_999]
    assert table.samples[[0, 1, -1]].tolist() == [0, 1, 1]
    assert table.answers[5] == (digest_of(requests[5]) + requests[5].fingerprint).rstrip(b"\0")
    assert table.digest() == KeyTable.of(requests).digest() != KeyTable.of(requests[1:]).digest()
    assert len(KeyTable.of([])) == 0


def test_a_saved_key_table_comes_back_or_is_not_used(tmp_path: Path) -> None:
    table = KeyTable.of([make_request(row) for row in range(1000)])
    path = tmp_path / "keys.npz"
    assert KeyTable.load(path) is None
    table.save(path)
    loaded = KeyTable.load(path)
    assert loaded is not None
    assert loaded.digest() == table.digest()
    content = path.read_bytes()
    for damaged in (b"", content[:500], content[:-100], content[:2000] + b"\xff" + content[2001:]):
        path.write_bytes(damaged)
        assert KeyTable.load(path) is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.npz"]


@pytest.mark.parametrize("kept", [0, 4, 100, -1], ids=["nothing", "magic", "pages", "all but one byte"])
def test_a_part_cut_short_is_reported_and_its_rows_run_again(tmp_path: Path, kept: int) -> None:
    folder = make_folder(tmp_path)
    put(folder, make_result(make_request(0)))
    put(folder, make_result(make_request(1)), worker="w1")
    part = folder.parts / "part-w1-1-0.parquet"
    part.write_bytes(part.read_bytes()[:kept])
    done = scan(folder)
    assert [found.path for found in done.damage] == [part]
    assert [match.state for match in done.match([make_request(0), make_request(1)])] == [RowState.OK, RowState.MISSING]


def test_a_missing_part_is_reported_and_its_rows_run_again(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    put(folder, make_result(make_request(0)))
    part = only_part(folder)
    part.unlink()
    done = scan(folder)
    assert [str(found) for found in done.damage] == [f"{part}: the file is missing"]
    assert len(done) == 0


def test_a_damaged_part_without_a_ledger_entry_is_reported(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    put(folder, *(make_result(make_request(row)) for row in range(100)))
    (folder.worker("w0") / "published.jsonl").unlink()
    content = bytearray(only_part(folder).read_bytes())
    content[-20] ^= 255  # in the footer
    only_part(folder).write_bytes(content)
    assert [found.path for found in scan(folder).damage] == [only_part(folder)]


def test_a_torn_ledger_line_costs_nothing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    put(folder, make_result(make_request(0)))
    with (folder.worker("w0") / "published.jsonl").open("ab") as file:
        file.write(b'\n{"part": "part-w0-1-1.par')
    put(folder, make_result(make_request(1)))
    (folder.parts / "part-w0-1-1.parquet").unlink()
    assert [found.reason for found in scan(folder).damage] == ["the file is missing"]


def test_a_journal_torn_by_a_kill_is_read_up_to_there_without_complaint(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    writer = ResultWriter(folder, "w0")
    for row in range(3):
        writer.append(make_result(make_request(row)))
        writer.flush()
    writer.close(publish=False)
    (journal,) = folder.worker("w0").glob("journal-*")
    journal.write_bytes(journal.read_bytes()[:-10])
    done = scan(folder)
    assert (len(done), done.damage) == (2, ())
    (published,) = recover(folder)
    assert (published.report.num_rows, published.report.num_damaged) == (2, 0)
    assert published.report.torn > 0
    assert len(scan(folder, journals=False)) == 2


def test_a_flipped_bit_in_a_journal_is_reported(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    put(folder, make_result(make_request(0), text="needle in the journal"), publish=False)
    (journal,) = folder.worker("w0").glob("journal-*")
    content = bytearray(journal.read_bytes())
    content[content.index(b"needle")] ^= 4
    journal.write_bytes(content)
    done = scan(folder)
    assert (len(done), [found.path for found in done.damage]) == (0, [journal])


def test_scanning_changes_nothing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    put(folder, make_result(make_request(0)))
    put(folder, make_result(make_request(1)), worker="w1", publish=False)
    before = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")}
    scan(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")} == before
