"""Conversion of two real GGUF files against transformers' own loading of them, and the tokenizers of other kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import pytest
import tiny_models
import torch
import transformers
from tokenizers import Tokenizer

from longbatch.errors import UsageError
from longbatch.models.gguf import convert

CORPUS = [
    "Hello world",
    "  leading, trailing  ",
    "a  b   c\n\n\n d\t\te \r\n\r\n",
    "def f(x):\n    return x ** 2  # squared\n\n\nclass A:\n\tpass\n",
    "na\u00efve caf\u00e9 e\u0301 \u00dcn\u00efc\u00f6de \u00bd\u00b2\u2460 \u2167",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3001\u4e2d\u6587\u5b57\u7b26",
    "\u0645\u0631\u062d\u0628\u0627 \u041f\u0440\u0438\u0432\u0435\u0442 \uc548\ub155 \u0928\u092e\u0938\u094d",
    "\U0001f642\U0001f643\U0001f469\u200d\U0001f469\u200d\U0001f467 \u2728",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<start_of_turn>user\nhi<end_of_turn>\n<bos><unused0><mask>[multimodal]",
    "<table><h1>x</h1></table>",
    "don't we'll I'M they've",
    "price: $1,234.56!  2024-11-29 and 3.14159",
    "nul \0 and replacement \ufffd and private \ue000",
    "x" * 300,
    " " * 70,
    "\n" * 40,
    "\t" * 9 + "\n \n  \n",
]


def ids_of_transformers(path: Path, text: str, tokenizers: dict[Path, Any]) -> list[int]:
    if path not in tokenizers:
        tokenizers[path] = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ids: list[int] = tokenizers[path](text)["input_ids"]
    return ids


@pytest.mark.parametrize("model", ["smollm2", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_logits_equal_transformers_own_loading(model: str, request: pytest.FixtureRequest) -> None:
    path, folder = request.getfixturevalue(f"{model}_gguf"), request.getfixturevalue(f"{model}_dir")
    ours = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ids = torch.tensor([Tokenizer.from_file(str(folder / "tokenizer.json")).encode(" ".join(CORPUS)).ids[:100]])
    with torch.inference_mode():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


@pytest.mark.slow
def test_gemma_ids_equal_transformers(gemma3_gguf: Path, gemma3_dir: Path) -> None:
    ours = Tokenizer.from_file(str(gemma3_dir / "tokenizer.json"))
    tokenizers: dict[Path, Any] = {}
    for text in CORPUS:
        assert ours.encode(text).ids == ids_of_transformers(gemma3_gguf, text, tokenizers), ascii(text)
        assert ours.decode(ours.encode(text).ids[1:], skip_special_tokens=False) == text


def test_smollm_ids_equal_transformers_but_for_digits(smollm2_gguf: Path, smollm2_dir: Path) -> None:
    """transformers does not know the pre-tokenizer `smollm` and leaves out its setting apart of digits."""
    ours = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    tokenizers: dict[Path, Any] = {}
    for text in CORPUS:
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
        plain = "".join(" " if character.isnumeric() else character for character in text)
        assert ours.encode(plain).ids == ids_of_transformers(smollm2_gguf, plain, tokenizers), ascii(text)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("x  1  22", ["x", "\u0120\u0120", "1", "\u0120\u0120", "2", "2"]),
        ("in 2024", ["in", "\u0120", "2", "0", "2", "4"]),
        ("\n\n12", ["\u010a\u010a", "1", "2"]),
    ],
)
def test_smollm_sets_digits_apart(text: str, tokens: list[str], smollm2_dir: Path) -> None:
    assert Tokenizer.from_file(str(smollm2_dir / "tokenizer.json")).encode(text).tokens == tokens


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_auto_tokenizer_reads_the_folder(model: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(f"{model}_dir")
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    assert all(auto(text)["input_ids"] == ours.encode(text).ids for text in CORPUS)


def test_control_and_byte_tokens_are_not_made_of_text(gemma3_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(gemma3_dir / "tokenizer.json"))
    assert tokenizer.encode("<bos>", add_special_tokens=False).ids == [2]
    tokenizer.encode_special_tokens = True  # look-alikes stay text
    assert 2 not in tokenizer.encode("<bos>", add_special_tokens=False).ids
    byte = tokenizer.token_to_id("<0x41>")
    assert byte is not None
    assert byte not in tokenizer.encode("<0x41>", add_special_tokens=False).ids


def test_chat_template_and_generation_settings(smollm2_dir: Path, gemma3_dir: Path) -> None:
    rendered = transformers.AutoTokenizer.from_pretrained(smollm2_dir).apply_chat_template(
        [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert rendered == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert "chat_template" not in json.loads((gemma3_dir / "tokenizer_config.json").read_text())
    ends = [json.loads((folder / "generation_config.json").read_text()) for folder in (smollm2_dir, gemma3_dir)]
    assert [end["eos_token_id"] for end in ends] == [2, 1]


def test_template_adds_end_tokens_and_sampling(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter, tensors: dict[str, gguf_files.Array]) -> None:
        writer.kv_data[0]["tokenizer.ggml.tokens"].value[7] = "<|im_end|>"
        writer.add_chat_template(
            [{"name": "default", "template": "{{ x }}<|im_end|>"}, {"name": "tool", "template": "t"}]
        )
        writer.add_float32("general.sampling.temp", 0.7)
        writer.add_int32("general.sampling.top_k", 20)

    gguf_files.write(tmp_path / "model.gguf", tiny_models.make("qwen2"), change)
    convert(tmp_path / "model.gguf", tmp_path / "model")
    config = transformers.GenerationConfig.from_pretrained(tmp_path / "model")
    assert config.eos_token_id == [2, 7]
    assert (config.do_sample, round(config.temperature, 6), config.top_k) == (True, 0.7, 20)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, chat_template="tool", tokenize=False) == "t"
    assert tokenizer.apply_chat_template(messages, tokenize=False, x="y") == "y<|im_end|>"


PRE_TOKENIZED = {
    "gpt-2": ["It", "'s", " 2024", ",", " \u0130x", "!?", "\n  ", " end"],
    "llama-bpe": ["It", "'s", " ", "202", "4", ",", " \u0130x", "!?\n", "  ", " end"],
    "qwen2": ["It", "'s", " ", "2", "0", "2", "4", ",", " \u0130x", "!?\n", "  ", " end"],
    "gpt-4o": ["It's", " ", "202", "4", ",", " \u0130x", "!?\n", "  ", " end"],
    "tekken": ["It", "'s", " ", "2", "0", "2", "4", ",", " \u0130x", "!?\n", "  ", " end"],
    "smollm": ["It", "'s", " ", "2", "0", "2", "4", ",", " \u0130x", "!?", "\n  ", " end"],
}


@pytest.mark.parametrize("pre", PRE_TOKENIZED)
def test_pre_tokenizers_cut_text_as_llama_cpp_does(pre: str, tmp_path: Path) -> None:
    text = "It's 2024, \u0130x!?\n   end"
    gguf_files.write(
        tmp_path / "model.gguf",
        tiny_models.make("qwen2"),
        lambda writer, _: set_value(writer, "tokenizer.ggml.pre", pre),
    )
    convert(tmp_path / "model.gguf", tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.pre_tokenizer is not None
    pieces = [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == PRE_TOKENIZED[pre]


def set_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    writer.kv_data[0][key].value = value


def sentencepiece(writer: gguf.GGUFWriter, space_prefix: bool) -> None:
    tokens = ["<unk>", "<s>", "</s>", "<0x41>", "\u2581", "h", "i", "hi", "\u2581hi", "  ", "[X]"]
    types = [2, 3, 3, 6, 1, 1, 1, 1, 1, 4, 4]
    count = len(writer.kv_data[0]["tokenizer.ggml.tokens"].value)
    set_value(writer, "tokenizer.ggml.model", "llama")
    set_value(writer, "tokenizer.ggml.tokens", tokens + [f"unused{i}" for i in range(count - len(tokens))])
    set_value(writer, "tokenizer.ggml.token_type", types + [5] * (count - len(types)))
    writer.add_token_scores([0.0] * 5 + [-9.0, -8.0, -2.0, -1.0, -3.0] + [0.0] * (count - 10))
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(space_prefix)


@pytest.mark.parametrize(
    ("space_prefix", "text", "tokens"),
    [
        (True, "hi", ["<s>", "\u2581hi"]),
        (True, "hi</s>hi", ["<s>", "\u2581hi", "</s>", "\u2581hi"]),
        (True, " hi", ["<s>", "\u2581", "\u2581hi"]),
        (True, "hi[X]", ["<s>", "\u2581hi", "[X]"]),
        (False, "hi", ["<s>", "hi"]),
        (False, "hi A", ["<s>", "hi", "\u2581", "<0x41>"]),
        (False, "B", ["<s>", "<unk>"]),
    ],
)
def test_sentencepiece_vocabulary(space_prefix: bool, text: str, tokens: list[str], tmp_path: Path) -> None:
    gguf_files.write(
        tmp_path / "model.gguf", tiny_models.make("llama"), lambda writer, _: sentencepiece(writer, space_prefix)
    )
    convert(tmp_path / "model.gguf", tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.encode(text).tokens == tokens


def test_existing_folders(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "model.gguf", tiny_models.make("llama"))
    folder = tmp_path / "deep" / "model"
    made = convert(tmp_path / "model.gguf", folder)
    assert str(made).startswith(f"{folder}: LlamaForCausalLM, 0 M parameters (F32 to float32), licence not stated")
    with pytest.raises(UsageError, match="is not empty") as caught:
        convert(tmp_path / "model.gguf", folder)
    assert caught.value.hint is not None
    assert "--overwrite" in caught.value.hint
    (folder / "stale.safetensors").touch()
    convert(tmp_path / "model.gguf", folder, overwrite=True)
    assert not (folder / "stale.safetensors").exists()
    assert [file.name for file in folder.parent.iterdir()] == ["model"]
    other = tmp_path / "documents"
    other.mkdir()
    (other / "letter.txt").touch()
    with pytest.raises(UsageError, match="is no model folder, so it is not replaced"):
        convert(tmp_path / "model.gguf", other, overwrite=True)
    with pytest.raises(UsageError, match="is a file"):
        convert(tmp_path / "model.gguf", other / "letter.txt")
    with pytest.raises(UsageError, match="is not a file"):
        convert(tmp_path / "absent.gguf", tmp_path / "x")
    with pytest.raises(UsageError, match="dtype 'int8' is not one of"):
        convert(tmp_path / "model.gguf", tmp_path / "x", dtype="int8")
