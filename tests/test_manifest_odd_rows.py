"""Odd rows, one by one: each has its exact error, its place, and costs its neighbours nothing."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from manifest_files import one_fault, one_request, read_all, write_lines

from longbatch.core import Fault, Request
from longbatch.errors import ManifestError
from longbatch.manifest import Manifest, ManifestOptions, validate

USER = {"role": "user", "content": "hello"}


def test_duplicate_id_fails_the_later_row(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "m.jsonl", {"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"}, {"id": "a", "prompt": "y"}
    )
    first, _, later = read_all(path)
    assert isinstance(first, Request)
    assert isinstance(later, Fault)
    assert (later.error.type, later.error.field) == ("duplicate_id", "id")
    assert later.error.message == "m.jsonl:3: row 0 has the same id; ids must be unique"
    assert first.key != later.key, "the first row must keep its result"


def test_duplicate_of_a_failed_row_and_of_a_long_id(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "m.jsonl", {"id": "a"}, {"id": "a", "prompt": "y"}, *[{"id": "x" * 900, "prompt": "y"}] * 2
    )
    kinds = [answer.error.type if isinstance(answer, Fault) else "ok" for answer in read_all(path)]
    assert kinds == ["missing_field", "duplicate_id", "ok", "duplicate_id"]


def test_integer_and_text_ids_are_one_name_space(tmp_path: Path) -> None:
    first, later = read_all(write_lines(tmp_path / "m.jsonl", {"id": 7, "prompt": "x"}, {"id": "7", "prompt": "x"}))
    assert first.id == "7"
    assert isinstance(later, Fault)


def test_missing_id_is_the_row_number(tmp_path: Path) -> None:
    no_id, null_id = read_all(write_lines(tmp_path / "m.jsonl", {"prompt": "x"}, {"id": None, "prompt": "x"}))
    assert (no_id.id, no_id.key.row) == (None, 0)
    assert (null_id.id, null_id.key.row) == (None, 1)


@pytest.mark.parametrize("value", [1.5, 1.0, True, ["a"], {"a": 1}, "", "a\0b", 2**70])
def test_id_of_another_type(tmp_path: Path, value: Any) -> None:
    assert one_fault(tmp_path, {"id": value, "prompt": "x"}) == ("invalid_id", "id")


@pytest.mark.parametrize("name", ["custom_id", "request_id", "uid", "key"])
def test_id_aliases(tmp_path: Path, name: str) -> None:
    assert one_request(tmp_path, {name: "a", "prompt": "x"}).id == "a"


def test_null_bytes_in_a_line(tmp_path: Path) -> None:
    assert one_fault(tmp_path, b'{"prompt": "a\0b"}') == ("invalid_json", None)
    assert one_fault(tmp_path, b"\0" * 5000) == ("invalid_json", None)


def test_escaped_null_is_text(tmp_path: Path) -> None:
    assert one_request(tmp_path, {"prompt": "a\0b"}).messages[0].parts == ("a\0b",)


def test_invalid_utf8(tmp_path: Path) -> None:
    assert one_fault(tmp_path, b'{"id": "x", "prompt": "caf\xe9"}') == ("invalid_encoding", None)


def test_half_surrogate_keeps_the_id(tmp_path: Path) -> None:
    (fault,) = read_all(write_lines(tmp_path / "m.jsonl", b'{"id": "x", "prompt": "\\ud800"}'))
    assert isinstance(fault, Fault)
    assert (fault.error.type, fault.id) == ("invalid_encoding", "x")


def test_half_surrogate_in_the_id(tmp_path: Path) -> None:
    (fault,) = read_all(write_lines(tmp_path / "m.jsonl", b'{"id": "\\ud800", "prompt": "x"}'))
    assert fault.id is None


def test_a_200_megabyte_line_is_skipped_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    piece = b"x" * (10 << 20)
    with path.open("wb") as file:
        file.write(b'{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "')
        for _ in range(20):
            file.write(piece)
        file.write(b'"}\n{"id": "c", "prompt": "x"}\n')
    del piece
    tracemalloc.start()
    first, long, last = read_all(path, max_row_bytes=8 << 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (first.id, last.id, last.row) == ("a", "c", 2)
    assert isinstance(long, Fault)
    assert long.error.type == "row_too_large"
    assert str(long.location.length) in long.error.message
    assert peak < 40 << 20


@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_line_limit_is_exact(tmp_path: Path, excess: int) -> None:
    row = {"prompt": "x" * 100}
    size = len(json.dumps(row))
    (answer,) = read_all(write_lines(tmp_path / "m.jsonl", row), max_row_bytes=size - excess)
    assert isinstance(answer, Fault) == (excess > 0)


def test_empty_file(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="empty"):
        Manifest.open([str(write_lines(tmp_path / "m.jsonl"))])


def test_only_blank_lines(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no row"):
        read_all(write_lines(tmp_path / "m.jsonl", b"", b"  \t", b"\r"))


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path: Path) -> None:
    first, second = read_all(write_lines(tmp_path / "m.jsonl", b"", {"prompt": "a"}, b" ", b"\r", {"nothing": 1}))
    assert (first.row, second.row) == (0, 1)
    assert isinstance(second, Fault)
    assert second.error.message.startswith("m.jsonl:5: ")


def test_crlf(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"prompt": "a\\r\\nb"}\r\n\r\n{"prompt": "c"}\r\n')
    first, second = read_all(path)
    assert isinstance(first, Request)
    assert isinstance(second, Request)
    assert first.messages[0].parts == ("a\r\nb",)


def test_no_newline_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "b"}')
    assert [type(answer) for answer in read_all(path)] == [Request, Request]


def test_byte_order_mark_first_and_in_the_middle(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "m.jsonl", *[b'\xef\xbb\xbf{"prompt": "a"}'] * 2)
    manifest = Manifest.open([str(path)])
    answers = list(manifest.rows())
    assert [type(answer) for answer in answers] == [Request, Request]
    assert [manifest.read(answer.location, answer.row) for answer in answers] == [[answer] for answer in answers]


def test_utf16_file_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes('{"prompt": "a"}'.encode("utf-16"))
    (fault,) = read_all(path)
    assert isinstance(fault, Fault)
    assert fault.error.type == "invalid_encoding"
    assert "iconv" in fault.error.message


@pytest.mark.parametrize("line", [b"{not json}", b'{"prompt": "a"} x', b'{"prompt": "a"', b"'a'", b"[" * 100_000])
def test_not_json(tmp_path: Path, line: bytes) -> None:
    assert one_fault(tmp_path, line) == ("invalid_json", None)


@pytest.mark.parametrize("line", [b"[1]", b'"text"', b"7", b"null"])
def test_row_that_is_no_object(tmp_path: Path, line: bytes) -> None:
    assert one_fault(tmp_path, line) == ("invalid_type", None)


def test_json_over_several_lines_names_the_mend(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps([{"prompt": "a"}], indent=1))
    fault = read_all(path)[0]
    assert isinstance(fault, Fault)
    assert "jq -c" in fault.error.message


def test_last_line_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "b')
    fault = read_all(path)[1]
    assert isinstance(fault, Fault)
    assert fault.error.type == "truncated_input"


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"prompt": ["a", ["b"]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"document": ["a"], "prompt": "x"}, "document"),
        ({"documents": [["a"]], "prompt": "x"}, "documents[0]"),
        ({"system": ["a"], "prompt": "x"}, "system"),
        ({"messages": [{"role": "user", "content": [["a"]]}]}, "messages[0].content[0]"),
        ({"messages": [[USER]]}, "messages[0]"),
        ({"custom_id": "a", "body": {"prompt": [[1, 2]]}}, "body.prompt"),
        ({"custom_id": "a", "body": {"prompt": ["a", "b"]}}, "body.prompt"),
    ],
)
def test_lists_where_text_is_asked(tmp_path: Path, row: dict[str, Any], field: str) -> None:
    assert one_fault(tmp_path, row) == ("invalid_type", field)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_nan_and_infinity(tmp_path: Path, number: bytes) -> None:
    line = b'{"prompt": "x", "temperature": ' + number + b"}"
    assert one_fault(tmp_path, line) == ("invalid_value", "temperature")
    nested = b'{"prompt": "x", "other": {"a": [1, ' + number + b"]}}"
    assert one_fault(tmp_path, nested) == ("invalid_value", "other")


@pytest.mark.parametrize("value", [-1, 0, 2**31, 10**30, 1e300])
def test_negative_and_huge_max_tokens(tmp_path: Path, value: float) -> None:
    assert one_fault(tmp_path, {"prompt": "x", "max_tokens": value}) == ("invalid_value", "max_tokens")


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("max_tokens", "100", "invalid_type"),
        ("max_tokens", True, "invalid_type"),
        ("max_tokens", 1.5, "invalid_type"),
        ("temperature", -0.1, "invalid_value"),
        ("temperature", "hot", "invalid_type"),
        ("top_p", 0, "invalid_value"),
        ("top_p", 1.1, "invalid_value"),
        ("top_k", -2, "invalid_value"),
        ("min_p", 2, "invalid_value"),
        ("repetition_penalty", 0, "invalid_value"),
        ("seed", 2**64, "invalid_value"),
        ("stop", 7, "invalid_type"),
        ("logprobs", 21, "invalid_value"),
        ("n", 0, "invalid_value"),
        ("n", 1001, "invalid_value"),
        ("sampling", [1], "invalid_type"),
        ("sampling", "{", "invalid_json"),
        ("chat_template_kwargs", 7, "invalid_type"),
    ],
)
def test_sampling_values(tmp_path: Path, name: str, value: Any, kind: str) -> None:
    assert one_fault(tmp_path, {"prompt": "x", name: value}) == (kind, name)


def test_empty_stop_string(tmp_path: Path) -> None:
    assert one_fault(tmp_path, {"prompt": "x", "stop": ["a", ""]}) == ("invalid_value", "stop[1]")


def test_sampling_given_twice(tmp_path: Path) -> None:
    same = {"prompt": "x", "max_tokens": 5, "max_new_tokens": 5, "sampling": {"max_tokens": 5}}
    assert one_request(tmp_path, same).sampling.max_tokens == 5
    assert one_fault(tmp_path, {**same, "max_new_tokens": 6}) == ("ambiguous_row", "max_tokens")
    assert one_fault(tmp_path, {**same, "sampling": {"max_tokens": 6}}) == ("ambiguous_row", "sampling.max_tokens")


@pytest.mark.parametrize("role", ["robot", "tool", "function", "User", ""])
def test_unknown_role(tmp_path: Path, role: str) -> None:
    row = {"messages": [USER, {"role": role, "content": "x"}]}
    assert one_fault(tmp_path, row) == ("unknown_role", "messages[1].role")


def test_missing_role_and_content(tmp_path: Path) -> None:
    assert one_fault(tmp_path, {"messages": [{"content": "x"}]}) == ("missing_field", "messages[0].role")
    assert one_fault(tmp_path, {"messages": [{"role": "user"}]}) == ("missing_field", "messages[0].content")


def test_assistant_turn_last(tmp_path: Path) -> None:
    messages = [USER, {"role": "assistant", "content": "x"}]
    assert one_fault(tmp_path, {"messages": messages}) == ("assistant_last", "messages")
    assert one_fault(tmp_path, {"custom_id": "a", "params": {"messages": messages}}) == ("assistant_last", "messages")
    labelled = {"messages": messages, "labels": ["a", "b"]}
    assert one_fault(tmp_path, labelled, task="classify") == ("assistant_last", "messages")
    assert one_request(tmp_path, {"messages": messages}, task="score").messages[-1].role == "assistant"


@pytest.mark.parametrize("content", [[], [{"role": "user", "content": ""}], [{"role": "user", "content": []}]])
def test_empty_messages(tmp_path: Path, content: list[Any]) -> None:
    assert one_fault(tmp_path, {"messages": content}) == ("empty_messages", "messages")


def test_unknown_part_type(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": [{"type": "hologram", "text": "x"}]}]}
    assert one_fault(tmp_path, row) == ("unknown_part", "messages[0].content[0].type")


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}])
def test_media_part_is_never_dropped(tmp_path: Path, part: dict[str, Any]) -> None:
    row = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}
    for ignore in (False, True):
        fault = one_fault(tmp_path, row, ignore_unsupported=ignore)
        assert fault == ("unsupported_media", "messages[0].content[1]")


@pytest.mark.parametrize("name", ["image", "images", "video", "audios"])
def test_media_column(tmp_path: Path, name: str) -> None:
    assert one_fault(tmp_path, {"prompt": "x", name: "a.png"}) == ("unsupported_media", name)
    assert one_request(tmp_path, {"prompt": "x", name: None}).id is None
    assert one_request(tmp_path, {"prompt": "x", name: []}).id is None


def test_column_named_like_a_result_column_is_the_users_own(tmp_path: Path) -> None:
    row = {"id": "a", "prompt": "x", "text": "mine", "status": 5, "error": {"a": 1}, "usage": None, "row": 9}
    request = one_request(tmp_path, row, keep_columns=("*",))
    assert (request.row, request.text) == (0, None)
    assert request.carried == {"text": "mine", "status": 5, "error": {"a": 1}, "usage": None, "row": 9}


def test_column_named_like_an_input_but_of_other_meaning(tmp_path: Path) -> None:
    assert one_fault(tmp_path, {"prompt": "x", "task": "qa"}) == ("invalid_value", "task")
    assert one_fault(tmp_path, {"prompt": "x", "n": "many"}) == ("invalid_type", "n")
    # `body` and `params` are lines of a batch only as objects or beside a custom_id.
    assert one_request(tmp_path, {"prompt": "x", "body": "an e-mail", "params": "a b"}).messages[0].parts == ("x",)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "x", "messages": [USER]},
        {"messages": [USER], "document": "x"},
        {"custom_id": "a", "body": {"messages": [USER]}, "params": {"messages": [USER]}},
        {"custom_id": "a", "body": {"messages": [USER]}, "prompt": "x"},
    ],
)
def test_row_in_two_dialects(tmp_path: Path, row: dict[str, Any]) -> None:
    assert one_fault(tmp_path, row) == ("ambiguous_row", None)


def test_mixed_dialects_in_one_file(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "m.jsonl",
        {"prompt": "hello"},
        {"messages": [USER]},
        {"messages": json.dumps([USER])},
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [USER]}},
        {"custom_id": "b", "params": {"messages": [USER]}},
        {"document": "hello"},
    )
    answers = read_all(path)
    assert [answer.row for answer in answers] == [0, 1, 2, 3, 4, 5]
    for answer in answers:
        assert isinstance(answer, Request)
        assert [(message.role, message.parts) for message in answer.messages] == [("user", ("hello",))]


def test_row_without_any_prompt(tmp_path: Path) -> None:
    assert one_fault(tmp_path, {"id": "x", "question": "y"}) == ("missing_field", "prompt")
    assert one_fault(tmp_path, {}) == ("missing_field", "prompt")


def test_near_miss_names_are_warned_of_once_with_their_count(tmp_path: Path) -> None:
    slips = {"max_token": 5, "Temperature": 1, "top-p": 1, "note": "x", "text": "y"}
    manifest = Manifest.open([str(write_lines(tmp_path / "m.jsonl", *[{"prompt": "x", **slips}] * 3, {"prompt": "x"}))])
    for _ in range(2):  # a second pass does not count twice
        report = validate(manifest)
        assert report.warnings == [
            "column `Temperature` is not read; did you mean `temperature`? (3 rows)",
            "column `max_token` is not read; did you mean `max_tokens`? (3 rows)",
            "column `top-p` is not read; did you mean `top_p`? (3 rows)",
        ]


def test_kept_or_placed_columns_are_no_near_misses(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "m.jsonl", {"prompts": "x", "message": "y"})
    manifest = Manifest.open([str(path)], ManifestOptions(prompt="{prompts}", keep_columns=("message",)))
    assert validate(manifest).warnings == []


def test_values_nested_too_deeply(tmp_path: Path) -> None:
    deep = b"[" * 600 + b"]" * 600
    assert one_fault(tmp_path, b'{"prompt": "x", "chat_template_kwargs": {"a": ' + deep + b"}}") == (
        "invalid_value",
        None,
    )
    assert one_fault(tmp_path, b'{"id": "a", "unread": ' + deep + b"}") == ("missing_field", "prompt")


def test_no_message_quotes_the_row(tmp_path: Path) -> None:
    secret = "xyzzy"
    rows: list[dict[str, Any] | bytes] = [
        {"id": [secret], "prompt": secret},
        {"prompt": [secret]},
        {"prompt": "x", "max_tokens": secret},
        {"prompt": "x", "task": secret},
        {"messages": [{"role": secret, "content": secret}]},
        {"messages": secret},
        {"document_path": secret, "prompt": "x"},
        {"document_path": f"../{secret}", "prompt": "x"},
        b'{"prompt": "xyzzy',
        b'{"prompt": "xyzzy\xff"}',
    ]
    report = validate(Manifest.open([str(write_lines(tmp_path / "m.jsonl", *rows))]))
    assert report.num_failed == len(rows)
    assert secret not in "\n".join(report.render())


@pytest.mark.parametrize("depth", [300, 500, 900, 980])
def test_deep_nesting_around_nan_costs_one_row(tmp_path: Path, depth: int) -> None:
    deep = b'{"id": "b", "prompt": ' + b"[" * depth + b"NaN" + b"]" * depth + b"}"
    answers = read_all(write_lines(tmp_path / "m.jsonl", {"prompt": "x"}, deep, {"prompt": "y"}))
    assert [type(answer) for answer in answers] == [Request, Fault, Request]


def test_parquet_values_without_a_python_form(tmp_path: Path) -> None:
    """A date beyond the year 9999 and an unknown time zone, in a carried column."""
    table = pa.table(
        {
            "prompt": ["x", "y"],
            "day": pa.array([1, 2**31 - 1], pa.int32()).cast(pa.date32()),
            "zone": pa.array([None, None], pa.timestamp("us", "No/Where")),
        }
    )
    pq.write_table(table, tmp_path / "m.parquet")
    first, second = read_all(tmp_path / "m.parquet", keep_columns=("*",))
    assert isinstance(first, Request)
    assert isinstance(second, Fault)
    assert (second.error.type, second.error.field) == ("invalid_value", "day")
