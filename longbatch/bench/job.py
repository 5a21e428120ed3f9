"""`longbatch bench job`: a whole job through the real command, beside transformers answering the same rows.

64 rows of 100 to 6,000 tokens (log-uniform), 64 new tokens each, greedy, float32, the small default model, on the
CPU; with a GPU the job of `job_gpu` takes its place. The rival is transformers' `generate` in batches of 1, 4 and 16,
rows sorted by length and padded on the left, with as many threads; its fastest counts. Neither time holds loading
the model; that of longbatch holds reading rows, tokenizing and writing results. Answers are compared token by token
with those of batch 1.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longbatch import device
from longbatch.bench.process import CommandRun, in_child, require_transformers, run_command, say, write_manifest
from longbatch.bench.report import Measurement
from longbatch.bench.texts import Prose, chat_text

SEED = 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the job is; lengths in tokens of the whole chat prompt."""

    num_rows: int = 64
    shortest: int = 100
    longest: int = 6000
    max_tokens: int = 64
    batch_sizes: tuple[int, ...] = (1, 4, 16)


@dataclass(frozen=True, slots=True)
class Answers:
    """One way of answering all rows. tokens: the answers, by row. num_tokens: read and generated."""

    seconds: float
    tokens: list[list[int]]
    num_tokens: int

    @property
    def rate(self) -> float:
        """Tokens per second, read and generated."""
        return self.num_tokens / self.seconds


def measure(sizes: Sizes | None = None) -> list[Measurement]:
    """Run longbatch and the rival; `sizes` given: always on the CPU. Raises UsageError where transformers is
    missing."""
    require_transformers()
    if sizes is None and device.gpu_infos():
        from longbatch.bench import job_gpu

        return job_gpu.measure()
    from longbatch.models.bundled import sample_weights

    sizes = sizes or Sizes()
    model_dir, threads = sample_weights(say), device.usable_cores()
    prompts = in_child(make_prompts, model_dir, sizes)
    rivals = in_child(run_rival, model_dir, prompts, sizes, threads)
    say("longbatch")
    command = run_longbatch(model_dir, prompts, sizes, threads)
    return compare(command, rivals)


def make_prompts(model_dir: Path, sizes: Sizes) -> list[str]:
    """Prompts whose lengths are evenly spread between the shortest and the longest on a logarithmic scale."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    instruction = "Say in a few sentences what this text is about.\n\n"

    def count_tokens(text: str) -> int:
        return len(tokenizer(chat_text(tokenizer, instruction + text)).input_ids)

    prose, growth = Prose(SEED), sizes.longest / sizes.shortest
    prompts = []
    for row in range(sizes.num_rows):
        wanted = int(sizes.shortest * growth ** (row / max(sizes.num_rows - 1, 1)))
        prompts.append(instruction + prose.tokens(wanted, count_tokens))
    random.Random(SEED).shuffle(prompts)
    return prompts


def run_rival(model_dir: Path, prompts: Sequence[str], sizes: Sizes, threads: int) -> dict[int, Answers]:
    """`generate` over the prompts, longest first, by batch size."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    eos = model.generation_config.eos_token_id
    eos_ids = set(eos) if isinstance(eos, list) else {eos}

    def answer(texts: list[str]) -> tuple[list[list[int]], int]:
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=sizes.max_tokens, do_sample=False)
        answers = [_until_eos(row, eos_ids) for row in ids[:, inputs.input_ids.shape[1] :].tolist()]
        return answers, int(inputs.attention_mask.sum()) + sum(map(len, answers))

    texts = [chat_text(tokenizer, prompt) for prompt in prompts]
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False).input_ids]
    order = sorted(range(len(texts)), key=lambda row: -lengths[row])
    answer([texts[order[-1]]])  # warm up on the shortest
    found = {}
    for size in sizes.batch_sizes:
        say(f"transformers, batches of {size}")
        found[size] = _timed(answer, texts, order, size)
    return found


def run_longbatch(model_dir: Path, prompts: Sequence[str], sizes: Sizes, threads: int) -> CommandRun:
    """The job through the command, manifest to merged Parquet. It is asked for log-probabilities, because they come
    with the ids of the tokens generated."""
    flags = ["--model", str(model_dir), "--gpus", "0", "--dtype", "float32", "--threads", str(threads)]
    flags += ["--max-tokens", str(sizes.max_tokens)]
    with tempfile.TemporaryDirectory(prefix="longbatch-bench-") as folder:
        manifest = Path(folder, "manifest.jsonl")
        write_manifest([{"prompt": prompt, "logprobs": 0} for prompt in prompts], manifest)
        return run_command(manifest, Path(folder, "out"), flags, ["logprobs"])


def compare(command: CommandRun, rivals: dict[int, Answers]) -> list[Measurement]:
    """The table: every batch size, then longbatch against the fastest of them."""
    reference = rivals[min(rivals)].tokens
    num_rows = len(reference)

    def equal(tokens: list[list[int]]) -> int:
        return sum(answer == other for answer, other in zip(tokens, reference, strict=True))

    fastest = max(rivals, key=lambda size: rivals[size].rate)
    rows = []
    for size, answers in rivals.items():
        checked = equal(answers.tokens) == num_rows
        rows.append(
            Measurement(f"transformers, batch {size}", "throughput", answers.rate, "tokens/s", None, None, checked)
        )
    tokens = [[entry["id"] for entry in row["logprobs"] or []] for row in command.results]
    num_equal = equal(tokens)
    against, best, checked = f"transformers, batch {fastest}", rivals[fastest].rate, num_equal == num_rows
    rate = command.tokens / command.work["seconds"]
    whole = command.tokens / command.total_seconds
    case = "longbatch"
    return [
        *rows,
        Measurement(case, "throughput", rate, "tokens/s", against, rate / best, checked),
        Measurement(case, "throughput, whole command", whole, "tokens/s", against, whole / best, checked),
        Measurement(case, "rows equal", num_equal, "rows", "transformers, batch 1", num_equal / num_rows, checked),
        Measurement(case, "start-up", command.startup_seconds, "s", None, None, checked),
    ]


def _timed(
    answer: Callable[[list[str]], tuple[list[list[int]], int]], texts: Sequence[str], order: Sequence[int], size: int
) -> Answers:
    tokens: list[list[int]] = [[] for _ in texts]
    num_tokens, start = 0, time.monotonic()
    for first in range(0, len(order), size):
        rows = order[first : first + size]
        answers, count = answer([texts[row] for row in rows])
        num_tokens += count
        for row, ids in zip(rows, answers, strict=True):
            tokens[row] = ids
    return Answers(time.monotonic() - start, tokens, num_tokens)


def _until_eos(ids: list[int], eos_ids: set[int]) -> list[int]:
    """The answer without the padding that follows its end token."""
    for at, token in enumerate(ids):
        if token in eos_ids:
            return ids[: at + 1]
    return ids
