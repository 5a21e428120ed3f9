"""`longbatch bench job` on a GPU: 32 prompts of 8,192 tokens, 64 new tokens each, Llama-3.1-8B shapes, bf16.

The weights are random and the answers greedy. The real command runs on a model folder and a manifest; its own times
count, start-up apart. The limits are measured in the same run: the prefill's matrix products at their speed when
warm, and decode's reading of weights and K/V at the speed of a copy. The logits of one prompt and the answers of
some rows are checked against transformers in float32.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from longbatch.bench import llama
from longbatch.bench.limits import Limits, measure_limits
from longbatch.bench.llama import LlamaShape
from longbatch.bench.process import CommandRun, in_child, require_transformers, run_command, say, write_manifest
from longbatch.bench.reference import Reference, compare_model
from longbatch.bench.report import Measurement

DTYPE, DTYPE_BYTES = "bfloat16", 2
SEED = 20
TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the job is. num_runs: the command runs so often; the first may also compile kernels. probe_tokens:
    length of the prompt whose logits are compared. num_checked: rows whose answers are."""

    shape: LlamaShape = field(default_factory=LlamaShape)
    num_rows: int = 32
    prompt_tokens: int = 8192
    max_tokens: int = 64
    num_runs: int = 2
    probe_tokens: int = 2048
    num_checked: int = 2


def measure(sizes: Sizes | None = None, device_name: str = "cuda:0") -> list[Measurement]:
    """Run the command, the limits and the comparison, each in its own process. device_name: `cuda:0` or `cpu`."""
    require_transformers()
    sizes = sizes or Sizes()
    shape = sizes.shape
    prompts = llama.make_prompts(shape, sizes.num_rows, sizes.prompt_tokens, SEED)
    with tempfile.TemporaryDirectory(prefix="longbatch-bench-") as name:
        model, manifest = Path(name, "model"), Path(name, "manifest.jsonl")
        say(f"random weights into {model}")
        in_child(llama.write_model, model, shape, device_name, SEED)
        write_manifest([{"prompt": llama.words(ids)} for ids in prompts], manifest)
        runs = []
        for number in range(sizes.num_runs):
            say(f"longbatch, run {number + 1} of {sizes.num_runs}")
            runs.append(run_command(manifest, Path(name, f"out-{number}"), _flags(model, sizes, device_name), ["text"]))
        say("limits")
        limits = in_child(measure_limits, shape.products(), sizes.num_rows * sizes.prompt_tokens, device_name, DTYPE)
        say("transformers with the same weights")
        answers = [llama.ids_of(row["text"]) for row in runs[-1].results]
        probe = llama.make_prompts(shape, 1, sizes.probe_tokens, SEED + 1)[0]
        some = slice(sizes.num_checked)
        reference = in_child(compare_model, model, device_name, DTYPE, probe, prompts[some], answers[some])
    full = all(len(ids) == sizes.max_tokens for ids in answers)
    return [
        *_speeds(runs, limits, sizes, full and reference.logits_hold and reference.answers_hold),
        *_checks(reference, sizes),
    ]


def prefill_bound(limits: Limits, sizes: Sizes) -> float:
    """Seconds of the prefill's matrix products alone, attention and all else left out. The last layer needs only K
    and V, but for one position a row."""
    shape = sizes.shape
    kv_share = 2 * shape.num_kv_heads / (shape.num_heads + 2 * shape.num_kv_heads)
    layers = (shape.num_layers - 1) * sum(limits.gemm_seconds) + kv_share * limits.gemm_seconds[0]
    return layers * sizes.num_rows * sizes.prompt_tokens / limits.rows


def decode_bound(limits: Limits, sizes: Sizes) -> float:
    """Seconds of reading weights and K/V for every token after the first, all rows together."""
    num_steps = sizes.max_tokens - 1
    cached = sizes.num_rows * (num_steps * sizes.prompt_tokens + num_steps * (num_steps + 1) // 2)
    numbers = num_steps * sizes.shape.num_read_in_decode + cached * sizes.shape.num_kv_per_token
    return numbers * DTYPE_BYTES / limits.bandwidth


def _flags(model: Path, sizes: Sizes, device_name: str) -> list[str]:
    flags = ["--model", str(model), "--gpus", "0" if device_name == "cpu" else "1", "--dtype", DTYPE]
    return [*flags, "--prompt-format", "raw", "--max-tokens", str(sizes.max_tokens)]


def _speeds(runs: list[CommandRun], limits: Limits, sizes: Sizes, checked: bool) -> list[Measurement]:
    prefill, decode = prefill_bound(limits, sizes), decode_bound(limits, sizes)
    num_prompt, num_new = sizes.num_rows * sizes.prompt_tokens, sizes.num_rows * (sizes.max_tokens - 1)
    flops = 2 * limits.rows * sum(a * b for a, b in sizes.shape.products())
    products, reads, both = "GEMM bound", "bandwidth bound", "GEMM and bandwidth bound"
    rows = [
        Measurement(products, "prefill", prefill, "s", None, None, True),
        Measurement(products, "matrix products", flops / sum(limits.gemm_seconds) / 1e12, "TFLOP/s", None, None, True),
        Measurement(reads, "decode", decode, "s", None, None, True),
        Measurement(reads, "copy", limits.bandwidth / 1e12, "TB/s", None, None, True),
    ]
    for number, run in enumerate(runs, 1):
        case, work = f"longbatch, run {number}", run.work
        seconds, read, written = work["seconds"], work["prefill_seconds"], work["decode_seconds"]
        ratio = (prefill + decode) / seconds
        rows += [
            Measurement(case, "job", seconds, "s", both, ratio, checked),
            Measurement(case, "job throughput", run.tokens / seconds, "tokens/s", both, ratio, checked),
            Measurement(case, "prefill", read, "s", products, prefill / read, checked),
            Measurement(case, "prefill throughput", num_prompt / read, "tokens/s", products, prefill / read, checked),
            Measurement(case, "decode", written, "s", reads, decode / written, checked),
            Measurement(case, "decode throughput", num_new / written, "tokens/s", reads, decode / written, checked),
            Measurement(case, "start-up", run.startup_seconds, "s", None, None, checked),
            Measurement(case, "whole command", run.total_seconds, "s", None, None, checked),
        ]
    return rows


def _checks(found: Reference, sizes: Sizes) -> list[Measurement]:
    own, exact = f"{TRANSFORMERS}, {DTYPE}", f"{TRANSFORMERS}, float32"
    logits, answers, case = found.logits_hold, found.answers_hold, "longbatch"
    prefix = sum(found.prefixes) / len(found.prefixes)
    # transformers in float32 against itself: nothing to divide by.
    ratio = found.error / found.own_error if found.own_error else None
    return [
        Measurement(own, "logit error", found.own_error, "relative RMS", exact, None, True),
        Measurement(case, "logit error", found.error, "relative RMS", own, ratio, logits),
        Measurement(own, "same best token", found.own_agreement, "share", exact, None, True),
        Measurement(case, "same best token", found.agreement, "share", exact, found.agreement, logits),
        Measurement(case, "answer until it differs", prefix, "tokens", own, prefix / sizes.max_tokens, answers),
        Measurement(case, "answer tokens ranked first", found.exact, "share", exact, found.exact, answers),
        Measurement(case, "worst answer token", found.gap, "logit errors", exact, None, answers),
    ]
