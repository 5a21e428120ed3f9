"""The tokenizer of a GGUF file as a Hugging Face `tokenizer.json` and `tokenizer_config.json`.

A GGUF holds the vocabulary, llama.cpp's token types and, for byte-level models, the merges. What it does not
hold (normalizer, pre-tokenizer, decoder) follows from `tokenizer.ggml.model` and `tokenizer.ggml.pre`, whose
values are defined in llama.cpp's src/llama-vocab.cpp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from longbatch.models.gguf.reader import GgufError, GgufFile

# The longest known are runs of some hundred spaces; finding the merges of a token takes the square of its length.
_MAX_TOKEN = 1024
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6

_SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# tokenizer.ggml.pre -> how text is cut before the merges. "" is GPT-2's own expression, "digits" that after
# every digit was set apart.
_PRE_TOKENIZERS = {
    "gpt-2": "",
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
}
# Whole words of the vocabulary are taken as they are, even where the merges would not reach them.
_IGNORE_MERGES = {"llama-bpe", "llama3", "llama-v3", "tekken"}
_NORMALIZE = {"qwen2", "deepseek-r1-qwen"}


def write_tokenizer(gguf: GgufFile, folder: Path) -> dict[str, Any]:
    """Writes tokenizer.json and returns the content of tokenizer_config.json. Raises `GgufError`."""
    tokens = gguf.array("tokenizer.ggml.tokens", str)
    if len(set(tokens)) < len(tokens):
        raise GgufError("its vocabulary holds the same token twice")
    if any(len(token) > _MAX_TOKEN for token in tokens):
        raise GgufError(f"its vocabulary holds a token of more than {_MAX_TOKEN} characters: it is damaged")
    types = _token_types(gguf, len(tokens))
    model = gguf.text("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(gguf, tokens)
    elif model == "llama":
        tokenizer = _sentencepiece(gguf, tokens, types)
    else:
        raise GgufError(f"its tokenizer {model!r} is not one of gpt2, llama")
    _add_tokens(tokenizer, tokens, types)
    special = {name: _token(gguf, key, tokens) for name, key in _SPECIAL_TOKENS.items() if key in gguf.metadata}
    add_bos = gguf.flag("tokenizer.ggml.add_bos_token", model == "llama")
    if add_bos:
        _prepend_bos(tokenizer, special, tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": gguf.flag("tokenizer.ggml.add_eos_token", False),
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.size(f"{gguf.architecture}.context_length"),
        **special,
    }
    template = _chat_template(gguf)
    return config if template is None else {**config, "chat_template": template}


def _token_types(gguf: GgufFile, num_tokens: int) -> list[int]:
    if "tokenizer.ggml.token_type" not in gguf.metadata:
        return [_NORMAL] * num_tokens
    types = gguf.array("tokenizer.ggml.token_type", int)
    if len(types) != num_tokens:
        raise GgufError(f"it has {len(types)} token types for {num_tokens} tokens")
    return types


def _token(gguf: GgufFile, key: str, tokens: list[str]) -> str:
    index = gguf.integer(key)
    if not 0 <= index < len(tokens):
        raise GgufError(f"its metadata key {key} names token {index} of {len(tokens)}")
    return tokens[index]


def _byte_level(gguf: GgufFile, tokens: list[str]) -> Tokenizer:
    pre = gguf.text("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise GgufError(f"its pre-tokenizer {pre!r} is not one of {', '.join(_PRE_TOKENIZERS)}")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in gguf.array("tokenizer.ggml.merges", str)]
    for merge in merges:
        if (
            len(merge) != 2
            or merge[0] not in vocabulary
            or merge[1] not in vocabulary
            or "".join(merge) not in vocabulary
        ):
            raise GgufError("its merges name tokens that its vocabulary does not hold")
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _IGNORE_MERGES))
    if pre in _NORMALIZE:
        tokenizer.normalizer = normalizers.NFC()
    split = _PRE_TOKENIZERS[pre]
    if split in ("", "digits"):
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_only]) if split else bytes_only
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _sentencepiece(gguf: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """Sentencepiece BPE: spaces become U+2581, unknown characters become bytes.

    Runs of spaces stand in the file as spaces, in the vocabulary as U+2581. Merges are every way to cut a token
    into two others, best token first: by score, or by position in Gemma, whose scores say nothing.
    """
    gemma = gguf.architecture.startswith("gemma")
    spelled = ["\u2581" * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocabulary = {token: index for index, token in enumerate(spelled)}
    if len(vocabulary) < len(spelled):
        raise GgufError("its vocabulary holds the same run of spaces twice")
    scores = [-float(index) for index in range(len(tokens))] if gemma else gguf.array("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise GgufError(f"it has {len(scores)} token scores for {len(tokens)} tokens")
    unknown = "tokenizer.ggml.unknown_token_id"
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=_merges(spelled, types, scores, vocabulary),
            unk_token=_token(gguf, unknown, spelled) if unknown in gguf.metadata else None,
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    steps: list[decoders.Decoder] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    replace = normalizers.Replace(" ", "\u2581")
    if gemma:
        tokenizer.normalizer = replace
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    elif gguf.flag("tokenizer.ggml.add_space_prefix", True):
        # Like llama.cpp and the models' own files: also after each special token.
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(
    tokens: list[str], types: list[int], scores: list[float], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """Merges that make normal tokens only: control and byte tokens are never made out of text."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind not in (_NORMAL, _USER_DEFINED):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-score, -cut, cut - len(token), left, right))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for _, _, _, left, right in found]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special; user-defined ones (`<think>`, runs of line ends) are found whole in text."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    defined = [
        token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED and token in vocabulary
    ]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])


def _prepend_bos(tokenizer: Tokenizer, special: dict[str, str], tokens: list[str]) -> None:
    if "bos_token" not in special:
        raise GgufError("it asks for a first token (add_bos_token) and names none")
    bos = special["bos_token"]
    template = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0",
        pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
        special_tokens=[(bos, tokens.index(bos))],
    )
    steps = [template] if tokenizer.post_processor is None else [tokenizer.post_processor, template]
    tokenizer.post_processor = processors.Sequence(steps)


def _chat_template(gguf: GgufFile) -> str | list[dict[str, str]] | None:
    """The template, or a list of named ones, in the form of tokenizer_config.json."""
    key = "tokenizer.chat_template"
    named = [name for name in gguf.metadata if name.startswith(f"{key}.")]
    if not named:
        return gguf.text(key) if key in gguf.metadata else None
    templates = [{"name": name[len(key) + 1 :], "template": gguf.text(name)} for name in named]
    if key in gguf.metadata:
        templates.insert(0, {"name": "default", "template": gguf.text(key)})
    return templates
