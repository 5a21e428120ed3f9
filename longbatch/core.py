"""The nouns that flow through a run, in the order in which they appear.

    manifest -> Request -> Prompt, RowSize -> Plan of Waves -> (engine) -> Result -> Parquet

Fields are grouped by who sets them. Nothing here imports torch, transformers or pyarrow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from longbatch.errors import RowError

# --------------------------------------------------------------------------------------------- rows in


@dataclass(frozen=True, slots=True)
class Task:
    """What a task needs from the engine; the engine executes this table and knows no task by name.

    reads: positions whose hidden state is needed after the last layer: `last` (one), `scored` (a range of
    tokens) or `all`. decodes: whether tokens are sampled.
    branches: whether the row runs several continuations of one prompt.
    """

    name: str
    reads: str
    decodes: bool
    branches: bool


TASKS: dict[str, Task] = {
    "generate": Task("generate", reads="last", decodes=True, branches=False),
    "score": Task("score", reads="scored", decodes=False, branches=False),
    "embed": Task("embed", reads="all", decodes=False, branches=False),
    "classify": Task("classify", reads="scored", decodes=False, branches=True),
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. Set by the manifest reader from the row, else from the run's defaults.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0 and repetition_penalty 1 do nothing. seed None derives
    one from (run seed, id, sample). logprobs: None for none, else how many alternatives are reported beside
    the chosen token (0 reports only the chosen one). max_tokens None takes the run's default.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class MediaRef:
    """One image, video, audio or document named by a row. kind is `document` for text files; exactly one of
    path and data is set; `field` is the manifest field that named it."""

    kind: str
    path: str | None
    data: bytes | None
    field: str


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn. parts holds text and media in the order in which the model sees them."""

    role: str
    parts: tuple[str | MediaRef, ...]
    name: str | None = None


class Location(NamedTuple):
    """Where a row stands in the manifest, so that it can be read again alone.

    source: index of the file in the manifest's list. offset: byte offset of the line (JSONL), or row number
    inside the file (Parquet, text files). length: bytes of the line, or 0.
    """

    source: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Request:
    """One row of the manifest, checked and in one form whatever its dialect was. Set by `longbatch.manifest`.

    row: number of the manifest row from 0, counting over all files. sample: 0..n-1 when a row asks for
    several answers. messages: a chat, or one user turn. text: set instead of messages for a raw completion
    prompt. continuation: for `score`, the text whose tokens are scored (None: every prompt token).
    labels: for `classify`. pooling: for `embed`, `last` or `mean`. carried: kept columns.
    fingerprint: 16 bytes, blake2b over everything in the row that can change its answer.
    """

    row: int
    id: str | None
    location: Location
    task: Task
    sampling: Sampling
    messages: tuple[Message, ...] = ()
    text: str | None = None
    sample: int = 0
    continuation: str | None = None
    labels: tuple[str, ...] = ()
    pooling: str = "last"
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    carried: dict[str, Any] = field(default_factory=dict)
    fingerprint: bytes = b""

    @property
    def key(self) -> RowKey:
        """What identifies the answer: the id, or the row number when the row has none; and the sample."""
        return RowKey(self.id, self.row if self.id is None else None, self.sample)


class RowKey(NamedTuple):
    """Identity of one answer. id and row number are kept apart: the id "7" is not row 7."""

    id: str | None
    row: int | None
    sample: int


@dataclass(frozen=True, slots=True)
class Fault:
    """A row that cannot become a `Request`. Set by `longbatch.manifest`; becomes an error result."""

    row: int
    id: str | None
    location: Location
    error: RowError
    carried: dict[str, Any] = field(default_factory=dict)
    fingerprint: bytes = b""

    @property
    def key(self) -> RowKey:
        return RowKey(self.id, self.row if self.id is None else None, 0)


# --------------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model reads for one request. Set by `longbatch.prompt`.

    ids: int32 [T]. scored: half-open range of token positions whose log-probability is wanted (`score`).
    branches: token ids of each label (`classify`), each to be continued from the whole of `ids`.
    truncated: tokens removed by `--overlong`. opens_reasoning: whether the prompt ends inside the model's thinking.
    reserved: tokens that might have followed an answer that is already part of `ids`; scaled rotary embeddings go by
    the whole length.
    """

    ids: np.ndarray
    scored: tuple[int, int] = (0, 0)
    branches: tuple[np.ndarray, ...] = ()
    truncated: int = 0
    opens_reasoning: bool = False
    reserved: int = 0


class RowSize(NamedTuple):
    """What the plan keeps of a row. prompt: tokens read. generated: most tokens that may be sampled.
    branch_tokens: tokens of all branches together."""

    row: int
    sample: int
    prompt: int
    generated: int
    branch_tokens: int = 0


# --------------------------------------------------------------------------------------------- results


@dataclass(slots=True)
class Usage:
    """Tokens and device time of one row. gpu_seconds: the row's share of busy device time, by work."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    image_tokens: int = 0
    video_tokens: int = 0
    audio_tokens: int = 0
    gpu_seconds: float = 0.0


@dataclass(slots=True)
class Timing:
    """Seconds of wall time; None where a phase did not happen.

    queued: from the run's start until the row's first work. ttft: from that first work to the first token.
    total: from that first work until the result was complete.
    """

    queued: float | None = None
    fetch: float | None = None
    load: float | None = None
    tokenize: float | None = None
    encode: float | None = None
    prefill: float | None = None
    ttft: float | None = None
    decode: float | None = None
    total: float | None = None


@dataclass(slots=True)
class TokenLogprob:
    """Natural-log probability of one token. top: the most likely alternatives as (id, text, logprob)."""

    id: int
    token: str
    logprob: float | None
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(slots=True)
class Result:
    """The answer to one request, or the reason why there is none. One row of the output.

    Set by the engine: status, text, label, embedding, logprobs, finish_reason, usage, timing, error, notes, attention.
    Set by the run: placement fields, attempt, carried. notes: what was done otherwise than planned, in order.

    attention_mode: `dense` or `sparse`. attention_density: pairs of query and key that prefill computed, as a share of
    all causal pairs, over the heads of layers without a window. attention_patterns: `NUMBER PATTERN`, how many of those
    heads ran which pattern; for sparse rows. attention_gap: where measured, the mean distance of a token's
    log-probability from that under dense attention, in nats.
    """

    key: RowKey
    row: int
    status: str = "ok"
    text: str | None = None
    reasoning: str | None = None
    label: str | None = None
    embedding: np.ndarray | None = None
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    error: RowError | None = None
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    attention_mode: str | None = None
    attention_density: float | None = None
    attention_patterns: tuple[str, ...] | None = None
    attention_gap: float | None = None
    wave: int | None = None
    width: int | None = None
    notes: list[str] = field(default_factory=list)
    attempt: int = 1
    carried: dict[str, Any] = field(default_factory=dict)
    fingerprint: bytes = b""

    @classmethod
    def failed(cls, source: Request | Fault, error: RowError) -> Result:
        """The error row for a request or a fault."""
        return cls(
            key=source.key,
            row=source.row,
            status="error",
            error=error,
            carried=source.carried,
            fingerprint=source.fingerprint,
        )
