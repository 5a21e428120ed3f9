"""Exports: every row, once, in the order of the manifest, in formats that other tools read back."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
from output_rows import answer_to, make_failure, make_folder, make_request, make_result

from longbatch.core import Result, TokenLogprob, Usage
from longbatch.errors import RowError, UsageError
from longbatch.output import ResultWriter, RunFolder, export, merge


def make_run(tmp_path: Path, *results: Result) -> RunFolder:
    folder = make_folder(tmp_path)
    with ResultWriter(folder, "w0", reserve_bytes=0) as writer:
        writer.append(*results)
    merge(folder, len(results))
    return folder


def json_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_jsonl_holds_every_column_that_has_a_value(tmp_path: Path) -> None:
    answered = make_result(
        make_request(0), embedding=np.array([0.5, 2.0]), carried={"page": 3}, usage=Usage(prompt_tokens=7)
    )
    folder = make_run(tmp_path, answered, make_failure(make_request(1)))
    assert export(folder, "jsonl", tmp_path / "rows.jsonl") == 2
    first, second = json_lines(tmp_path / "rows.jsonl")
    assert first["id"] == "row-0"
    assert first["text"] == answer_to(make_request(0))
    assert first["embedding"] == [0.5, 2.0]
    assert first["page"] == 3
    assert first["usage"]["prompt_tokens"] == 7
    assert "error" not in first
    assert "timing" not in first
    assert second["error"] == {"type": "prompt_too_long", "message": "what is wrong and the mend", "retryable": False}


def test_csv_reads_back_with_awkward_texts(tmp_path: Path) -> None:
    texts = ["plain", 'say "hi", twice', "two\nlines", "", "ümläut 漢字", "tab\there"]
    results = [make_result(make_request(row), text=text) for row, text in enumerate(texts)]
    results.append(make_result(make_request(6), logprobs=[TokenLogprob(1, "a", -0.5)]))
    folder = make_run(tmp_path, *results)
    assert export(folder, "csv", tmp_path / "rows.csv") == 8  # with the header
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows[:6]] == texts
    assert rows[0]["usage.prompt_tokens"] == "0"
    assert rows[0]["logprobs"] == ""
    assert json.loads(rows[6]["logprobs"]) == [{"id": 1, "token": "a", "logprob": -0.5, "top": None}]
    assert len(pandas.read_csv(tmp_path / "rows.csv")) == 7


def test_openai_lines_are_a_batch_output_file(tmp_path: Path) -> None:
    tokens = [TokenLogprob(1, "Hi", -0.5, ((1, "Hi", -0.5), (2, "Ho", -1.5)))]
    first = make_result(
        make_request(0), text="Hi", reasoning="hm", logprobs=tokens, usage=Usage(prompt_tokens=5, completion_tokens=1)
    )
    folder = make_run(tmp_path, first, make_failure(make_request(1, id=None)))
    assert export(folder, "openai-jsonl", tmp_path / "batch.jsonl") == 2
    answered, failed = json_lines(tmp_path / "batch.jsonl")
    assert answered["custom_id"] == "row-0"
    assert answered["error"] is None
    body = answered["response"]["body"]
    assert answered["response"]["status_code"] == 200
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi", "reasoning_content": "hm"},
            "logprobs": {
                "content": [
                    {
                        "token": "Hi",
                        "logprob": -0.5,
                        "top_logprobs": [{"token": "Hi", "logprob": -0.5}, {"token": "Ho", "logprob": -1.5}],
                    }
                ]
            },
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 1,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert failed["custom_id"] == "1"
    assert failed["response"] is None
    assert failed["error"] == {"code": "prompt_too_long", "message": "what is wrong and the mend", "param": None}


def test_samples_become_choices_and_a_failed_one_is_named(tmp_path: Path) -> None:
    samples = [make_request(0, sample=sample) for sample in range(3)]
    results = [make_result(samples[0]), Result.failed(samples[1], RowError("internal", "no")), make_result(samples[2])]
    folder = make_run(tmp_path, *results, make_result(make_request(1)))
    assert export(folder, "openai-jsonl", tmp_path / "batch.jsonl") == 2
    line = json_lines(tmp_path / "batch.jsonl")[0]
    assert [choice["index"] for choice in line["response"]["body"]["choices"]] == [0, 2]
    assert line["error"]["code"] == "internal"


def test_embeddings_and_labels_have_their_places(tmp_path: Path) -> None:
    embedded = make_result(make_request(0), text=None, embedding=np.array([1.0, 2.0]))
    labelled = make_result(make_request(1), text=None, label="spam")
    folder = make_run(tmp_path, embedded, labelled)
    export(folder, "openai-jsonl", tmp_path / "batch.jsonl")
    first, second = (line["response"]["body"] for line in json_lines(tmp_path / "batch.jsonl"))
    assert first["data"] == [{"object": "embedding", "index": 0, "embedding": [1.0, 2.0]}]
    assert second["choices"][0]["message"]["content"] == "spam"


def test_many_rows_keep_their_order(tmp_path: Path) -> None:
    requests = [make_request(row) for row in range(5000)]
    folder = make_run(tmp_path, *(make_result(request) for request in reversed(requests)))
    export(folder, "jsonl", tmp_path / "rows.jsonl")
    assert [line["text"] for line in json_lines(tmp_path / "rows.jsonl")] == [answer_to(row) for row in requests]


def test_standard_output_takes_the_lines(tmp_path: Path, root: Path, uninstalled_environment: dict[str, str]) -> None:
    make_run(tmp_path, make_result(make_request(0)))
    code = (
        "import sys, pathlib, longbatch.output as output\n"
        "output.export(output.RunFolder.open(pathlib.Path(sys.argv[1])), 'jsonl')"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    printed = subprocess.run(command, env=uninstalled_environment, capture_output=True, check=True).stdout
    assert json.loads(printed)["id"] == "row-0"


def test_an_unknown_format_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        export(make_run(tmp_path, make_result(make_request(0))), "xml", tmp_path / "rows.xml")
    assert caught.value.hint == "choose one of openai-jsonl, jsonl, csv"


def test_a_run_without_results_names_the_mend(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        export(make_folder(tmp_path), "jsonl", tmp_path / "rows.jsonl")
    assert "longbatch merge" in str(caught.value.hint)
