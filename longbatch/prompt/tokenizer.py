"""Text to token ids and back, through the Rust `tokenizers` package.

Ids are those of `tokenizer.json` with the additions of `tokenizer_config.json`, as transformers loads them.
transformers itself is imported only for a model folder that has no `tokenizer.json`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Encoding, decoders, pre_tokenizers

from longbatch.errors import UsageError
from longbatch.prompt.guard import Guard

# The named tokens that chat templates may read, as in transformers' PreTrainedTokenizerBase.
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """One model's tokenizer.

    backend: the `tokenizers.Tokenizer`. named: the named special tokens by attribute (`bos_token`: `<s>`).
    hash: hex digest of everything that decides the ids.
    """

    def __init__(self, backend: tokenizers.Tokenizer, named: dict[str, str], hash: str) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        self.backend = backend
        self.named = named
        self.hash = hash

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Read the tokenizer of a model folder.

        Raises UsageError where there is none, or where it is damaged.
        """
        settings = _read_json(model_dir / "tokenizer_config.json")
        if "added_tokens_decoder" not in settings:
            # transformers reads this older file only then, and then it wins.
            settings |= _read_json(model_dir / "special_tokens_map.json")
        file = model_dir / "tokenizer.json"
        if file.is_file():
            source = file.read_bytes()
            try:
                backend = tokenizers.Tokenizer.from_buffer(source)
            except Exception as error:  # the Rust side raises bare Exception
                raise UsageError(f"{file} is not a readable tokenizer: {error}") from error
        else:
            backend = _convert(model_dir)
            source = backend.to_str().encode()
        model_type = _read_json(model_dir / "config.json").get("model_type")
        if model_type == "llama" and str(settings.get("tokenizer_class")).removesuffix("Fast") == "LlamaTokenizer":
            _rebuild_llama(backend, settings)
        named = _named_tokens(settings)
        _add_missing_tokens(backend, settings, named)
        digest = hashlib.sha256(source)
        digest.update(json.dumps([model_type, settings], sort_keys=True).encode())
        return cls(backend, named, digest.hexdigest())

    # ------------------------------------------------------------------------------------------ encode

    def encode(self, text: str, *, allow_special: bool, add_special: bool = False) -> list[int]:
        """Token ids of one text.

        allow_special: whether the text of a special token becomes that token (True), or stays text (False).
        add_special: whether the tokenizer's own first and last tokens (BOS, EOS) are added.
        """
        return self.encode_batch([text], allow_special=allow_special, add_special=add_special)[0]

    def encode_batch(self, texts: Sequence[str], *, allow_special: bool, add_special: bool = False) -> list[list[int]]:
        """Token ids of several texts at once; the arguments are those of `encode`."""
        encoded: list[list[int]] = [item.ids for item in self.encodings(texts, add_special=add_special)]
        if not allow_special:
            for i, text in enumerate(texts):
                if self.guard.found(text):
                    encoded[i] = self.guard.encoding(text, add_special=add_special).ids
        return encoded

    def encodings(self, texts: Sequence[str], *, add_special: bool = False) -> list[Encoding]:
        """The library's encodings, special tokens recognised and offsets left out: the cheapest way to count."""
        return self.backend.encode_batch_fast(texts, add_special_tokens=add_special)

    @cached_property
    def guard(self) -> Guard:
        """Keeps look-alikes of the special tokens text."""
        return Guard(self.backend)

    # ------------------------------------------------------------------------------------------ decode

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids; bytes that are no valid UTF-8 become U+FFFD."""
        return self.backend.decode(ids, skip_special_tokens=skip_special)

    def token_text(self, id: int) -> str:
        """Text of one token alone, special tokens shown; an id without a token is empty."""
        return self.backend.decode([id], skip_special_tokens=False)

    def stream(self, *, skip_special: bool = True) -> TextStream:
        """A decoder that is fed token by token."""
        return TextStream(self, skip_special)

    # ------------------------------------------------------------------------------------------- facts

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_id(self) -> int | None:
        """Id of the token that starts a text, if the tokenizer names one."""
        return self.token_id(self.named.get("bos_token"))

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a text, if the tokenizer names one."""
        return self.token_id(self.named.get("eos_token"))

    def token_id(self, token: str | None) -> int | None:
        """Id of a token by its content, None where there is no such token."""
        return None if token is None else self.backend.token_to_id(token)


class TextStream:
    """Turns tokens into text as they come, and never shows a part of a UTF-8 character.

    The text of a token depends on those before it (byte pieces, leading spaces), so a short tail of tokens is
    decoded with and without the new one, and the difference is the new text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._tail: list[int] = []
        self._num_shown = 0
        self._shown = ""

    def push(self, id: int) -> str:
        """Take one token; return the text that it completes, which may be empty."""
        self._tail.append(id)
        text = self._tokenizer.decode(self._tail, skip_special=self._skip_special)
        if text.endswith("\ufffd") or len(text) <= len(self._shown):
            return ""
        new = text[len(self._shown) :]
        # The tokens shown before are no longer needed as context: the newest ones take their place.
        self._tail = self._tail[self._num_shown :]
        self._num_shown = len(self._tail)
        self._shown = self._tokenizer.decode(self._tail, skip_special=self._skip_special)
        return new

    def flush(self) -> str:
        """The text still held back at the end: an unfinished character shows as U+FFFD."""
        text = self._tokenizer.decode(self._tail, skip_special=self._skip_special)
        new = text[len(self._shown) :]
        self._shown = text
        return new


# --------------------------------------------------------------------------------------- reading the folder


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object, empty where the file is missing."""
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UsageError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{file} must hold a JSON object")
    return value


def _convert(model_dir: Path) -> tokenizers.Tokenizer:
    """The Rust tokenizer that transformers makes of other files (sentencepiece, tiktoken, vocabulary and merges)."""
    try:
        from transformers import AutoTokenizer

        backend = AutoTokenizer.from_pretrained(
            str(model_dir), trust_remote_code=False, local_files_only=True
        ).backend_tokenizer
    except Exception as error:  # whatever transformers finds wrong with the folder
        raise UsageError(
            f"{model_dir} has no tokenizer.json, and transformers could not build a tokenizer: {error}",
            hint="copy tokenizer.json from the model's repository into the folder",
        ) from error
    return tokenizers.Tokenizer.from_str(backend.to_str())


def _rebuild_llama(backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
    """Give a Llama 1 or 2 tokenizer the pipeline that transformers' LlamaTokenizer builds in code.

    Only vocabulary and merges are taken from tokenizer.json then; the file often says to put a space after every
    special token, which the models never saw. Tokenizers over bytes (Llama 3's kind) stay as they are.
    """
    if "ByteLevel" in str(backend.pre_tokenizer):
        return
    add_prefix_space = settings.get("add_prefix_space") is not False
    scheme = "never" if not add_prefix_space else "always" if settings.get("legacy") else "first"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if add_prefix_space else []))


def _content(token: object) -> str | None:
    """Text of a token that is given as a string or as a serialized AddedToken."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _named_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """The named special tokens: the usual ones and the model's own (`image_token`)."""
    own = {name: token for name, token in settings.items() if name.endswith("_token") and isinstance(token, str)}
    extra = settings.get("extra_special_tokens")
    candidates = {name: settings.get(name) for name in NAMED_TOKENS} | own | (extra if isinstance(extra, dict) else {})
    return {name: text for name, token in candidates.items() if (text := _content(token)) is not None}


def _add_missing_tokens(backend: tokenizers.Tokenizer, settings: dict[str, Any], named: dict[str, str]) -> None:
    """Add the tokens that tokenizer_config.json has and tokenizer.json lacks, in transformers' order."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    decoder = settings.get("added_tokens_decoder")
    listed = sorted(decoder.items(), key=lambda item: int(item[0])) if isinstance(decoder, dict) else []
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    missing: list[AddedToken] = []

    def add(token: object, special: bool) -> None:
        content = _content(token)
        if content is None or content in known:
            return
        known.add(content)
        flags = {
            flag: bool(token[flag])
            for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")
            if isinstance(token, dict) and flag in token
        }
        missing.append(AddedToken(content, **({"special": special} | flags)))

    for _, token in listed:
        add(token, special=False)
    for content in named.values():
        add(content, special=True)
    for token in extra if isinstance(extra, list) else []:
        add(token, special=True)
    if missing:
        backend.add_tokens(missing)
