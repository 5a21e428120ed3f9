"""The merge: one row for each input, in the manifest's order, whatever happened before."""

from importlib import import_module
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from output_rows import answer_to, make_failure, make_folder, make_request, make_result

from longbatch.core import Request, Result
from longbatch.errors import InterruptedRun
from longbatch.output import KeyTable, ResultWriter, RunFolder, buckets, merge, read_success, result_files, scan
from longbatch.output import parquet as output_parquet


def put(folder: RunFolder, *results: Result, worker: str = "w0", attempt: int = 1) -> None:
    with ResultWriter(folder, worker, attempt, reserve_bytes=0) as writer:
        writer.append(*results)


def rows(folder: RunFolder) -> list[tuple[str | None, int, int, str, str | None]]:
    table = pq.read_table(folder.results, columns=["id", "row", "sample", "status", "text"])
    return [tuple(row.values()) for row in table.to_pylist()]


def expected_rows(requests: list[Request]) -> list[tuple[str | None, int, int, str, str | None]]:
    return [(request.id, request.row, request.sample, "ok", answer_to(request)) for request in requests]


def test_rows_come_in_the_order_of_the_manifest(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    requests = [make_request(row, sample=sample) for row in range(50) for sample in range(1 + row % 3)]
    shuffled = sorted(requests, key=lambda request: request.fingerprint)
    put(folder, *(make_result(request) for request in shuffled[:40]))
    put(folder, *(make_result(request) for request in shuffled[40:]), worker="w1")
    summary = merge(folder, KeyTable.of(requests))
    assert rows(folder) == expected_rows(requests)
    assert (summary.num_rows, summary.num_missing, summary.counts) == (len(requests), 0, {"ok": len(requests)})
    assert read_success(folder) == summary


def test_many_buckets_files_and_row_groups_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 100_000)
    monkeypatch.setattr(import_module("longbatch.output.merge"), "RESULT_FILE_BYTES", 50_000)
    monkeypatch.setattr(output_parquet, "ROW_GROUP_BYTES", 50_000)
    folder = make_folder(tmp_path)
    requests = [make_request(row) for row in range(3000)]
    shuffled = sorted(requests, key=lambda request: request.fingerprint)
    for worker in range(3):
        put(folder, *(make_result(request) for request in shuffled[worker::3]), worker=f"w{worker}")
    merge(folder, KeyTable.of(requests))
    assert rows(folder) == expected_rows(requests)
    files = result_files(folder)
    assert len(files) > 2
    for path in files:
        for group in range(pq.ParquetFile(path).num_row_groups):
            assert pq.ParquetFile(path).read_row_group(group).nbytes <= 50_000


def test_a_row_larger_than_a_bucket_is_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 10_000)
    monkeypatch.setattr(output_parquet, "ROW_GROUP_BYTES", 20_000)
    folder = make_folder(tmp_path)
    texts = ["small", "huge " * 20_000, "small", "huge " * 30_000, "small"]
    put(folder, *(make_result(make_request(row), text=text) for row, text in reversed(list(enumerate(texts)))))
    merge(folder, 5)
    assert [row[4] for row in rows(folder)] == texts


def test_an_answer_given_twice_is_there_once(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    request, failing = make_request(0), make_request(1)
    put(folder, make_failure(request), make_failure(failing, attempt=1))
    put(folder, make_result(request, attempt=2), make_failure(failing, "internal", attempt=2), worker="w1")
    put(folder, make_failure(request, attempt=3), worker="w2")
    for expected in (KeyTable.of([request, failing]), 2):
        summary = merge(folder, expected)
        assert [row[3] for row in rows(folder)] == ["ok", "error"]
        assert summary.counts == {"ok": 1, "internal": 1}
        assert summary.num_failed == 1


def test_an_incomplete_merge_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    put(folder, make_result(make_request(0)))
    table = KeyTable.of([make_request(0), make_request(1), make_request(2)])
    for expected in (table, 3):
        with pytest.raises(InterruptedRun, match="2 rows have no result yet"):
            merge(folder, expected)
    assert not folder.results.exists()
    assert not folder.success.exists()


def test_a_partial_merge_is_not_a_success(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    requests = [make_request(0), make_request(1)]
    put(folder, make_result(requests[0]))
    merge(folder, 1)
    assert folder.success.exists()
    summary = merge(folder, KeyTable.of(requests), partial=True)
    assert (summary.num_rows, summary.num_missing) == (1, 1)
    assert rows(folder) == expected_rows(requests[:1])
    assert not folder.success.exists()
    put(folder, make_result(requests[1]))
    assert merge(folder, KeyTable.of(requests)).num_missing == 0
    assert rows(folder) == expected_rows(requests)


def test_nothing_done_at_all_can_be_merged_partially(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    assert merge(folder, KeyTable.of([make_request(0)]), partial=True).num_rows == 0
    assert pq.read_table(folder.results).num_rows == 0


def test_rows_that_left_the_manifest_leave_the_results_and_moved_ones_move(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    put(folder, *(make_result(make_request(row)) for row in range(5)))
    today = [make_request(0, "row-4"), make_request(1, "row-0"), make_request(2, "row-2")]
    merge(folder, KeyTable.of(today))
    assert [row[:2] for row in rows(folder)] == [("row-4", 0), ("row-0", 1), ("row-2", 2)]


def test_an_answer_to_other_content_is_no_answer(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    put(folder, make_result(make_request(0, content="old")))
    with pytest.raises(InterruptedRun, match="1 of them have one for other content") as caught:
        merge(folder, KeyTable.of([make_request(0, content="new")]))
    assert "--update" in str(caught.value.hint)


def test_the_same_merge_again_writes_nothing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    put(folder, make_result(make_request(0)))
    first = merge(folder, 1)
    before = folder.success.stat().st_mtime_ns
    assert merge(folder, 1) == first
    assert folder.success.stat().st_mtime_ns == before
    result_files(folder)[0].unlink()
    assert merge(folder, 1).num_rows == 1
    assert rows(folder) == expected_rows([make_request(0)])


def test_a_flipped_bit_in_any_place_of_a_part_is_found_and_its_rows_run_again(tmp_path: Path) -> None:
    requests = [make_request(row) for row in range(40)]
    folder = make_folder(tmp_path)
    put(folder, *(make_result(request) for request in requests[:20]))
    put(folder, *(make_result(request) for request in requests[20:]), worker="w1")
    part = folder.parts / "part-w1-1-0.parquet"
    content = part.read_bytes()
    for place in range(0, len(content), 97):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        part.write_bytes(flipped)
        with pytest.raises(InterruptedRun, match=r"20 rows have no result yet\ndamaged and set aside: .*part-w1-1-0"):
            merge(folder, KeyTable.of(requests))
        assert not part.exists()
        assert len(scan(folder)) == 20
        assert scan(folder).damage == ()
    put(folder, *(make_result(request) for request in requests[20:]), worker="w1")
    merge(folder, KeyTable.of(requests))
    assert rows(folder) == expected_rows(requests)


def test_a_partial_merge_leaves_out_a_damaged_part(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    put(folder, make_result(make_request(0)))
    put(folder, make_result(make_request(1)), worker="w1")
    part = folder.parts / "part-w1-1-0.parquet"
    content = bytearray(part.read_bytes())
    content[len(content) // 3] ^= 1
    part.write_bytes(content)
    table = KeyTable.of([make_request(0), make_request(1)])
    assert merge(folder, table, partial=True).num_missing == 1
    assert rows(folder) == expected_rows([make_request(0)])


def test_what_a_killed_merge_left_is_cleaned_up(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    put(folder, make_result(make_request(0)))
    (folder.work / ".merge-1" / "results").mkdir(parents=True)
    (folder.work / ".merge-1" / "bucket-0.arrows").write_bytes(b"half")
    merge(folder, 1)
    assert sorted(path.name for path in folder.work.iterdir()) == ["w0"]


def test_what_a_merge_left_that_was_killed_when_it_was_done_is_cleaned_up(tmp_path: Path) -> None:
    """Its results are whole and are not written again, but the files that they replaced go."""
    folder = make_folder(tmp_path)
    requests = [make_request(row) for row in range(3)]
    put(folder, *(make_result(request) for request in requests))
    summary = merge(folder, KeyTable.of(requests))
    left = folder.work / ".merge-123" / "old"
    left.mkdir(parents=True)
    (left / "results-00000.parquet").touch()
    assert merge(folder, KeyTable.of(requests)) == summary
    assert not list(folder.work.glob(".merge-*"))
