"""`longbatch bench job`: a whole job, from manifest to Parquet, beside transformers answering the same rows.

64 rows of 100 to 6,000 tokens (log-uniform), 32 tokens each, greedy, float32, the small default model, on the
device that `longbatch run` would take. The rival is `generate` of transformers with the rows sorted by length, in
batches of 1, 4 and 16; its fastest counts. Its time leaves out loading the model; longbatch's time is that of the
whole command's work, loading, reading and writing included. Answers are checked against those of batch 1.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longbatch.bench.report import Measurement
from longbatch.config import Settings
from longbatch.device import detect
from longbatch.errors import UsageError

NUM_ROWS = 64
SHORTEST, LONGEST = 100, 6000
MAX_TOKENS = 32
BATCH_SIZES = (1, 4, 16)
SEED = 20
WORDS = [
    "river",
    "stone",
    "harbour",
    "winter",
    "letter",
    "garden",
    "engine",
    "market",
    "teacher",
    "silver",
    "mountain",
    "answer",
    "village",
    "candle",
    "bridge",
    "doctor",
    "window",
    "summer",
    "journey",
    "captain",
    "forest",
    "number",
    "picture",
    "station",
    "island",
    "question",
    "morning",
    "shadow",
    "music",
    "paper",
    "slowly",
    "quietly",
    "always",
    "never",
    "under",
    "above",
    "between",
    "through",
    "carried",
    "opened",
    "found",
    "wrote",
    "remembered",
    "followed",
    "watched",
    "the",
    "a",
    "an",
    "of",
    "in",
    "and",
    "that",
    "with",
    "for",
    "was",
    "had",
    "were",
    "they",
    "she",
    "he",
    "it",
    "from",
    "by",
    "on",
    "at",
]


@dataclass(frozen=True, slots=True)
class Timed:
    """One way of answering all rows. texts: by row. tokens: prompt tokens and generated ones."""

    seconds: float
    texts: list[str]
    tokens: int

    @property
    def rate(self) -> float:
        """Tokens per second, read and written."""
        return self.tokens / self.seconds


def measure(
    num_rows: int = NUM_ROWS, longest: int = LONGEST, batch_sizes: Sequence[int] = BATCH_SIZES
) -> list[Measurement]:
    """Run longbatch and the rival. Raises UsageError where transformers is missing."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise UsageError("the rival, transformers, is not installed", hint="pip install 'longbatch[hub]'") from None
    import torch

    from longbatch.models.bundled import sample_weights

    model_dir = sample_weights(_say)
    info = detect("auto")[0]
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    prompts = make_prompts(lambda text: len(tokenizer(text).input_ids), num_rows, longest)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).to(info.torch_name)
    rivals = {}
    for size in batch_sizes:
        _say(f"transformers, batches of {size}")
        rivals[size] = run_rival(model, tokenizer, prompts, size)
    del model
    _say("longbatch")
    ours = run_longbatch(model_dir, info.torch_name, prompts)
    return compare(ours, rivals)


def make_prompts(count_tokens: Callable[[str], int], num_rows: int, longest: int) -> list[str]:
    """Prompts of made-up sentences whose lengths are log-uniform between SHORTEST and `longest` tokens."""
    chance = random.Random(SEED)
    prompts = []
    for row in range(num_rows):
        wanted = SHORTEST * (longest / SHORTEST) ** (row / max(num_rows - 1, 1))
        text = "Continue this story."
        while (length := count_tokens(text)) < wanted - 40:  # the chat template adds about 30
            num_sentences = max(1, int((wanted - 40 - length) / 16))
            text += "".join(_sentence(chance) for _ in range(num_sentences))
        prompts.append(text)
    chance.shuffle(prompts)
    return prompts


def run_rival(model: Any, tokenizer: Any, prompts: Sequence[str], batch_size: int) -> Timed:
    """`generate` over the prompts, longest first, in batches padded on the left."""
    import torch

    def answer(rows: Sequence[int]) -> tuple[list[str], int]:
        chats = [[{"role": "user", "content": prompts[row]}] for row in rows]
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
        new = ids[:, inputs.input_ids.shape[1] :]
        written = int((new != tokenizer.pad_token_id).sum())
        return tokenizer.batch_decode(new, skip_special_tokens=True), int(inputs.attention_mask.sum()) + written

    order = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
    answer(order[-1:])  # warm up on the shortest
    answers, tokens = [""] * len(prompts), 0
    start = time.monotonic()
    for first in range(0, len(order), batch_size):
        rows = order[first : first + batch_size]
        texts, num_tokens = answer(rows)
        tokens += num_tokens
        for row, text in zip(rows, texts, strict=True):
            answers[row] = text
    return Timed(time.monotonic() - start, answers, tokens)


def run_longbatch(model_dir: Path, device_name: str, prompts: Sequence[str]) -> Timed:
    """The job through `longbatch.run`, manifest to merged Parquet."""
    import pyarrow.parquet as pq

    from longbatch.run import execute

    with tempfile.TemporaryDirectory(prefix="longbatch-bench-") as folder:
        manifest, out = Path(folder, "manifest.jsonl"), Path(folder, "out")
        manifest.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        settings = Settings(
            model=str(model_dir),
            out=out,
            dtype="float32",
            gpus="0" if device_name == "cpu" else "1",
            max_tokens=MAX_TOKENS,
            quiet=True,
        )
        start = time.monotonic()
        execute(settings, [str(manifest)])
        seconds = time.monotonic() - start
        table = pq.read_table(out / "results", columns=["text", "usage"]).to_pylist()
    tokens = sum(row["usage"]["prompt_tokens"] + row["usage"]["completion_tokens"] for row in table)
    return Timed(seconds, [row["text"] or "" for row in table], tokens)


def compare(ours: Timed, rivals: dict[int, Timed]) -> list[Measurement]:
    """The table: every batch size, then longbatch against the fastest of them."""
    reference = rivals[min(rivals)].texts
    rows = [
        Measurement(f"transformers, batch {size}", "throughput", timed.rate, "tokens/s", None, None, True)
        for size, timed in rivals.items()
    ]
    fastest = max(rivals, key=lambda size: rivals[size].rate)
    equal = sum(text == other for text, other in zip(ours.texts, reference, strict=True))
    checked = equal == len(reference)
    against, ratio = f"transformers, batch {fastest}", ours.rate / rivals[fastest].rate
    rows.append(Measurement("longbatch", "throughput", ours.rate, "tokens/s", against, ratio, checked))
    rows.append(Measurement("longbatch", "equal answers", equal, "rows", against, equal / len(reference), checked))
    return rows


def _sentence(chance: random.Random) -> str:
    words = [chance.choice(WORDS) for _ in range(chance.randint(8, 18))]
    return f" {words[0].capitalize()} {' '.join(words[1:])}."


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
