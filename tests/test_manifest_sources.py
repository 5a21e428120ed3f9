"""Where rows come from: plain and compressed lines, Parquet, text files, folders, globs, URLs; and rows read again."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from manifest_files import read_all, write_lines

from longbatch.core import Fault, Location, MediaRef, Request
from longbatch.errors import DiskError, ManifestError
from longbatch.manifest import Manifest, ManifestOptions

NUM_ROWS = 300
LINES = b"".join(
    b'{"id": "r%d", "prompt": "%s"}\n' % (i, random.Random(i).randbytes(200).hex().encode()) for i in range(NUM_ROWS)
)


def compress_gzip(data: bytes) -> bytes:
    return gzip.compress(data)


def compress_zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


both = pytest.mark.parametrize(("suffix", "compress"), [("gz", compress_gzip), ("zst", compress_zstd)])


def kinds(answers: list[Request | Fault]) -> list[str]:
    return [answer.error.type if isinstance(answer, Fault) else "ok" for answer in answers]


def write_table(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def assert_read_again(manifest: Manifest, folder: Path | None = None) -> None:
    """Every good row, read again in another order, is what it was."""
    answers = [answer for answer in manifest.rows() if isinstance(answer, Request)]
    assert answers
    if folder is not None:
        manifest.spool(folder)
    for answer in reversed(answers):
        assert manifest.read(answer.location, answer.row) == [answer]
    manifest.close()
    assert manifest.read(answers[0].location, answers[0].row) == [answers[0]]
    manifest.close()


@both
def test_compressed_lines(tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / f"m.jsonl.{suffix}"
    path.write_bytes(compress(LINES[:40_000]) + compress(LINES[40_000:]))  # two members or frames
    assert [answer.id for answer in read_all(path)] == [f"r{i}" for i in range(NUM_ROWS)]
    assert_read_again(Manifest.open([str(path)]), tmp_path / "spool")


def test_gzip_padded_with_zeros(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl.gz"
    path.write_bytes(gzip.compress(LINES) + b"\0" * 5000)
    assert kinds(read_all(path)) == ["ok"] * NUM_ROWS


@both
@pytest.mark.parametrize("num_missing", [3, 30_000])
def test_truncated_compression(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes], num_missing: int
) -> None:
    # Several frames, as zstd gives out whole blocks only.
    path = tmp_path / f"m.jsonl.{suffix}"
    path.write_bytes(
        b"".join(compress(LINES[start : start + 9000]) for start in range(0, len(LINES), 9000))[:-num_missing]
    )
    answers = read_all(path)
    assert kinds(answers) == ["ok"] * (len(answers) - 1) + ["truncated_input"]
    if num_missing == 3 and suffix == "gz":
        assert len(answers) == NUM_ROWS + 1
    else:
        assert len(answers) > NUM_ROWS // 4
    fault = answers[-1]
    assert isinstance(fault, Fault)
    assert fault.error.message.startswith(f"m.jsonl.{suffix}:{len(answers)}: ")
    assert_read_again(Manifest.open([str(path)]), tmp_path / "spool")


def test_truncated_file_costs_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES)[:-1000])
    write_lines(tmp_path / "b.jsonl", {"prompt": "x"})
    answers = read_all(tmp_path)
    assert kinds(answers)[-2:] == ["truncated_input", "ok"]
    assert [answer.row for answer in answers] == list(range(len(answers)))


@both
def test_damaged_compression(tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / f"m.jsonl.{suffix}"
    data = bytearray(compress(LINES))
    data[-6] ^= 0xFF  # in gzip's CRC, at the end of zstd's last block
    path.write_bytes(data)
    assert kinds(read_all(path))[-1] == "unreadable_input"
    path.write_bytes(LINES)  # not compressed at all
    assert kinds(read_all(path)) == ["unreadable_input"]
    path.write_bytes(compress(LINES) + b"garbage")
    assert kinds(read_all(path)) == ["ok"] * NUM_ROWS + ["unreadable_input"]


def test_zstd_window_that_would_take_too_much_memory(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = tmp_path / "m.jsonl.zst"
    path.write_bytes(stream.compress(LINES) + stream.flush())
    (fault,) = read_all(path)
    assert isinstance(fault, Fault)
    assert "--long" in fault.error.message


@both
def test_expansion_is_capped(tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / f"m.jsonl.{suffix}"
    path.write_bytes(compress(b'{"prompt": "a"}\n' + b" " * (40 << 20) + b'\n{"prompt": "b"}\n'))
    assert kinds(read_all(path, max_expansion=100_000)) == ["ok", "ok"]
    assert kinds(read_all(path, max_expansion=10)) == ["ok", "file_too_large"]
    small = tmp_path / f"small.jsonl.{suffix}"
    small.write_bytes(compress(b'{"prompt": "a"}\n' + b" " * (4 << 20) + b'\n{"prompt": "b"}\n'))
    assert kinds(read_all(small, max_expansion=10)) == ["ok", "ok"], "the ratio does not count below 16 MiB"


def test_bomb_is_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl.zst"
    path.write_bytes(zstandard.compress(b"\0" * (64 << 20)) * 64)
    script = (
        "import sys; from longbatch.manifest import Manifest\n"
        "print([fault.error.type for fault in Manifest.open([sys.argv[1]]).rows()])\n"
        # Not getrusage: there a child begins with the peak of its parent.
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    answers, memory = done.stdout.splitlines()
    assert answers in ("['row_too_large', 'file_too_large']", "['file_too_large']")
    assert int(memory) < 500 << 10


def test_parquet(tmp_path: Path) -> None:
    rows = [{"id": i, "prompt": f"p{i}", "max_tokens": 5.0 if i % 2 else None, "unread": "x"} for i in range(1000)]
    path = write_table(tmp_path / "m.parquet", rows, row_group_size=300)
    answers = read_all(path)
    assert [answer.id for answer in answers] == [str(i) for i in range(1000)]
    assert isinstance(answers[1], Request)
    assert (answers[1].sampling.max_tokens, answers[1].location) == (5, Location(0, 1, 0))
    assert_read_again(Manifest.open([str(path)]))


def test_parquet_fault_names_row_group_and_row(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "temperature": float("nan") if i == 7 else 0.5} for i in range(10)]
    fault = read_all(write_table(tmp_path / "m.parquet", rows, row_group_size=4))[7]
    assert isinstance(fault, Fault)
    assert (fault.error.type, fault.error.field) == ("invalid_value", "temperature")
    assert fault.error.message.startswith("m.parquet, row group 1, row 3: ")


def test_parquet_nested_columns(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "hi", "name": None}], "chat_template_kwargs": {"a": True}},
        {"messages": [{"role": "user", "content": "ho", "name": "x"}], "chat_template_kwargs": None},
    ]
    first, second = read_all(write_table(tmp_path / "m.parquet", rows))
    assert isinstance(first, Request)
    assert isinstance(second, Request)
    assert (first.template_kwargs, second.messages[0].name) == ({"a": True}, "x")


def test_parquet_document_bytes_and_kept_columns(tmp_path: Path) -> None:
    rows = [{"document": {"path": "a.txt", "bytes": b"caf\xe9"}, "prompt": "x", "n1": 1, "blob": b"b"}]
    path = write_table(tmp_path / "m.parquet", rows)
    (answer,) = read_all(path, keep_columns=("*",))
    assert isinstance(answer, Request)
    assert answer.messages[0].parts[0] == MediaRef("document", None, b"caf\xe9", "document")
    assert answer.carried == {"n1": 1, "blob": b"b"}


def test_parquet_without_footer(tmp_path: Path) -> None:
    path = write_table(tmp_path / "m.parquet", [{"prompt": "x"}] * 100)
    write_lines(tmp_path / "n.jsonl", {"prompt": "x"})
    for data in (path.read_bytes()[:-20], path.read_bytes()[:3], b"PAR1", b""):
        path.write_bytes(data)
        answers = read_all(tmp_path)
        assert kinds(answers) == ["truncated_input", "ok"], len(data)


def test_parquet_damaged_row_group_costs_its_own_rows_only(tmp_path: Path) -> None:
    rows = [{"id": i, "prompt": random.Random(i).randbytes(100).hex()} for i in range(90)]
    path = write_table(tmp_path / "m.parquet", rows, row_group_size=30, compression="zstd", use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(1).column(1)
    data = bytearray(path.read_bytes())
    start = column.data_page_offset
    data[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)
    assert kinds(read_all(path)) == ["ok"] * 30 + ["unreadable_input"] * 30 + ["ok"] * 30
    assert_read_again(Manifest.open([str(path)]))


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    raw = pa.array([b"fine", b"caf\xe9", b"fine"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"id": ["a", "b", "c"], "prompt": text}), tmp_path / "m.parquet")
    answers = read_all(tmp_path / "m.parquet")
    assert kinds(answers) == ["ok", "invalid_encoding", "ok"]
    assert isinstance(answers[1], Fault)
    assert (answers[1].id, answers[1].error.field) == ("b", "prompt")


@pytest.mark.parametrize(("values", "kind"), [([1.0], "invalid_id"), ([b"a"], "invalid_id"), ([True], "invalid_id")])
def test_parquet_id_of_another_type(tmp_path: Path, values: list[Any], kind: str) -> None:
    pq.write_table(pa.table({"id": values, "prompt": ["x"]}), tmp_path / "m.parquet")
    assert kinds(read_all(tmp_path / "m.parquet")) == [kind]


def test_parquet_prompt_in_bytes_or_lists(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": [b"a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": [["a", "b"]]}), tmp_path / "b.parquet")
    assert kinds(read_all(tmp_path)) == ["invalid_type", "invalid_type"]


def test_parquet_with_no_column_that_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": ["a", "b"], "max_token": [1, 2]}), tmp_path / "m.parquet")
    manifest = Manifest.open([str(tmp_path / "m.parquet")])
    assert kinds(list(manifest.rows())) == ["missing_field", "missing_field"]
    assert manifest.warnings == ["column `max_token` is not read; did you mean `max_tokens`? (2 rows)"]
    assert kinds(read_all(tmp_path / "m.parquet", prompt="{question}")) == ["ok", "ok"]


def test_parquet_without_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "m.parquet")
    with pytest.raises(ManifestError, match="no row"):
        read_all(tmp_path)


def test_spool_of_huge_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longbatch.manifest.spool.MOST_GROUP_BYTES", 1000)
    path = write_table(tmp_path / "m.parquet", [{"id": i, "prompt": f"p{i}"} for i in range(10_000)])
    assert_read_again(Manifest.open([str(path)]), tmp_path / "spool")
    assert [copy.suffix for copy in (tmp_path / "spool").iterdir()] == [".arrow"]


def test_spool_is_made_once_and_only_where_needed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "x"})
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    Manifest.open([str(tmp_path)]).spool(tmp_path / "_spool")
    (copy,) = (tmp_path / "_spool").iterdir()
    assert copy.read_bytes() == LINES
    before = copy.stat().st_ino
    Manifest.open([str(tmp_path)]).spool(tmp_path / "_spool")
    assert copy.stat().st_ino == before
    Manifest.open([str(path)]).spool(tmp_path / "unused")
    assert not (tmp_path / "unused").exists()


def test_reading_at_random_without_spool_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl.gz").write_bytes(gzip.compress(LINES))
    manifest = Manifest.open([str(tmp_path)])
    with pytest.raises(ManifestError, match="spool"):
        manifest.read(Location(0, 0, 10), 0)


def test_spool_into_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "file").touch()
    with pytest.raises(DiskError):
        Manifest.open([str(tmp_path / "m.jsonl.gz")]).spool(tmp_path / "file" / "spool")


class FailingFile:
    """A remote file whose driver loses the connection after some bytes."""

    def __init__(self, data: bytes) -> None:
        self.pieces = [data]

    def read(self, size: int) -> bytes:
        if not self.pieces:
            raise RuntimeError("connection lost")
        return self.pieces.pop()

    def close(self) -> None: ...


def test_connection_lost(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe("/m.jsonl", LINES)
    monkeypatch.setattr(type(memory), "open", lambda *_: FailingFile(LINES[:1000]))
    manifest = Manifest.open(["memory://m.jsonl"])
    answers = list(manifest.rows())
    assert kinds(answers) == ["ok", "ok", "unreadable_input"]
    assert isinstance(answers[2], Fault)
    assert answers[2].error.retryable
    with pytest.raises(DiskError, match="RuntimeError"):
        manifest.spool(tmp_path / "spool")
    assert list((tmp_path / "spool").iterdir()) == [], "half a copy must not pass for a whole one"


def test_row_read_again_after_its_file_has_shrunk(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(LINES)
    manifest = Manifest.open([str(path)])
    last = list(manifest.rows())[-1]
    path.write_bytes(LINES[:1000])
    assert kinds(manifest.read(last.location, last.row)) == ["unreadable_input"]
    path.unlink()
    manifest.close()
    assert kinds(manifest.read(last.location, last.row)) == ["unreadable_input"]


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.md", "sub/c.html"):
        (tmp_path / name).write_text(name)
    manifest = Manifest.open([str(tmp_path)], ManifestOptions(prompt="Sum: {text}!", keep_columns=("*",)))
    answers = list(manifest.rows())
    assert [answer.id for answer in answers] == ["a.md", "b.txt", "sub/c.html"]
    assert manifest.root == tmp_path
    assert isinstance(answers[2], Request)
    assert answers[2].messages[0].parts == ("Sum: ", MediaRef("document", "sub/c.html", None, "text"), "!")
    assert answers[2].carried == {}
    assert_read_again(manifest)


def test_text_file_alone_is_the_prompt_and_its_change_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (before,) = read_all(tmp_path / "*.txt")
    assert isinstance(before, Request)
    assert before.messages[0].parts == (MediaRef("document", "a.txt", None, "document"),)
    (tmp_path / "a.txt").write_text("three")
    assert read_all(tmp_path / "*.txt")[0].fingerprint != before.fingerprint


def test_text_file_behind_a_link_is_read_at_once(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "blob").write_text("content")
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").symlink_to(tmp_path / "store" / "blob")
    (answer,) = read_all(tmp_path / "books" / "*.txt")
    assert isinstance(answer, Request)
    assert answer.messages[0].parts == (MediaRef("document", None, b"content", "document"),)


def test_text_file_whose_name_is_not_utf8(tmp_path: Path) -> None:
    try:
        (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    except OSError:
        pytest.skip("this file system takes names in UTF-8 only")
    (fault,) = read_all(tmp_path)
    assert isinstance(fault, Fault)
    assert (fault.id, fault.error.type) == (None, "invalid_id")
    assert fault.error.message.encode()


def test_text_files_of_two_places(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name)
    manifest = Manifest.open([str(tmp_path / name / "x.txt") for name in ("a", "b")])
    assert [answer.id for answer in manifest.rows()] == ["a/x.txt", "b/x.txt"]
    outside = Manifest.open([str(tmp_path / "a")], ManifestOptions(media_root=tmp_path / "b"))
    (answer,) = outside.rows()
    assert isinstance(answer, Request)
    assert (answer.id, answer.messages[0].parts) == ("x.txt", (MediaRef("document", None, b"a", "document"),))


def test_text_file_that_is_too_large(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    (fault,) = read_all(tmp_path / "a.txt", max_row_bytes=99)
    assert isinstance(fault, Fault)
    assert (fault.id, fault.error.type) == ("a.txt", "file_too_large")


def test_folder_prefers_manifests_to_their_documents(tmp_path: Path) -> None:
    write_lines(tmp_path / "m.jsonl", {"prompt": "x"})
    for name in ("doc.txt", "_hidden.jsonl", ".hidden.jsonl", "other.bin"):
        (tmp_path / name).write_text("x")
    (tmp_path / "_work").mkdir()
    write_lines(tmp_path / "_work" / "m.jsonl", {"prompt": "x"})
    assert [source.name for source in Manifest.open([str(tmp_path)]).sources] == ["m.jsonl"]


def test_rows_and_order_over_several_files(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_lines(tmp_path / f"{name}.jsonl", {"id": f"{name}0", "prompt": "x"}, {"id": f"{name}1", "prompt": "x"})
    answers = read_all(tmp_path / "*.jsonl")
    assert [(answer.row, answer.id) for answer in answers] == list(enumerate(["a0", "a1", "b0", "b1", "c0", "c1"]))
    named = Manifest.open([str(tmp_path / "c.jsonl"), str(tmp_path)])
    assert [source.name for source in named.sources] == ["c.jsonl", "a.jsonl", "b.jsonl"], "each file counts once"


def test_file_whose_name_looks_like_a_glob(tmp_path: Path) -> None:
    assert kinds(read_all(write_lines(tmp_path / "a[1].jsonl", {"prompt": "x"}))) == ["ok"]


@pytest.mark.parametrize(
    "name", ["missing.jsonl", "*.jsonl", "folder", "data.csv", "data", "m.parquet.gz", "pipe.jsonl"]
)
def test_sources_that_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    for file in ("data.csv", "data", "m.parquet.gz"):
        (tmp_path / file).write_text("x")
    os.mkfifo(tmp_path / "pipe.jsonl") if name == "pipe.jsonl" else None
    with pytest.raises(ManifestError, match=name.replace("*", r"\*")):
        Manifest.open([str(tmp_path / name)])


@pytest.mark.parametrize(
    "url", ["ftp://host/m.jsonl", "ssh://host/m.jsonl", "zip://m.jsonl::s3://b/a.zip", "github://o:r@/m.jsonl"]
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(ManifestError, match="not read"):
        Manifest.open([url])


def test_no_source() -> None:
    with pytest.raises(ManifestError, match="no manifest"):
        Manifest.open([])


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


def test_remote_files(tmp_path: Path, memory: Any) -> None:
    memory.pipe("/data/a.jsonl", b'{"id": "a", "prompt": "x"}\n{"document_path": "d.txt", "prompt": "x"}\n')
    memory.pipe("/data/b.jsonl.gz", gzip.compress(LINES))
    write_table(tmp_path / "t.parquet", [{"id": "t", "prompt": "x"}])
    memory.pipe("/data/c.parquet", (tmp_path / "t.parquet").read_bytes())
    manifest = Manifest.open(["memory://data"])
    answers = list(manifest.rows())
    assert manifest.root is None
    assert kinds(answers) == ["ok", "file_refused", *["ok"] * (NUM_ROWS + 1)]
    assert [source.name for source in manifest.sources] == [
        f"memory://data/{name}" for name in ("a.jsonl", "b.jsonl.gz", "c.parquet")
    ]
    assert_read_again(manifest, tmp_path / "spool")


def test_remote_glob_and_text(tmp_path: Path, memory: Any) -> None:
    memory.pipe("/books/a.txt", b"one")
    memory.pipe("/books/b.txt", b"two")
    manifest = Manifest.open(["memory://books/*.txt"], ManifestOptions(prompt="{text}"))
    first, second = manifest.rows()
    assert isinstance(first, Request)
    assert first.messages[0].parts == (MediaRef("document", None, b"one", "text"),)
    assert (first.id, second.id) == ("a.txt", "b.txt")
    assert_read_again(manifest, tmp_path / "spool")


def test_remote_file_that_is_missing(memory: Any) -> None:
    with pytest.raises(ManifestError, match=r"memory://data/a\.jsonl: no such file"):
        Manifest.open(["memory://data/a.jsonl"])
    with pytest.raises(ManifestError, match="no file matches"):
        Manifest.open(["memory://data/*.jsonl"])


def test_file_url_is_a_path(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "m.jsonl", {"prompt": "x"})
    assert Manifest.open([f"file://{path}"]).root == tmp_path


def test_secrets_in_urls_stay_out_of_names() -> None:
    from longbatch.manifest import Source

    source = Source("https://user:secret@host/a/m.jsonl?token=secret", "jsonl", 0, 0)
    assert source.name == "https://host/a/m.jsonl"


def test_fingerprint_of_the_sources(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "m.jsonl", {"prompt": "x"})
    first = Manifest.open([str(path)]).fingerprint_sources()
    assert Manifest.open([str(path)]).fingerprint_sources() == first
    os.utime(path, ns=(1, 1))
    assert Manifest.open([str(path)]).fingerprint_sources() != first


def test_gzip_of_lines_written_piece_by_piece(tmp_path: Path) -> None:
    """Flush marks and empty members occur in the wild: pigz, bgzip, appended logs."""
    path = tmp_path / "m.jsonl.gz"
    stream = zlib.compressobj(wbits=31)
    data = b"".join(stream.compress(line) + stream.flush(zlib.Z_FULL_FLUSH) for line in LINES.splitlines(keepends=True))
    path.write_bytes(data + stream.flush() + gzip.compress(b"") + gzip.compress(json.dumps({"prompt": "x"}).encode()))
    assert len(read_all(path)) == NUM_ROWS + 1
