"""When an answer is complete: an end token, a stop string, the token limit, or an exact repetition loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from longbatch.prompt.tokenizer import TextStream, Tokenizer

# A loop is declared when the last LOOP_TOKENS tokens or more repeat one period at least LOOP_REPEATS times.
LOOP_TOKENS = 256
LOOP_REPEATS = 4


def repeats(tokens: Sequence[int]) -> bool:
    """Whether the answer has run into an exact loop: for some period p <= LOOP_TOKENS / LOOP_REPEATS, the last
    LOOP_TOKENS tokens all equal the token p places before them."""
    if len(tokens) < LOOP_TOKENS:
        return False
    tail = tokens[-LOOP_TOKENS:]
    longest = LOOP_TOKENS // LOOP_REPEATS
    return any(tail[-1] == tail[-1 - p] and tail[p:] == tail[:-p] for p in range(1, longest + 1))


@dataclass(slots=True)
class StopRule:
    """Watches one answer. ids: tokens that end it. strings: texts that end it and are cut from it."""

    ids: frozenset[int]
    strings: tuple[str, ...]
    max_tokens: int
    tokenizer: Tokenizer
    tokens: list[int] = field(default_factory=list)
    _text: str = ""
    _cut: int | None = None
    _pushed: int = 0
    _skip_special: bool = field(init=False)
    _stream: TextStream | None = field(init=False)

    def __post_init__(self) -> None:
        # The channels of gpt-oss are marked by special tokens, which tell its reasoning from its answer.
        self._skip_special = self.tokenizer.token_id("<|channel|>") is None
        self._stream = self.tokenizer.stream(skip_special=self._skip_special) if self.strings else None

    def push(self, token: int) -> str | None:
        """Record a token; the finish reason if the answer ends with it, else None."""
        if token in self.ids:
            self._pushed += 1
            return "stop"
        self.tokens.append(token)
        self._pushed += 1
        if self._stream is not None and self._hits(self._stream.push(token)):
            return "stop"
        if self._pushed >= self.max_tokens:
            return "length"
        return "repetition" if repeats(self.tokens) else None

    def _hits(self, new: str) -> bool:
        """Whether a stop string is complete; it may have begun in earlier text."""
        longest = max(map(len, self.strings))
        start = max(0, len(self._text) - longest + 1)
        self._text += new
        found = [at for at in (self._text.find(s, start) for s in self.strings) if at >= 0]
        if found:
            self._cut = min(found)
        return bool(found)

    @property
    def num_tokens(self) -> int:
        """Tokens sampled, the end token included."""
        return self._pushed

    def text(self) -> str:
        """The answer so far, without end tokens and without the stop string."""
        if self._cut is not None:
            return self._text[: self._cut]
        return self.tokenizer.decode(self.tokens, skip_special=self._skip_special)
