"""`longbatch bench manifest`: a million short rows, and 2 GB of documents of 200 KB, through `validate` and `plan`.

Each runs in a process of its own, whose peak of resident memory is read at its end. The limit for `validate` is
reading and parsing the same lines and nothing else; for `plan` it is the tokenizer itself: the share of the time in
which it is at work. Rows and tokens found are compared with those written and with transformers' counts.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longbatch.bench.process import in_child, peak_bytes, require_transformers, say
from longbatch.bench.report import Measurement
from longbatch.bench.texts import Prose, chat_text

SEED = 20
MAX_LENGTH = 131_072


@dataclass(frozen=True, slots=True)
class Sizes:
    """One manifest. num_texts: different prompts among its rows. characters: their shortest and longest."""

    name: str
    num_rows: int
    num_texts: int
    characters: tuple[int, int]


SIZES = (
    Sizes("short rows", 1_000_000, 10_000, (80, 400)),
    Sizes("200 KB documents", 10_000, 50, (200_000, 200_000)),
)


@dataclass(frozen=True, slots=True)
class Observed:
    """What a child process did. num_tokens and tokenizer_seconds: 0 where nothing is tokenized."""

    seconds: float
    peak_bytes: int
    num_rows: int
    num_tokens: int = 0
    tokenizer_seconds: float = 0.0


def measure(sizes: Sequence[Sizes] = SIZES) -> Iterator[Measurement]:
    """Both commands on each manifest. Needs some 2.5 GB in the folder for temporary files. Raises UsageError where
    transformers is missing."""
    from longbatch.models.bundled import sample_weights

    require_transformers()
    with tempfile.TemporaryDirectory(prefix="longbatch-bench-") as folder:
        model_dir = long_model(sample_weights(say), Path(folder, "model"))
        for each in sizes:
            manifest = Path(folder, "manifest.jsonl")
            say(f"{each.name}: writing {each.num_rows:,} rows")
            num_tokens = in_child(write_rows, manifest, each, model_dir)
            parsing = in_child(parse, manifest)
            say(f"{each.name}: validate")
            validating = in_child(validate, manifest)
            say(f"{each.name}: plan")
            planning = in_child(plan, manifest, model_dir)
            yield from compare(each, parsing, validating, planning, num_tokens)


def long_model(model_dir: Path, folder: Path) -> Path:
    """The model again, with a context long enough for the documents; planning reads no weights."""
    folder.mkdir()
    for path in model_dir.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((model_dir / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": MAX_LENGTH}))
    return folder


def write_rows(manifest: Path, sizes: Sizes, model_dir: Path) -> int:
    """Write the manifest; the tokens of all its prompts, counted by transformers."""
    from transformers import AutoTokenizer

    prose = Prose(SEED)
    texts = [prose.characters(prose.chance.randint(*sizes.characters)) for _ in range(sizes.num_texts)]
    with manifest.open("w", encoding="utf-8") as file:
        for row in range(sizes.num_rows):
            file.write(json.dumps({"id": f"row-{row}", "prompt": texts[row % len(texts)]}) + "\n")
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    counts = [len(tokenizer(chat_text(tokenizer, text), add_special_tokens=False).input_ids) for text in texts]
    whole, rest = divmod(sizes.num_rows, len(texts))
    return whole * sum(counts) + sum(counts[:rest])


def parse(manifest: Path) -> Observed:
    """The limit of reading a manifest: its lines as JSON values, one after the other."""
    import orjson

    start, num_rows = time.monotonic(), 0
    with manifest.open("rb") as file:
        for line in file:
            orjson.loads(line)
            num_rows += 1
    return Observed(time.monotonic() - start, peak_bytes(), num_rows)


def validate(manifest: Path) -> Observed:
    """The work of `longbatch validate`."""
    from longbatch.manifest import Manifest, ManifestOptions
    from longbatch.manifest import validate as report_faults

    start = time.monotonic()
    report = report_faults(Manifest.open([str(manifest)], ManifestOptions()))
    return Observed(time.monotonic() - start, peak_bytes(), report.num_ok)


def plan(manifest: Path, model_dir: Path) -> Observed:
    """The work of `longbatch plan`, with a clock around the tokenizer."""
    from longbatch.config import Settings
    from longbatch.prompt import Tokenizer
    from longbatch.run import make_plan

    inside = 0.0

    def clocked(encodings: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            start = time.monotonic()
            try:
                return encodings(*args, **kwargs)
            finally:
                inside += time.monotonic() - start

        return timed

    Tokenizer.encodings = clocked(Tokenizer.encodings)  # type: ignore[method-assign]
    settings = Settings(model=str(model_dir), gpus="0", max_tokens=64)
    start = time.monotonic()
    totals = make_plan(settings, [str(manifest)]).plan.totals
    return Observed(time.monotonic() - start, peak_bytes(), totals.num_rows, totals.prompt_tokens, inside)


def compare(
    sizes: Sizes, parsing: Observed, validating: Observed, planning: Observed, num_tokens: int
) -> list[Measurement]:
    """The table of one manifest."""
    num_rows = sizes.num_rows
    validated = validating.num_rows == num_rows
    planned = (planning.num_rows, planning.num_tokens) == (num_rows, num_tokens)
    parser, tokenizer = "parsing the lines", "the tokenizer alone"
    share = planning.tokenizer_seconds / planning.seconds

    def rate(observed: Observed) -> float:
        return num_rows / observed.seconds

    def memory(case: str, observed: Observed, checked: bool) -> Measurement:
        return Measurement(case, "peak memory", observed.peak_bytes / 1e6, "MB", None, None, checked)

    limit, first, second = (f"{name}, {sizes.name}" for name in ("parsing", "validate", "plan"))
    return [
        Measurement(limit, "speed", rate(parsing), "rows/s", None, None, parsing.num_rows == num_rows),
        Measurement(
            first, "speed", rate(validating), "rows/s", parser, parsing.seconds / validating.seconds, validated
        ),
        memory(first, validating, validated),
        Measurement(second, "speed", rate(planning), "rows/s", tokenizer, share, planned),
        Measurement(second, "time in the tokenizer", share, "share", tokenizer, share, planned),
        memory(second, planning, planned),
    ]
