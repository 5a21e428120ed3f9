"""Results as columns: one schema for everything, nothing lost, and one odd value never costs another row."""

import datetime
import decimal
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from output_rows import make_failure, make_folder, make_request, make_result

from longbatch.core import Result, Timing, TokenLogprob, Usage
from longbatch.output import KeyTable, Placement, ResultWriter, merge, result_files, result_schema

RESULT_COLUMNS = [
    "id",
    "row",
    "sample",
    "status",
    "text",
    "reasoning",
    "label",
    "embedding",
    "logprobs",
    "finish_reason",
    "error",
    "usage",
    "timing",
    "attention",
    "placement",
    "media",
    "notes",
    "attempt",
    "run_id",
    "config_hash",
]


def merged(tmp_path: Path, *results: Result, carried: pa.Schema | None = None) -> pa.Table:
    """What the results look like after journal, part and merge."""
    folder = make_folder(tmp_path)
    with ResultWriter(folder, "w0", placement=Placement("cpu", 0, "host"), carried=carried) as writer:
        writer.append(*results)
    merge(folder, len(results))
    return pa.dataset.dataset(result_files(folder), format="parquet").to_table()


def test_the_columns_are_those_that_users_rely_on(tmp_path: Path) -> None:
    table = merged(tmp_path, make_result(make_request(0)), make_failure(make_request(1)))
    assert table.schema.names == RESULT_COLUMNS
    assert table.schema.equals(result_schema())
    assert table.schema.metadata == {b"schema_version": b"1"}


def test_every_field_of_a_result_is_stored(tmp_path: Path) -> None:
    result = make_result(
        make_request(3, sample=2),
        reasoning="because",
        label="yes",
        embedding=np.array([0.5, -1.0], np.float32),
        logprobs=[TokenLogprob(7, "a", -0.5, ((8, "b", -1.5),)), TokenLogprob(9, "c", None)],
        usage=Usage(1, 2, 3, 4, 5, 6, 0.5),
        timing=Timing(*[float(number) for number in range(9)]),
        attention_mode="sparse",
        attention_density=0.25,
        wave=4,
        width=2,
        notes=["out of memory: tiles of 512 rows", "resumed at token 64"],
        attempt=3,
    )
    row = merged(tmp_path, result).to_pylist()[0]
    run_id, config_hash = row.pop("run_id"), row.pop("config_hash")
    assert run_id
    assert config_hash
    assert row == {
        "id": "row-3",
        "row": 3,
        "sample": 2,
        "status": "ok",
        "text": result.text,
        "reasoning": "because",
        "label": "yes",
        "embedding": [0.5, -1.0],
        "logprobs": [
            {"id": 7, "token": "a", "logprob": -0.5, "top": [{"id": 8, "token": "b", "logprob": -1.5}]},
            {"id": 9, "token": "c", "logprob": None, "top": None},
        ],
        "finish_reason": "stop",
        "error": None,
        "usage": {
            "prompt_tokens": 1,
            "completion_tokens": 2,
            "cached_tokens": 3,
            "image_tokens": 4,
            "video_tokens": 5,
            "audio_tokens": 6,
            "gpu_seconds": 0.5,
        },
        "timing": {
            "queued": 0.0,
            "fetch": 1.0,
            "load": 2.0,
            "tokenize": 3.0,
            "encode": 4.0,
            "prefill": 5.0,
            "ttft": 6.0,
            "decode": 7.0,
            "total": 8.0,
        },
        "attention": {"mode": "sparse", "density": 0.25, "patterns": None, "gap": None},
        "placement": {
            "host": "host",
            "device": "cpu",
            "rank": 0,
            "wave": 4,
            "width": 2,
            "slurm_job_id": None,
            "slurm_task": None,
        },
        "media": None,
        "notes": ["out of memory: tiles of 512 rows", "resumed at token 64"],
        "attempt": 3,
    }


def test_an_error_row_says_why(tmp_path: Path) -> None:
    row = merged(tmp_path, make_failure(make_request(0), "out_of_memory")).to_pylist()[0]
    assert (row["status"], row["text"]) == ("error", None)
    error = {"type": "out_of_memory", "message": "what is wrong and the mend", "field": None, "retryable": True}
    assert row["error"] == error


def test_lists_that_are_empty_and_lists_that_are_absent_differ(tmp_path: Path) -> None:
    rows = [
        make_result(make_request(0), embedding=np.zeros(0, np.float32), logprobs=[]),
        make_result(make_request(1)),
        make_result(make_request(2), embedding=np.ones(2, np.float32), logprobs=[TokenLogprob(1, "a", -1.0)]),
    ]
    table = merged(tmp_path, *rows)
    assert table["embedding"].to_pylist() == [[], None, [1.0, 1.0]]
    assert [None if tokens is None else len(tokens) for tokens in table["logprobs"].to_pylist()] == [0, None, 1]


def test_pandas_pyarrow_and_duckdb_read_the_same(tmp_path: Path) -> None:
    requests = [make_request(row) for row in range(50)]
    merged(tmp_path, *(make_failure(request) if request.row % 7 == 3 else make_result(request) for request in requests))
    path = tmp_path / "out" / "results"
    texts = pq.read_table(path)["text"].to_pylist()
    frame = pandas.read_parquet(path)
    assert [None if pandas.isna(text) else text for text in frame["text"]] == texts
    rows = duckdb.sql(f"select text from '{path}/*.parquet' order by row").fetchall()
    assert [row[0] for row in rows] == texts
    query = f"select error.type, count(*), sum(usage.prompt_tokens) from '{path}/*.parquet' group by 1 order by 2"
    assert duckdb.sql(query).fetchall() == [("prompt_too_long", 7, 0), (None, 43, 0)]


@pytest.mark.parametrize(
    ("values", "kind", "stored"),
    [
        ([1, None, 3], pa.int64(), [1, None, 3]),
        ([1, 2.5], pa.float64(), [1.0, 2.5]),
        ([True, False], pa.bool_(), [True, False]),
        (["a", None], pa.large_string(), ["a", None]),
        ([None, None], pa.large_string(), [None, None]),
        ([1, "xii"], pa.large_string(), ["1", "xii"]),
        ([True, 1], pa.large_string(), ["true", "1"]),
        ([{"a": [1]}, None], pa.large_string(), ['{"a":[1]}', None]),
        ([[1, "b"]], pa.large_string(), ['[1,"b"]']),
        ([2**63], pa.large_string(), ["9223372036854775808"]),
        ([2**70, 1], pa.large_string(), ["1180591620717411303424", "1"]),
        (["\ud800!"], pa.large_string(), ["?!"]),
        ([{"a": "\ud800"}], pa.large_string(), [r'{"a":"\ud800"}']),
        ([datetime.date(2026, 11, 1)], pa.date32(), [datetime.date(2026, 11, 1)]),
        ([decimal.Decimal("1.50")], pa.decimal128(3, 2), [decimal.Decimal("1.50")]),
        ([b"\x00\xff"], pa.large_binary(), [b"\x00\xff"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_carried_columns_find_their_type(
    tmp_path: Path, values: list[Any], kind: pa.DataType, stored: list[Any], apart: bool
) -> None:
    folder = make_folder(tmp_path)
    results = [make_result(make_request(row), carried={"c": value}) for row, value in enumerate(values)]
    with ResultWriter(folder, "w0") as writer:
        for result in results:
            writer.append(result)
            if apart:  # each in a write of its own, so that later values find a type already chosen
                writer.flush()
    merge(folder, len(values))
    table = pq.read_table(folder.results)
    assert table.schema.field("c").type == kind
    assert table["c"].to_pylist() == stored


def test_declared_types_of_carried_columns_are_kept(tmp_path: Path) -> None:
    declared = pa.schema([("small", pa.int8()), ("when", pa.timestamp("ms")), ("tags", pa.list_(pa.string()))])
    carried = {"small": 7, "when": datetime.datetime(2026, 1, 2), "tags": ["a"]}
    table = merged(tmp_path, make_result(make_request(0), carried=carried), carried=declared)
    assert [table.schema.field(name).type for name in declared.names] == declared.types
    assert table.select(declared.names).to_pylist() == [carried]


def test_a_carried_column_never_hides_one_of_the_result(tmp_path: Path) -> None:
    names = ["text", "ID", "_key", "carried_text", "", "Status", "fine"]
    table = merged(tmp_path, make_result(make_request(0), carried={name: name for name in names}))
    assert table.schema.names[len(RESULT_COLUMNS) :] == [
        "carried_text",
        "carried_ID",
        "carried__key",
        "carried_carried_text",
        "carried_",
        "carried_Status",
        "fine",
    ]
    path = tmp_path / "out" / "results"
    assert duckdb.sql(f"select carried_text, fine from '{path}/*.parquet'").fetchall() == [("text", "fine")]


def test_columns_that_appear_later_are_null_before(tmp_path: Path) -> None:
    table = merged(
        tmp_path,
        make_result(make_request(0), carried={"a": 1}),
        make_result(make_request(1), carried={"b": 2.5}),
        make_result(make_request(2)),
    )
    assert table.select(["a", "b"]).to_pylist() == [{"a": 1, "b": None}, {"a": None, "b": 2.5}, {"a": None, "b": None}]


def test_lone_surrogates_in_texts_and_ids_are_replaced(tmp_path: Path) -> None:
    request = make_request(0, id="\udcff")
    table = merged(tmp_path, make_result(request, text="a\ud83d"))
    assert table.select(["id", "text"]).to_pylist() == [{"id": "?", "text": "a?"}]
    assert merge(make_folder(tmp_path), KeyTable.of([request])).num_rows == 1


def test_a_result_that_fits_no_column_becomes_an_error_row_alone(tmp_path: Path) -> None:
    results = [make_result(make_request(row)) for row in range(3)]
    results[1].embedding = np.array(["not", "numbers"])
    table = merged(tmp_path, *results)
    assert table["status"].to_pylist() == ["ok", "error", "ok"]
    assert table["error"].to_pylist()[1]["type"] == "internal"
    assert table["text"].to_pylist() == [results[0].text, None, results[2].text]
