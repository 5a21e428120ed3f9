"""Lengths, the limit, truncation, and what `score` and `classify` add to a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prompt_folders import FAMILIES, write_folder

from longbatch.core import TASKS, Fault, Location, MediaRef, Message, Request, RowSize, Sampling
from longbatch.errors import RowError, UsageError
from longbatch.prompt import PromptBuilder
from longbatch.prompt.builder import BATCH_ROWS

LONG = "The quick brown 🎉 fox, number 17, jumps over the lazy 一只 dog. "


def request(content: str = "Hi", task: str = "generate", max_tokens: int | None = 8, **fields: Any) -> Request:
    fields = {"messages": (Message("user", (content,)),), **fields}
    sampling = Sampling(max_tokens=max_tokens)
    return Request(row=3, id="x", location=Location(0, 0, 0), task=TASKS[task], sampling=sampling, **fields)


def raw(text: str, task: str = "generate", **fields: Any) -> Request:
    return request(task=task, messages=(), text=text, **fields)


def size_of(builder: PromptBuilder, row: Request) -> RowSize:
    (size,) = builder.sizes([row])
    assert isinstance(size, RowSize)
    return size


def refusal(builder: PromptBuilder, row: Request) -> RowError:
    """The error of a row, the same from `build` and from `sizes`."""
    with pytest.raises(RowError) as caught:
        builder.build(row)
    (size,) = builder.sizes([row])
    assert isinstance(size, RowError)
    assert (size.type, size.message, size.field) == (caught.value.type, caught.value.message, caught.value.field)
    return size


@pytest.fixture(scope="session", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="session")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"), "chatml")


# ---------------------------------------------------------------------------------------------- sizes


def test_sizes_agree_with_prompts_in_order(folder: Path) -> None:
    builder = PromptBuilder(folder, 4096, default_max_tokens=77)
    rows = [
        request("a"),
        raw("b"),
        request(LONG * 3, max_tokens=None),
        request("", messages=(Message("user", ("x",)), Message("user", ("y",)))),
        request("Is it?", task="classify", labels=("yes", "no")),
        raw("b c", task="score"),
        request("q", task="score", continuation=" an answer"),
        request("q", task="embed"),
    ]
    for row, size in zip(rows, builder.sizes(rows), strict=True):
        if isinstance(size, RowError):
            assert refusal(builder, row).message == size.message
            continue
        prompt = builder.build(row)
        assert size.prompt == len(prompt.ids)
        assert size.branch_tokens == sum(map(len, prompt.branches))
        assert size.generated == (0 if row.task.name != "generate" else row.sampling.max_tokens or 77)
        assert (size.row, size.sample) == (3, 0)


def test_streamed_sizes_keep_their_requests(chatml: Path) -> None:
    builder = PromptBuilder(chatml, 4096)
    rows = [request("word " * (i % 7)) for i in range(2 * BATCH_ROWS + 5)]
    streamed = list(builder.stream_sizes(iter(rows)))
    assert all(streamed_row is row for (streamed_row, _), row in zip(streamed, rows, strict=True))
    assert [size for _, size in streamed[:20]] == builder.sizes(rows[:20])
    assert [size for _, size in streamed[-20:]] == builder.sizes(rows[-20:])


def test_faults_keep_their_place_and_error(chatml: Path) -> None:
    fault = Fault(4, None, Location(0, 9, 9), RowError("invalid_json", "not JSON"))
    rows = [request("a"), fault, request("b")]
    streamed = list(PromptBuilder(chatml, 4096).stream_sizes(rows))
    assert [row for row, _ in streamed] == rows
    assert [type(size) for _, size in streamed] == [RowSize, RowError, RowSize]
    assert streamed[1][1] is fault.error


def test_no_requests(chatml: Path) -> None:
    assert PromptBuilder(chatml, 64).sizes([]) == []


# ---------------------------------------------------------------------------------------------- the limit


def test_the_limit_is_exact(folder: Path) -> None:
    length = len(PromptBuilder(folder, 4096).build(request()).ids)
    assert len(PromptBuilder(folder, length + 8).build(request()).ids) == length
    error = refusal(PromptBuilder(folder, length + 7), request())
    assert error.type == "prompt_too_long"
    assert f"{length:,} tokens" in error.message
    assert "truncate-middle" in error.message


def test_max_tokens_alone_too_large(chatml: Path) -> None:
    for overlong in ("error", "truncate-middle", "truncate-left"):
        error = refusal(PromptBuilder(chatml, 100, overlong=overlong), request(max_tokens=100))
        assert (error.type, error.field) == ("prompt_too_long", "max_tokens")


def test_tasks_that_sample_nothing_need_no_room(chatml: Path) -> None:
    length = len(PromptBuilder(chatml, 4096).build(request(task="embed")).ids)
    assert len(PromptBuilder(chatml, length).build(request(task="embed", max_tokens=10**9)).ids) == length


@pytest.mark.parametrize("num_removed", [1, 2, 3, 10, 57])
def test_truncate_middle(folder: Path, num_removed: int) -> None:
    whole = PromptBuilder(folder, 4096).build(request(LONG * 10)).ids.tolist()
    builder = PromptBuilder(folder, len(whole) + 8 - num_removed, overlong="truncate-middle")
    prompt = builder.build(request(LONG * 10))
    ids = prompt.ids.tolist()
    assert prompt.truncated == len(whole) - len(ids)
    # More may go where the cut would have fallen into a character of several tokens.
    assert num_removed <= prompt.truncated <= num_removed + 6
    same_start = next(i for i, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b)
    assert same_start > len(whole) // 3
    tail = len(whole) // 3
    assert ids[-tail:] == whole[-tail:]
    text = builder.tokenizer.decode(ids)
    assert "\ufffd" not in text
    assert size_of(builder, request(LONG * 10)).prompt == len(ids)


@pytest.mark.parametrize("overlong", ["truncate-middle", "truncate-left"])
@pytest.mark.parametrize("num_removed", range(1, 9))
def test_cuts_fall_between_characters(chatml: Path, overlong: str, num_removed: int) -> None:
    words = "🎉一é" * 20
    whole = PromptBuilder(chatml, 4096).build(raw(words))
    builder = PromptBuilder(chatml, len(whole.ids) + 8 - num_removed, overlong=overlong)
    prompt = builder.build(raw(words))
    text = builder.tokenizer.decode(prompt.ids.tolist())
    assert "\ufffd" not in text
    assert set(text) == set(words)
    assert num_removed <= prompt.truncated <= num_removed + 6


@pytest.mark.parametrize("num_removed", [1, 5, 40])
def test_truncate_left(folder: Path, num_removed: int) -> None:
    whole = PromptBuilder(folder, 4096).build(request(LONG * 10)).ids.tolist()
    empty = PromptBuilder(folder, 4096).build(request("")).ids.tolist()
    builder = PromptBuilder(folder, len(whole) + 8 - num_removed, overlong="truncate-left")
    prompt = builder.build(request(LONG * 10))
    ids = prompt.ids.tolist()
    assert num_removed <= prompt.truncated == len(whole) - len(ids) <= num_removed + 6
    num_head = next(i for i, (a, b) in enumerate(zip(empty, whole, strict=False)) if a != b)
    assert ids[: num_head - 1] == whole[: num_head - 1]
    rest = len(ids) - num_head - 3
    assert ids[-rest:] == whole[-rest:]


def test_only_the_longest_text_is_cut(chatml: Path) -> None:
    turns = (Message("system", ("Be brief. " * 5,)), Message("user", (LONG * 10,)))
    builder = PromptBuilder(chatml, 160, overlong="truncate-middle")
    text = builder.tokenizer.decode(builder.build(request(messages=turns)).ids.tolist())
    assert "Be brief. " * 5 in text
    assert "The quick brown" in text
    assert text.rstrip().endswith("assistant")


def test_a_text_that_the_template_rewrites_is_not_cut(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "qwen3")
    turns = (
        Message("user", (LONG * 5,)),
        Message("assistant", ("<think>" + "x y z " * 200 + "</think>fine",)),
        Message("user", ("Why?",)),
    )
    builder = PromptBuilder(folder, 100, overlong="truncate-middle")
    prompt = builder.build(request(messages=turns))
    assert prompt.truncated > 0
    assert "fine" in builder.tokenizer.decode(prompt.ids.tolist())


def test_a_text_that_cannot_give_up_enough(chatml: Path) -> None:
    error = refusal(PromptBuilder(chatml, 20, overlong="truncate-middle"), request("some words"))
    assert error.type == "prompt_too_long"
    assert "too short to make room" in error.message


def test_truncation_with_a_look_alike(chatml: Path) -> None:
    words = "say <|im_end|> " * 60
    builder = PromptBuilder(chatml, 200, overlong="truncate-middle")
    ids = builder.build(request(words)).ids.tolist()
    assert len(ids) == 192
    assert ids.count(builder.tokenizer.token_id("<|im_end|>")) == 2


def test_truncation_of_a_raw_prompt(folder: Path) -> None:
    builder = PromptBuilder(folder, 50, overlong="truncate-left")
    whole = PromptBuilder(folder, 4096).build(raw(LONG * 5)).ids.tolist()
    prompt = builder.build(raw(LONG * 5))
    assert 36 <= len(prompt.ids) <= 42
    assert prompt.ids.tolist()[-30:] == whole[-30:]
    bos = builder.tokenizer.bos_id
    if whole[0] == bos:
        assert prompt.ids[0] == bos


# ---------------------------------------------------------------------------------------------- score, classify


@pytest.mark.parametrize("continuation", [" Paris", "Paris is it.", "\n\nYes", "🎉", " ", "é <|im_end|> é"])
def test_a_continuation_is_scored(folder: Path, continuation: str) -> None:
    builder = PromptBuilder(folder, 4096)
    prompt = builder.build(request("The capital of France?", task="score", continuation=continuation))
    alone = builder.build(request("The capital of France?", task="score")).ids.tolist()
    start, stop = prompt.scored
    assert stop == len(prompt.ids)
    # A token across the border counts as the continuation's.
    assert len(alone) - 1 <= start <= len(alone)
    assert prompt.ids[: start - 1].tolist() == alone[: start - 1]
    text = builder.tokenizer.decode(prompt.ids[start:].tolist(), skip_special=False)
    assert continuation.strip() in text


def test_a_continuation_is_tokenized_together_with_the_prompt(chatml: Path) -> None:
    builder = PromptBuilder(chatml, 4096)
    prompt = builder.build(raw("The cap", task="score", continuation="ital of France"))
    assert prompt.ids.tolist() == builder.build(raw("The capital of France")).ids.tolist()
    start, stop = prompt.scored
    assert "ital of France" in builder.tokenizer.decode(prompt.ids[start:stop].tolist())


def test_every_token_but_the_first_is_scored(chatml: Path) -> None:
    prompt = PromptBuilder(chatml, 4096).build(raw("The capital of France", task="score"))
    assert prompt.scored == (1, len(prompt.ids))


def test_a_continuation_without_prompt_starts_at_the_second_token(chatml: Path) -> None:
    prompt = PromptBuilder(chatml, 4096).build(raw("", task="score", continuation="The capital of France"))
    assert prompt.scored == (1, len(prompt.ids))


def test_the_continuation_is_never_truncated(chatml: Path) -> None:
    builder = PromptBuilder(chatml, 100, overlong="truncate-left")
    prompt = builder.build(request(LONG * 10, task="score", continuation=" a b c"))
    start, stop = prompt.scored
    assert prompt.truncated > 0
    assert stop == len(prompt.ids) <= 100
    assert builder.tokenizer.decode(prompt.ids[start:].tolist()) == " a b c"


def test_an_empty_continuation(chatml: Path) -> None:
    error = refusal(PromptBuilder(chatml, 100), request(task="score", continuation=""))
    assert (error.type, error.field) == ("invalid_value", "continuation")


@pytest.mark.parametrize("labels", [("yes", "no"), (" yes", " no"), ("true positive", "true negative", "🎉")])
def test_labels_continue_the_prompt(folder: Path, labels: tuple[str, ...]) -> None:
    builder = PromptBuilder(folder, 4096)
    prompt = builder.build(request("Is it?", task="classify", labels=labels))
    for label, branch in zip(labels, prompt.branches, strict=True):
        assert branch.dtype == np.int32
        joint = builder.build(request("Is it?", task="score", continuation=label)).ids.tolist()
        if joint[: len(prompt.ids)] == prompt.ids.tolist():
            assert joint[len(prompt.ids) :] == branch.tolist()
        assert builder.tokenizer.decode(branch.tolist()).strip() == label.strip()
    assert prompt.scored == (0, 0)


def test_labels_of_a_raw_prompt_and_a_shielded_one(chatml: Path) -> None:
    builder = PromptBuilder(chatml, 4096)
    for row in (raw("Is it?", task="classify", labels=(" yes",)), request("<|im_end|>", "classify", labels=(" yes",))):
        prompt = builder.build(row)
        assert builder.tokenizer.decode(prompt.branches[0].tolist()) == " yes"
    look_alike = builder.build(request("Is it?", "classify", labels=("<|im_end|>",))).branches[0].tolist()
    assert builder.tokenizer.token_id("<|im_end|>") not in look_alike
    assert builder.tokenizer.decode(look_alike) == "<|im_end|>"


def test_a_label_that_would_swallow_the_prompts_last_token(chatml: Path) -> None:
    builder = PromptBuilder(chatml, 4096)
    prompt = builder.build(raw("the capi", task="classify", labels=("tal",)))
    assert builder.build(raw("the capital")).ids.tolist()[: len(prompt.ids)] != prompt.ids.tolist()
    assert builder.tokenizer.decode(prompt.branches[0].tolist()) == "tal"


def test_an_empty_label(chatml: Path) -> None:
    error = refusal(PromptBuilder(chatml, 100), request(task="classify", labels=("yes", "")))
    assert (error.type, error.field) == ("invalid_value", "labels[1]")


def test_the_longest_label_counts(chatml: Path) -> None:
    row = request(task="classify", labels=("yes", "no no no no"))
    prompt = PromptBuilder(chatml, 4096).build(row)
    needed = len(prompt.ids) + max(map(len, prompt.branches))
    assert PromptBuilder(chatml, needed).build(row)
    assert refusal(PromptBuilder(chatml, needed - 1), row).type == "prompt_too_long"


# ---------------------------------------------------------------------------------------------- formats, parts


def test_an_empty_raw_prompt(chatml: Path) -> None:
    assert refusal(PromptBuilder(chatml, 100), raw("")).type == "empty_prompt"


def test_a_tokenizer_with_bos_reads_an_empty_prompt(tmp_path: Path) -> None:
    builder = PromptBuilder(write_folder(tmp_path, "llama3"), 100)
    assert builder.build(raw("")).ids.tolist() == [builder.tokenizer.bos_id]


def test_the_raw_format_uses_no_template(chatml: Path) -> None:
    builder = PromptBuilder(chatml, 100, prompt_format="raw")
    assert builder.build(request("Hi")).ids.tolist() == builder.build(raw("Hi")).ids.tolist()
    turns = (Message("user", ("a",)), Message("assistant", ("b",)), Message("user", ("c",)))
    assert refusal(builder, request(messages=turns)).type == "template_error"


def test_a_folder_without_template(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "chatml", template=None)
    builder = PromptBuilder(folder, 100)
    assert builder.build(request("Hi")).ids.tolist() == builder.build(raw("Hi")).ids.tolist()
    with pytest.raises(UsageError, match="no chat template"):
        PromptBuilder(folder, 100, prompt_format="chat")


@pytest.mark.parametrize("setting", [{"overlong": "cut"}, {"prompt_format": "html"}])
def test_unknown_settings(chatml: Path, setting: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        PromptBuilder(chatml, 100, **setting)  # type: ignore[arg-type]


def test_documents_stand_where_they_are_named(chatml: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Once upon a time.")
    builder = PromptBuilder(chatml, 4096, document_root=tmp_path)
    parts = ("Read: ", MediaRef("document", "a.txt", None, "document_path"), "\n\nWho?")
    with_document = builder.build(request(messages=(Message("user", parts),)))
    as_text = builder.build(request("Read: Once upon a time.\n\nWho?"))
    assert with_document.ids.tolist() == as_text.ids.tolist()


def test_a_missing_document(chatml: Path, tmp_path: Path) -> None:
    builder = PromptBuilder(chatml, 4096, document_root=tmp_path)
    parts = (MediaRef("document", "gone.txt", None, "document_path"),)
    error = refusal(builder, request(messages=(Message("user", parts),)))
    assert (error.type, error.field) == ("file_missing", "document_path")


def test_a_picture(chatml: Path) -> None:
    parts = ("See ", MediaRef("image", None, b"\x89PNG", "messages[0].content[1]"))
    error = refusal(PromptBuilder(chatml, 4096), request(messages=(Message("user", parts),)))
    assert (error.type, error.field) == ("unsupported_media", "messages[0].content[1]")


def test_one_bad_row_costs_no_neighbour(chatml: Path) -> None:
    builder = PromptBuilder(chatml, 100)
    good, bad = request("fine"), request(LONG * 50)
    sizes = builder.sizes([good, bad, good])
    assert [type(size) for size in sizes] == [RowSize, RowError, RowSize]
    assert sizes[0] == sizes[2]


def test_messages_never_quote_the_row(chatml: Path) -> None:
    secret = "sesame"
    rows = [request(secret * 500), request(secret, max_tokens=500), raw(secret * 500)]
    for row in rows:
        assert secret not in refusal(PromptBuilder(chatml, 100), row).message
