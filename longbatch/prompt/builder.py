"""From a request to what the model reads: one text by the chat template, one encode, one check of the length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from tokenizers import Encoding

from longbatch.core import Fault, MediaRef, Message, Prompt, Request, RowSize
from longbatch.errors import RowError, UsageError
from longbatch.media.documents import load_document
from longbatch.prompt.guard import Guard, mark_values, strings_in
from longbatch.prompt.reasoning import THINK_START
from longbatch.prompt.template import ChatTemplate
from longbatch.prompt.tokenizer import Tokenizer
from longbatch.prompt.truncation import keep_tokens

OVERLONG = ("error", "truncate-middle", "truncate-left")
PROMPT_FORMATS = ("auto", "chat", "raw")
MAX_DOCUMENT_BYTES = 256 * 2**20
# What the tokenizer is given to count at once.
BATCH_ROWS = 4096
BATCH_CHARS = 4_000_000


@dataclass(frozen=True, slots=True)
class _Text:
    """One row as text. shielded: it holds look-alikes of control tokens, so the guard encodes it. add_special: whether
    the tokenizer adds its own first and last tokens (raw prompts). cuttable: the texts that the user gave; truncation
    shortens the longest one that the template left as it is."""

    text: str
    shielded: bool
    add_special: bool
    cuttable: tuple[str, ...]

    @property
    def cuttable_span(self) -> tuple[int, int] | None:
        """First and one-past-last character of the text that truncation may shorten."""
        for candidate in sorted(self.cuttable, key=len, reverse=True):
            # Many templates trim what they are given.
            trimmed = candidate.strip()
            start = self.text.find(trimmed)
            if trimmed and start >= 0:
                return start, start + len(trimmed)
        return None


@dataclass(slots=True)
class _Batch:
    """Rows on their way through `stream_sizes`. results: in their order, None where the tokenizer has yet to count.
    chats, raws: the rendered texts by index, for the tokenizer to count without and with its own special tokens."""

    rows: list[Request | Fault] = field(default_factory=list)
    results: list[RowSize | RowError | None] = field(default_factory=list)
    chats: dict[int, str] = field(default_factory=dict)
    raws: dict[int, str] = field(default_factory=dict)
    num_chars: int = 0

    @property
    def full(self) -> bool:
        return len(self.rows) >= BATCH_ROWS or self.num_chars >= BATCH_CHARS


class PromptBuilder:
    """Builds the prompts of one run; it keeps no state between rows, so threads may share it.

    Prompt, continuation or longest label, and max_tokens must fit into max_length together. Text typed by a user
    never becomes a special token, in raw prompts neither. The parts of a message are joined as they are.
    """

    def __init__(
        self,
        model_dir: Path,
        max_length: int,
        *,
        overlong: str = "error",
        prompt_format: str = "auto",
        document_root: Path | None = None,
        default_max_tokens: int = 1024,
    ) -> None:
        if overlong not in OVERLONG:
            raise UsageError(f"overlong must be one of {', '.join(OVERLONG)}, not {overlong!r}")
        if prompt_format not in PROMPT_FORMATS:
            raise UsageError(f"the prompt format must be one of {', '.join(PROMPT_FORMATS)}, not {prompt_format!r}")
        self.tokenizer = Tokenizer.load(model_dir)
        self.template = None if prompt_format == "raw" else ChatTemplate.load(model_dir)
        if prompt_format == "chat" and self.template is None:
            hint = "add chat_template.jinja to the folder, or use the raw prompt format"
            raise UsageError(f"{model_dir} has no chat template", hint=hint)
        self.max_length = max_length
        self.overlong = overlong
        self.document_root = document_root
        self.default_max_tokens = default_max_tokens
        self._guard = Guard(self.tokenizer.backend, self.template.literals if self.template else "")

    def build(self, request: Request) -> Prompt:
        """The prompt of one request.

        Raises RowError: empty_prompt, prompt_too_long, template_error, template_timeout, invalid_value, and what
        reading a document raises.
        """
        text = self._text(request)
        if request.continuation is not None:
            return self._scored(request, text, request.continuation)
        branches = self._branches(text, request.labels)
        reserved = self._max_tokens(request) + max((len(branch) for branch in branches), default=0)
        ids, num_removed = self._fit(text, self._encode(text), reserved)
        scored = (min(1, len(ids)), len(ids)) if request.task.reads == "scored" and not branches else (0, 0)
        return Prompt(ids, scored, branches, num_removed, request.task.decodes and self._opens_reasoning(ids))

    def sizes(self, requests: Iterable[Request]) -> list[RowSize | RowError]:
        """How long each prompt is, or why there is none."""
        return [size for _, size in self.stream_sizes(requests)]

    def stream_sizes(self, rows: Iterable[Request | Fault]) -> Iterator[tuple[Request | Fault, RowSize | RowError]]:
        """Each row with its size or its error, in order, in constant memory; a fault keeps its own error.

        The tokenizer counts a batch on all cores while the next rows are drawn and rendered.
        """
        with ThreadPoolExecutor(1, "tokenizer") as executor:
            counting: tuple[_Batch, Future[list[int]]] | None = None
            for batch in self._batches(rows):
                following = batch, executor.submit(self._count, batch)
                if counting is not None:
                    yield from self._measured(counting[0], counting[1].result())
                counting = following
            if counting is not None:
                yield from self._measured(counting[0], counting[1].result())

    # ------------------------------------------------------------------------------------------ lengths

    def _max_tokens(self, request: Request) -> int:
        """Most tokens that the request may sample."""
        if not request.task.decodes:
            return 0
        asked = request.sampling.max_tokens
        return self.default_max_tokens if asked is None else asked

    def _size(self, request: Request, prompt: Prompt) -> RowSize:
        branch_tokens = sum(len(branch) for branch in prompt.branches)
        return RowSize(request.row, request.sample, len(prompt.ids), self._max_tokens(request), branch_tokens)

    def _batches(self, rows: Iterable[Request | Fault]) -> Iterator[_Batch]:
        """Rendered rows in batches that bound the memory of the tokenizer's answer (some 100 bytes a token)."""
        batch = _Batch()
        for row in rows:
            self._add(batch, row)
            if batch.full:
                yield batch
                batch = _Batch()
        if batch.rows:
            yield batch

    def _add(self, batch: _Batch, request: Request | Fault) -> None:
        """Render a request for the tokenizer to count; one that needs care is built in full."""
        index = len(batch.rows)
        batch.rows.append(request)
        batch.results.append(None)
        if isinstance(request, Fault):
            batch.results[index] = request.error
            return
        try:
            text = None if request.labels or request.continuation is not None else self._text(request)
            if text is None or text.shielded:
                batch.results[index] = self._size(request, self.build(request))
            else:
                (batch.raws if text.add_special else batch.chats)[index] = text.text
                batch.num_chars += len(text.text)
        except RowError as error:
            batch.results[index] = error

    def _count(self, batch: _Batch) -> list[int]:
        """Tokens of each rendered text, those of raw prompts last."""
        counts: list[int] = []
        for texts, add_special in ((batch.chats, False), (batch.raws, True)):
            if texts:
                counts += map(len, self.tokenizer.encodings(list(texts.values()), add_special=add_special))
        return counts

    def _measured(self, batch: _Batch, counts: list[int]) -> Iterator[tuple[Request | Fault, RowSize | RowError]]:
        """A counted batch; a row that is empty or too long is built in full, to be cut or refused."""
        numbers = dict(zip((*batch.chats, *batch.raws), counts, strict=True))
        for i, (row, result) in enumerate(zip(batch.rows, batch.results, strict=True)):
            if result is None:
                assert isinstance(row, Request)
                result = self._counted(row, numbers[i])
            yield row, result

    def _counted(self, request: Request, num_tokens: int) -> RowSize | RowError:
        generated = self._max_tokens(request)
        if 0 < num_tokens <= self.max_length - generated:
            return RowSize(request.row, request.sample, num_tokens, generated)
        try:
            return self._size(request, self.build(request))
        except RowError as error:
            return error

    def _fit(self, text: _Text, encoding: Encoding, reserved: int) -> tuple[np.ndarray, int]:
        """Ids that leave room for `reserved` more, and how many were removed to make room."""
        ids = np.array(encoding.ids, dtype=np.int32)
        if not len(ids):
            raise RowError("empty_prompt", "the prompt has no tokens; give it some text")
        num_excess = len(ids) + reserved - self.max_length
        if num_excess <= 0:
            return ids, 0
        keep = None
        if self.overlong != "error" and reserved < self.max_length:
            span = text.cuttable_span
            keep = keep_tokens(self._encode(text, offsets=True), span, num_excess, self.overlong) if span else None
        if keep is None:
            raise self._too_long(len(ids), reserved)
        return ids[keep], len(ids) - int(keep.sum())

    def _opens_reasoning(self, ids: np.ndarray) -> bool:
        """Whether the template itself has begun the model's thinking, as some reasoning models' templates do."""
        return self.tokenizer.decode(ids[-8:].tolist(), skip_special=False).rstrip().endswith(THINK_START)

    def _too_long(self, num_tokens: int, reserved: int) -> RowError:
        room = f" and up to {reserved:,} more to come" if reserved else ""
        mend = "shorten it" if self.overlong != "error" else "shorten it, or use --overlong truncate-middle"
        if reserved:
            mend = f"lower max_tokens, {mend}"
        if self.overlong != "error":
            mend += " (its longest text alone is too short to make room)"
        message = f"the prompt has {num_tokens:,} tokens{room}, and the model takes {self.max_length:,}: {mend}"
        return RowError("prompt_too_long", message, field="max_tokens" if reserved >= self.max_length else None)

    # --------------------------------------------------------------------------------------------- text

    def _text(self, request: Request) -> _Text:
        """Render a request."""
        # What is scored or compared is the model's own turn, like an assistant's message.
        answers = (*request.labels, request.continuation or "")
        look_alike = any(self._guard.found(answer, special_only=True) for answer in answers if answer)
        if request.text is not None:
            return self._raw(request.text, look_alike)
        turns = [(message, self._content(message)) for message in request.messages]
        if self.template is None:
            return self._raw(_without_template(turns), look_alike)
        guard, arguments = self._guard, request.template_kwargs
        for message, content in turns:
            look_alike = look_alike or guard.found(content, special_only=message.role == "assistant")
        if arguments:
            look_alike = look_alike or any(guard.found(text) for text in strings_in(arguments))
        contents = tuple(content for _, content in turns)
        if not look_alike:
            chat = [_turn(message, content) for message, content in turns]
            rendered = self.template.render(chat, self.tokenizer.named | arguments)
            return _Text(rendered, False, False, contents)
        markers = guard.markers([*contents, *strings_in(arguments)])
        chat = [
            _turn(message, guard.mark(content, markers, special_only=message.role == "assistant"))
            for message, content in turns
        ]
        rendered = self.template.render(chat, self.tokenizer.named | mark_values(arguments, guard, markers))
        return _Text(guard.resolve(rendered, markers), True, False, contents)

    def _raw(self, text: str, look_alike: bool) -> _Text:
        """A prompt that no template touches; control tokens that are not special mean themselves in it."""
        if look_alike or self._guard.found(text, special_only=True):
            return _Text(self._guard.shield(text), True, True, (text,))
        return _Text(text, False, True, (text,))

    def _content(self, message: Message) -> str:
        """One message as one string, its documents read."""
        first = message.parts[0] if len(message.parts) == 1 else None
        if isinstance(first, str):
            return first
        return "".join(self._document(part) if isinstance(part, MediaRef) else part for part in message.parts)

    def _document(self, ref: MediaRef) -> str:
        if ref.kind != "document":
            message = f"this model reads text only, and the row has a part of kind {ref.kind}; leave the part out"
            raise RowError("unsupported_media", message, field=ref.field)
        try:
            return load_document(ref, self.document_root, MAX_DOCUMENT_BYTES)
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            # Documents are anybody's: what a reader of ours trips over costs the row, never the run.
            message = f"the document cannot be read ({type(error).__name__}); save it as plain text"
            raise RowError("undecodable_text", message, field=ref.field) from error

    # ----------------------------------------------------------------------------------------- encoding

    def _encode(self, text: _Text, *, offsets: bool = False) -> Encoding:
        """Encode a row's text; offsets into it are only filled in where they are asked for."""
        if text.shielded:
            return self._guard.encoding(text.text, add_special=text.add_special)
        if offsets:
            return self.tokenizer.backend.encode(text.text, add_special_tokens=text.add_special)
        return self.tokenizer.encodings([text.text], add_special=text.add_special)[0]

    def _extended(self, text: _Text, answer: str) -> _Text:
        """A text with an answer of the model's after it."""
        answer = self._guard.shield(answer) if text.shielded else answer
        return replace(text, text=text.text + answer)

    def _scored(self, request: Request, text: _Text, continuation: str) -> Prompt:
        """A prompt and the continuation whose tokens are scored. Both are encoded as one text, so that the tokens are
        those the model would have read; a token that reaches across the border belongs to the continuation."""
        if not continuation:
            raise RowError("invalid_value", "the continuation is empty; give it some text", field="continuation")
        num_prompt_chars = len(text.text)
        text = self._extended(text, continuation)
        encoding = self._encode(text, offsets=True)
        is_scored = np.fromiter((end > num_prompt_chars for _, end in encoding.offsets), bool, len(encoding))
        num_scored = int(is_scored.sum())
        ids, num_removed = self._fit(text, encoding, self._max_tokens(request))
        # Truncation only removes tokens of the prompt, so the distance from the end stays.
        start = int(is_scored.argmax()) - num_removed
        return Prompt(ids, (max(1, start), start + num_scored), (), num_removed)

    def _branches(self, text: _Text, labels: Sequence[str]) -> tuple[np.ndarray, ...]:
        """Token ids of each label as they continue the prompt.

        Only the part after the prompt's last control token is encoded again, for nothing before it can matter. Where
        a label's first token would swallow the prompt's last one, the label is encoded by itself.
        """
        if not labels:
            return ()
        start = self._guard.last_control(text.text, renamed=text.shielded)
        tail = replace(text, text=text.text[start:], add_special=text.add_special and start == 0)
        base = self._encode(tail).ids
        branches = []
        for i, label in enumerate(labels):
            joined = self._encode(self._extended(tail, label)).ids
            if joined[: len(base)] != base:
                alone = replace(tail, text="", add_special=False)
                joined = base + self._encode(self._extended(alone, label)).ids
            if len(joined) == len(base):
                raise RowError("invalid_value", "a label has no tokens; give it some text", field=f"labels[{i}]")
            branches.append(np.array(joined[len(base) :], dtype=np.int32))
        return tuple(branches)


def _turn(message: Message, content: str) -> dict[str, str]:
    """A message as templates read it."""
    if message.name is None:
        return {"role": message.role, "content": content}
    return {"role": message.role, "name": message.name, "content": content}


def _without_template(turns: Sequence[tuple[Message, str]]) -> str:
    """The raw prompt of a chat that needs no template: one user turn, perhaps after a system prompt."""
    roles = [message.role for message, _ in turns]
    if roles not in (["user"], ["system", "user"]):
        message = (
            "the model has no chat template, so a row can only be one user turn: "
            "add chat_template.jinja to the model folder, or send the row as a prompt"
        )
        raise RowError("template_error", message, field="messages")
    return "\n\n".join(content for _, content in turns)
