"""Tokenizer folders, decoding, and text that comes token by token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prompt_folders import FAMILIES, write_folder
from transformers import AutoTokenizer

from longbatch.errors import UsageError
from longbatch.prompt import Tokenizer

TEXT = "Zwölf 🎉👩‍👩‍👧 foxes,  一只狐狸\n\tend. 12345"


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", request.param)


def test_facts_are_those_of_transformers(folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    assert ours.vocab_size == len(theirs)
    assert ours.bos_id == theirs.bos_token_id
    assert ours.eos_id == theirs.eos_token_id
    # Some of their classes name a token that the folder does not (an unk_token, say).
    assert ours.named.items() <= theirs.special_tokens_map.items()


def test_text_comes_back(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode(TEXT, allow_special=True)
    # The tokenizers built on characters know few of them here and spell the others in bytes.
    assert tokenizer.decode(ids) == TEXT


def test_a_stream_shows_the_same_text(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode(TEXT, allow_special=True)
    stream = tokenizer.stream()
    pieces = [stream.push(id) for id in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == TEXT
    assert stream.flush() == ""


def test_a_stream_that_ends_inside_a_character(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, "llama3"))
    ids = tokenizer.encode("a🎉", allow_special=True)
    stream = tokenizer.stream()
    text = "".join(stream.push(id) for id in ids[:-1])
    assert text == "a"
    assert set(stream.flush()) == {"\ufffd"}


def test_a_stream_skips_special_tokens_or_shows_them(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, "gpt-oss"))
    text = "<|channel|>final<|message|>Hi<|return|>"
    ids = tokenizer.encode(text, allow_special=True)
    hidden, shown = tokenizer.stream(), tokenizer.stream(skip_special=False)
    assert "".join(map(hidden.push, ids)) + hidden.flush() == "finalHi"
    assert "".join(map(shown.push, ids)) + shown.flush() == text


def test_token_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, "chatml"))
    eos = tokenizer.eos_id
    assert eos is not None
    assert tokenizer.token_text(eos) == "<|im_end|>"
    assert tokenizer.token_text(10**6) == ""


def test_encode_keeps_look_alikes_text_on_request(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, "llama3"))
    allowed, forbidden = (tokenizer.encode("a<|eot_id|>", allow_special=allow) for allow in (True, False))
    assert tokenizer.eos_id in allowed
    assert tokenizer.eos_id not in forbidden
    assert tokenizer.decode(forbidden, skip_special=False) == "a<|eot_id|>"
    assert tokenizer.encode("a", allow_special=False, add_special=True)[0] == tokenizer.bos_id
    assert tokenizer.encode_batch(["a", "b"], allow_special=True) == [
        tokenizer.encode(text, allow_special=True) for text in "ab"
    ]


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "chatml")
    file = folder / "tokenizer.json"
    document = json.loads(file.read_text())
    document["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    document["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    file.write_text(json.dumps(document))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(tokenizer.encode("one two three four", allow_special=True)) == "one two three four"


# ------------------------------------------------------------------------------------------- the folder


@pytest.mark.parametrize(
    "settings", [{"legacy": True}, {"legacy": False}, {"legacy": None}, {"add_prefix_space": False}]
)
def test_llama_tokenizers_are_built_as_transformers_builds_them(tmp_path: Path, settings: dict[str, object]) -> None:
    folder = write_folder(tmp_path, "llama2")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    for text in ("Hi", " Hi", "<s>Hi</s>Hi <s> Hi", TEXT):
        ids = ours.encode(text, allow_special=True, add_special=True)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_tokens_that_only_the_settings_have(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "chatml")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    size = Tokenizer.load(folder).vocab_size
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {
        str(size + 1): {"content": "<tool>", **flags, "special": False},
        str(size): {"content": "<pad>", **flags},
    }
    settings["pad_token"] = {"content": "<pad>", **flags, "__type": "AddedToken"}
    settings["image_token"] = "<image>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    text = "x<pad>y<tool>z<image>"
    assert ours.encode(text, allow_special=True) == theirs(text)["input_ids"]
    assert ours.named == theirs.special_tokens_map
    assert ours.vocab_size == size + 3


def test_names_in_the_older_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "chatml")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_id == tokenizer.token_id("<|im_end|>")
    assert tokenizer.bos_id is None


def test_the_hash_tells_tokenizers_apart(tmp_path: Path) -> None:
    first, again = (Tokenizer.load(write_folder(tmp_path / name, "chatml")) for name in "ab")
    other = write_folder(tmp_path / "c", "chatml")
    (other / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    assert first.hash == again.hash != Tokenizer.load(other).hash


def test_without_tokenizer_json_transformers_builds_it(tmp_path: Path) -> None:
    """From vocab.json and merges.txt, as GPT-2 came."""
    source = json.loads((write_folder(tmp_path / "whole", "gpt-oss") / "tokenizer.json").read_text())
    folder = tmp_path / "parts"
    folder.mkdir()
    vocab = source["model"]["vocab"]
    (folder / "vocab.json").write_text(json.dumps({**vocab, "<|endoftext|>": len(vocab)}))
    merges = ["#version: 0.2", *(" ".join(merge) for merge in source["model"]["merges"])]
    (folder / "merges.txt").write_text("\n".join(merges) + "\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    )
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    assert ours.encode(TEXT, allow_special=True) == theirs(TEXT)["input_ids"]
    assert ours.eos_id == theirs.eos_token_id


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no tokenizer\.json") as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.hint


@pytest.mark.parametrize("content", [b"", b"{}", b"{", b"\xff\xfe", b"[1]"])
def test_a_damaged_tokenizer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "7"])
def test_damaged_settings(tmp_path: Path, content: str) -> None:
    folder = write_folder(tmp_path, "chatml")
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(UsageError, match=r"tokenizer_config\.json"):
        Tokenizer.load(folder)
