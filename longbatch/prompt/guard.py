"""Text typed by a user that looks like a control token stays text.

A chat template writes control tokens (`<|im_end|>`) as text, and the tokenizer finds them again by their text, so
a document that quotes one would end its own turn. Rows without such a look-alike never come here. For the others:

1. `mark` wraps each look-alike in the user's strings in two marker characters before the template is rendered;
2. `resolve` gives the control tokens that the template itself wrote other names, and unwraps the marked ones;
3. `encoding` encodes the result with a copy of the tokenizer that knows the control tokens by those names only.

The text is encoded in one piece, so that everything but the look-alikes gets the ids it always gets.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import tokenizers
from tokenizers import Encoding

from longbatch.errors import UsageError

# Where marker characters are taken from: the supplementary private-use area, which no text standard assigns.
_FIRST_MARKER = 0xF0000


class Markers(NamedTuple):
    """Two characters that occur nowhere in one row's strings."""

    start: str
    end: str


class Guard:
    """Finds look-alikes of control tokens, and encodes text in which they are only text.

    Control tokens are the tokenizer's special tokens, and the other added tokens (`<think>`, `<tool_call>`) that
    the template's own text contains; whitespace tokens are ordinary text. template_text: see `ChatTemplate.literals`.
    """

    def __init__(self, backend: tokenizers.Tokenizer, template_text: str = "") -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special and token.content}
        written = {
            token.content
            for token in added.values()
            if token.content and not token.content.isspace() and token.content in template_text
        }
        self._ids = {token.content: id for id, token in added.items() if token.content in special | written}
        self._special = re.compile(_any_of(special))
        self._control = re.compile(_any_of(special | written))
        # A name that nobody can type, because it is made anew for each process; no id depends on it.
        nonce = secrets.token_hex(8)
        self._names = {content: f"\U000f0000{nonce}x{i:x}\U000f0001" for i, content in enumerate(self._ids)}

    def found(self, text: str, *, special_only: bool = False) -> bool:
        """Whether the text contains a look-alike. special_only: leave out control tokens that are not special, for
        text in which they mean themselves (the model's own earlier turns, a raw prompt)."""
        return (self._special if special_only else self._control).search(text) is not None

    def markers(self, texts: Iterable[str]) -> Markers:
        """Two marker characters that none of the texts contains."""
        used = set().union(*texts)
        free = (chr(code) for code in range(_FIRST_MARKER, _FIRST_MARKER + len(used) + 2) if chr(code) not in used)
        return Markers(next(free), next(free))

    def mark(self, text: str, markers: Markers, *, special_only: bool = False) -> str:
        """Wrap every look-alike in markers."""
        pattern = self._special if special_only else self._control
        return pattern.sub(lambda match: f"{markers.start}{match[0]}{markers.end}", text)

    def resolve(self, text: str, markers: Markers) -> str:
        """Rename the control tokens outside markers, unwrap those inside.

        A template that splits a string at a control token leaves lone markers; they are dropped.
        """
        start, end = markers
        pattern = re.compile(f"{start}({self._control.pattern}){end}|({self._control.pattern})|[{start}{end}]")

        def replace(match: re.Match[str]) -> str:
            marked, written = match.groups()
            return marked or (self._names[written] if written else "")

        return pattern.sub(replace, text)

    def shield(self, text: str) -> str:
        """Prepare a text that no template touches (a raw prompt, an answer): its look-alikes of special tokens are
        text, and the other control tokens mean themselves."""
        return self._control.sub(
            lambda match: match[0] if self._special.fullmatch(match[0]) else self._names[match[0]], text
        )

    def last_control(self, text: str, *, renamed: bool) -> int:
        """Where the last control token starts, or 0: what comes after is encoded independently of what is before.

        renamed: whether the text has been resolved or shielded; otherwise it must be without look-alikes.
        """
        pattern = re.compile("|".join(map(re.escape, self._names.values()))) if renamed else self._control
        return max((match.start() for match in pattern.finditer(text)), default=0)

    def encoding(self, text: str, *, add_special: bool = False) -> Encoding:
        """Encode a resolved or shielded text, with offsets into it."""
        return self._renamed.encode(text, add_special_tokens=add_special)

    @cached_property
    def _renamed(self) -> tokenizers.Tokenizer:
        """The tokenizer with each control token under its other name, in the vocabulary too, so that no merge can
        arrive at it from plain text."""
        names = self._names
        document: dict[str, Any] = json.loads(self._backend.to_str())
        for token in document["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = document["model"]
        vocab = model["vocab"]
        if isinstance(vocab, dict):
            model["vocab"] = {names.get(piece, piece): id for piece, id in vocab.items()}
        else:
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:
            model["merges"] = [merge for merge in model["merges"] if not _touches(merge, names)]
        renamed = tokenizers.Tokenizer.from_str(json.dumps(document))
        if any(renamed.token_to_id(names[content]) != id for content, id in self._ids.items()):
            raise UsageError("this tokenizer changes its token ids when its special tokens are renamed")
        return renamed


def strings_in(value: object) -> Iterator[str]:
    """Every string inside a row's template_kwargs, keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


def mark_values(value: Any, guard: Guard, markers: Markers) -> Any:
    """A copy of template_kwargs with the look-alikes in its strings marked."""
    if isinstance(value, str):
        return guard.mark(value, markers)
    if isinstance(value, Mapping):
        return {key: mark_values(item, guard, markers) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mark_values(item, guard, markers) for item in value]
    return value


def _touches(merge: str | list[str], names: dict[str, str]) -> bool:
    """Whether a merge reads or makes a renamed token."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names


def _any_of(words: Iterable[str]) -> str:
    """A regular expression for the longest of the words at a position.

    Common prefixes are factored out: some tokenizers have thousands of control tokens that start alike, and a
    plain alternation would try each of them at every `<`.
    """
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _pattern(trie) if trie else "(?!)"


def _pattern(node: dict[str, Any]) -> str:
    branches = [re.escape(letter) + _pattern(child) for letter, child in sorted(node.items()) if letter]
    if not branches:
        return ""
    body = f"(?:{'|'.join(branches)})" if len(branches) > 1 or "" in node else branches[0]
    return body + "?" if "" in node else body
