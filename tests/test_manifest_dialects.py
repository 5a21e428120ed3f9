"""What each dialect means, and the options that apply to every row."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from manifest_files import one_fault, one_request, read_all, write_lines

from longbatch.core import MediaRef, Request, RowKey, Sampling
from longbatch.errors import ManifestError, UsageError
from longbatch.manifest import Manifest, ManifestOptions

USER = {"role": "user", "content": "hello"}


def openai(url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "any", **body}}


def turns(request: Request) -> list[tuple[str, str]]:
    return [
        (message.role, "".join(part for part in message.parts if isinstance(part, str))) for message in request.messages
    ]


def test_prompt_with_columns(tmp_path: Path) -> None:
    row = {"id": "a", "prompt": "hi", "system": "be kind", "max_new_tokens": 5.0, "top_k": -1, "stop": "END"}
    request = one_request(tmp_path, row, defaults=Sampling(max_tokens=9, top_p=0.5, top_k=3))
    assert turns(request) == [("system", "be kind"), ("user", "hi")]
    assert request.sampling == Sampling(max_tokens=5, top_p=0.5, top_k=0, stop=("END",))


def test_sampling_struct_or_json(tmp_path: Path) -> None:
    sampling = {"temperature": 0.5, "seed": -3, "stop_token_ids": [1, 2], "logprobs": True, "min_p": None}
    expected = Sampling(temperature=0.5, seed=-3, stop_token_ids=(1, 2), logprobs=0)
    for value in (sampling, json.dumps(sampling)):
        assert one_request(tmp_path, {"prompt": "x", "sampling": value}).sampling == expected
    assert one_fault(tmp_path, {"prompt": "x", "sampling": {"best_of": 3}}) == ("unsupported_field", "sampling.best_of")


def test_chat_messages(tmp_path: Path) -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image_url": None}]
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": content, "name": "Ann"}]
    request = one_request(tmp_path, {"messages": messages})
    assert turns(request) == [("system", "s"), ("user", "ab")]
    assert request.messages[1].name == "Ann"


def test_message_field_that_is_not_supported(tmp_path: Path) -> None:
    row = {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": 1}]}, USER]}
    assert one_fault(tmp_path, row) == ("unsupported_field", "messages[0].tool_calls")
    assert len(one_request(tmp_path, row, ignore_unsupported=True).messages) == 2


def test_system_of_run_and_row(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "system", "content": "own"}, USER]}
    assert turns(one_request(tmp_path, {"prompt": "x"}, system="run")) == [("system", "run"), ("user", "x")]
    assert turns(one_request(tmp_path, {"messages": [USER]}, system="run"))[0] == ("system", "run")
    assert turns(one_request(tmp_path, {"messages": [USER], "system": "row"}, system="run"))[0] == ("system", "row")
    assert turns(one_request(tmp_path, chat, system="run"))[0] == ("system", "own")
    assert one_fault(tmp_path, {**chat, "system": "row"}) == ("ambiguous_row", "system")


def test_openai_chat(tmp_path: Path) -> None:
    row = openai(
        messages=[USER],
        max_completion_tokens=7,
        temperature=0.5,
        logprobs=True,
        top_logprobs=3,
        stop=["a", "b"],
        seed=1,
        chat_template_kwargs={"enable_thinking": False},
        frequency_penalty=0,
        logit_bias=None,
        stream=False,
        tools=[],
        response_format={"type": "text"},
        user="someone",
    )
    request = one_request(tmp_path, row)
    assert turns(request) == [("user", "hello")]
    assert request.sampling == Sampling(max_tokens=7, temperature=0.5, logprobs=3, stop=("a", "b"), seed=1)
    assert request.template_kwargs == {"enable_thinking": False}


def test_openai_completion_is_raw_text(tmp_path: Path) -> None:
    request = one_request(tmp_path, openai("/v1/completions", prompt=["Once"], logprobs=2))
    assert (request.text, request.messages, request.sampling.logprobs) == ("Once", (), 2)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (openai(messages=[USER], tools=[{"type": "function"}]), ("unsupported_field", "body.tools")),
        (openai(messages=[USER], logit_bias={"5": 1}), ("unsupported_field", "body.logit_bias")),
        (openai(messages=[USER], frequency_penalty=0.5), ("unsupported_field", "body.frequency_penalty")),
        (openai(messages=[USER], stream=True), ("unsupported_field", "body.stream")),
        (openai(messages=[USER], max_token=5), ("unsupported_field", "body.max_token")),
        (
            openai(messages=[USER], response_format={"type": "json_object"}),
            ("unsupported_field", "body.response_format"),
        ),
        (openai(messages=[USER], prompt="x"), ("ambiguous_row", "body.prompt")),
        (openai(messages=[USER], top_logprobs=3), ("invalid_value", "body.top_logprobs")),
        (openai(messages=[USER], logprobs=3), ("invalid_type", "body.logprobs")),
        (openai(), ("missing_field", "body.messages")),
        (openai("/v1/completions"), ("missing_field", "body.prompt")),
        (openai("/v1/embeddings", input="x"), ("unsupported_field", "url")),
        ({**openai(messages=[USER]), "method": "GET"}, ("unsupported_field", "method")),
        ({"custom_id": "a", "body": "no json"}, ("invalid_json", "body")),
        ({"custom_id": "a", "body": "[1]"}, ("invalid_type", "body")),
    ],
)
def test_openai_faults(tmp_path: Path, row: dict[str, Any], fault: tuple[str, str]) -> None:
    assert one_fault(tmp_path, row) == fault


def test_ignore_unsupported_drops_the_field(tmp_path: Path) -> None:
    rows = [openai(messages=[USER], tools=[{"type": "function"}], logit_bias={"5": 1}), {"prompt": "x", "tools": [1]}]
    for row in rows:
        plain = one_request(tmp_path, row, ignore_unsupported=True)
        assert plain.messages


def test_unsupported_column(tmp_path: Path) -> None:
    assert one_fault(tmp_path, {"messages": [USER], "tools": [{"a": 1}]}) == ("unsupported_field", "tools")
    assert one_request(tmp_path, {"messages": [USER], "tools": None, "tool_choice": "auto"}).messages


def test_anthropic(tmp_path: Path) -> None:
    params = {
        "model": "any",
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_tokens": 9,
        "stop_sequences": ["X"],
        "top_k": 4,
        "thinking": {"type": "disabled"},
    }
    request = one_request(tmp_path, {"custom_id": "a", "params": params})
    assert turns(request) == [("system", "s"), ("user", "hi")]
    assert request.sampling == Sampling(max_tokens=9, stop=("X",), top_k=4)
    tools = {"custom_id": "a", "params": {**params, "tools": [{"name": "f"}]}}
    assert one_fault(tmp_path, tools) == ("unsupported_field", "params.tools")
    image = {"type": "image", "source": {}}
    media = {"custom_id": "a", "params": {"messages": [{"role": "user", "content": [image]}]}}
    assert one_fault(tmp_path, media) == ("unsupported_media", "params.messages[0].content[0]")
    assert one_fault(tmp_path, {"custom_id": "a", "params": {}}) == ("missing_field", "params.messages")


def test_n_gives_one_request_per_sample(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "m.jsonl", {"id": "a", "prompt": "x", "n": 3, "temperature": 1}, {"prompt": "y"})
    manifest = Manifest.open([str(path)])
    answers = list(manifest.rows())
    assert [answer.key for answer in answers] == [*(RowKey("a", None, i) for i in range(3)), RowKey(None, 1, 0)]
    assert manifest.read(answers[1].location, 0) == answers[:3]
    assert manifest.warnings == []
    assert one_fault(tmp_path, {"prompt": "x", "n": 2}, task="embed") == ("invalid_value", "n")


def test_n_of_a_greedy_row_is_warned_of(tmp_path: Path) -> None:
    manifest = Manifest.open([str(write_lines(tmp_path / "m.jsonl", openai(messages=[USER], n=2)))])
    assert len(list(manifest.rows())) == 2
    assert manifest.warnings == ["n > 1 with temperature 0 gives the same answer n times (1 rows)"]


def test_tasks(tmp_path: Path) -> None:
    score = one_request(tmp_path, {"prompt": "x", "task": "score", "continuation": " y", "labels": 7})
    assert (score.task.name, score.continuation, score.labels) == ("score", " y", ())
    classify = one_request(tmp_path, {"prompt": "x", "labels": ["a", "b"], "continuation": 7}, task="classify")
    assert (classify.labels, classify.continuation) == (("a", "b"), None)
    assert one_request(tmp_path, {"prompt": "x", "pooling": "mean"}, task="embed").pooling == "mean"
    classify_row = {"prompt": "x", "task": "classify"}
    assert one_fault(tmp_path, classify_row) == ("missing_field", "labels")
    assert one_fault(tmp_path, {**classify_row, "labels": ["a", "a"]}) == ("invalid_value", "labels")
    assert one_fault(tmp_path, {**classify_row, "labels": "a"}) == ("invalid_type", "labels")
    assert one_fault(tmp_path, {**classify_row, "labels": [["a"]]}) == ("invalid_type", "labels[0]")
    assert one_fault(tmp_path, {"prompt": "x", "task": "embed", "pooling": "max"}) == ("invalid_value", "pooling")
    assert one_fault(tmp_path, {"prompt": "x", "task": "score", "continuation": 7}) == ("invalid_type", "continuation")


def test_documents_stand_before_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("file")
    request = one_request(tmp_path, {"documents": ["one", {"path": "a.txt"}], "prompt": "sum"})
    file = MediaRef("document", "a.txt", None, "documents[1]")
    assert request.messages[0].parts == ("one\n\n", file, "\n\nsum")
    assert one_request(tmp_path, {"document": "only"}).messages[0].parts == ("only",)


@pytest.mark.parametrize("value", ["a.txt", {"path": "a.txt"}, {"path": "a.txt", "bytes": None}])
def test_document_by_path(tmp_path: Path, value: Any) -> None:
    (tmp_path / "a.txt").write_text("file")
    request = one_request(tmp_path, {"document_path": value, "prompt": "sum"})
    assert request.messages[0].parts[0] == MediaRef("document", "a.txt", None, "document_path")


def test_document_bytes_win_over_the_path(tmp_path: Path) -> None:
    value = {"path": "missing.txt", "bytes": base64.b64encode(b"data").decode()}
    request = one_request(tmp_path, {"document": value, "prompt": "sum"})
    assert request.messages[0].parts[0] == MediaRef("document", None, b"data", "document")
    assert one_fault(tmp_path, {"document": {"bytes": "%"}}) == ("invalid_value", "document.bytes")
    assert one_fault(tmp_path, {"document": {}}) == ("missing_field", "document")
    assert one_fault(tmp_path, {"document": 7}) == ("invalid_type", "document")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("missing.txt", "file_missing"),
        ("one.jsonl/x", "file_missing"),
        ("../outside.txt", "file_refused"),
        ("/etc/passwd", "file_refused"),
        ("http://127.0.0.1/a.txt", "file_refused"),
        ("file:///etc/passwd", "file_refused"),
        ("s3://bucket/key.txt", "file_refused"),
        ("a\0b", "file_refused"),
        ("folder", "file_refused"),
        ("pipe", "file_refused"),
        ("x" * 5000, "file_refused"),
        (".", "file_refused"),
    ],
)
def test_document_path_that_is_refused(tmp_path: Path, path: str, kind: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert one_fault(tmp_path, {"document_path": path, "prompt": "x"}) == (kind, "document_path")


def test_documents_of_manifests_in_two_folders(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "d.txt").write_text(name)
        write_lines(tmp_path / name / "m.jsonl", {"document_path": "d.txt"}, {"document_path": "../a/d.txt"})
    manifest = Manifest.open([str(tmp_path / "*/m.jsonl")])
    assert manifest.root == tmp_path
    found = [
        answer.messages[0].parts[0] if isinstance(answer, Request) else answer.error.type for answer in manifest.rows()
    ]
    paths = [part.path if isinstance(part, MediaRef) else part for part in found]
    # The last is inside the root, but outside its own manifest's folder; the second goes out and comes back.
    assert paths == ["a/d.txt", "a/d.txt", "b/d.txt", "file_refused"]


def test_media_root_takes_the_manifests_folders_place(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "d.txt").write_text("x")
    path = write_lines(tmp_path / "m.jsonl", {"document_path": "d.txt"})
    manifest = Manifest.open([str(path)], ManifestOptions(media_root=tmp_path / "docs"))
    assert manifest.root == tmp_path / "docs"
    assert isinstance(next(manifest.rows()), Request)


def test_prompt_template(tmp_path: Path) -> None:
    row = {"id": "a", "title": "T", "size": 3, "odd name.x": "o"}
    request = one_request(tmp_path, row, prompt="{{{title}}} has {size} {odd name.x}{title}")
    assert request.messages[0].parts == ("{T} has 3 oT",)
    assert (
        one_fault(tmp_path, row, prompt="{title}{prompt}") == ("missing_field", "prompt") if "prompt" in row else True
    )


def test_prompt_template_faults(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "m.jsonl", {"a": "x"}, {"b": "x"}, {"a": ["x"]}, {"a": "x", "messages": [USER]})
    kinds = [answer.error.type if not isinstance(answer, Request) else "ok" for answer in read_all(path, prompt="{a}")]
    assert kinds == ["ok", "missing_field", "invalid_type", "ambiguous_row"]


@pytest.mark.parametrize("template", ["{", "a } b", "{}", "{a{b}}"])
def test_prompt_template_that_is_wrong(tmp_path: Path, template: str) -> None:
    path = write_lines(tmp_path / "m.jsonl", {"a": "x"})
    with pytest.raises(UsageError, match="lone"):
        Manifest.open([str(path)], ManifestOptions(prompt=template))


def test_prompt_template_places_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("file")
    file = MediaRef("document", "a.txt", None, "document_path")
    row = {"document": "inline", "document_path": "a.txt"}
    assert one_request(tmp_path, row, prompt="<{document_path}>").messages[0].parts == ("inline\n\n<", file, ">")
    assert one_request(tmp_path, row, prompt="<{document}>").messages[0].parts == (file, "\n\n<inline>")


def test_keep_columns(tmp_path: Path) -> None:
    row = {"id": "a", "prompt": "x", "source": "web", "tags": ["t"], "max_tokens": 3}
    assert one_request(tmp_path, row).carried == {}
    assert one_request(tmp_path, row, keep_columns=("tags", "prompt", "absent")).carried == {
        "prompt": "x",
        "tags": ["t"],
    }
    assert one_request(tmp_path, row, keep_columns=("*",)).carried == {"source": "web", "tags": ["t"]}
    (fault,) = read_all(write_lines(tmp_path / "m.jsonl", {"source": "web"}), keep_columns=("*",))
    assert fault.carried == {"source": "web"}


def test_limit_and_only(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "m.jsonl", *({"id": f"r{i}", "prompt": "x", "n": 2, "temperature": 1} for i in range(5))
    )
    assert [answer.row for answer in read_all(path, limit=2)] == [0, 0, 1, 1]
    assert [(answer.row, answer.id) for answer in read_all(path, only="r3")] == [(3, "r3"), (3, "r3")]
    with pytest.raises(ManifestError, match="no row has the id"):
        read_all(path, only="r9")


def test_options_are_checked() -> None:
    with pytest.raises(UsageError, match="unknown task"):
        ManifestOptions(task="translate")
    with pytest.raises(UsageError, match="at least 1"):
        ManifestOptions(limit=0)


def test_fingerprint_follows_what_changes_the_answer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    row = {"id": "a", "prompt": "x", "max_tokens": 5, "document_path": "a.txt", "note": "n"}
    base = one_request(tmp_path, row).fingerprint
    assert len(base) == 16
    same = [{**row, "note": "m"}, {**row, "id": "b"}, dict(reversed(row.items())), {**row, "max_tokens": 5.0}]
    assert {one_request(tmp_path, other).fingerprint for other in same} == {base}
    others = [{**row, "prompt": "y"}, {**row, "max_tokens": 6}, {**row, "system": "s"}, {**row, "task": "score"}]
    others += [{**row, "chat_template_kwargs": {"a": 1}}, {**row, "seed": 1}]
    found = {one_request(tmp_path, other).fingerprint for other in others}
    assert len(found | {base}) == len(others) + 1
    (tmp_path / "a.txt").write_text("three")
    assert one_request(tmp_path, row).fingerprint != base


def test_fingerprint_of_a_fault_follows_the_row(tmp_path: Path) -> None:
    faults = read_all(
        write_lines(tmp_path / "m.jsonl", *({"id": str(i), "note": note} for i, note in enumerate("aab")))
    )
    assert len({fault.fingerprint for fault in faults}) == 3
    again = read_all(tmp_path / "m.jsonl")
    assert [fault.fingerprint for fault in again] == [fault.fingerprint for fault in faults]
