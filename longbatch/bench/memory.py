"""`longbatch bench memory`: the peak of device memory that the plan predicts for a wave, beside the one measured.

Waves run through the engine, prefill and a few tokens of decode, with random weights and a cache that holds them and no
more. They differ in model, lengths, chunks, attention (dense, or vertical-slash heads with MInference's published
budgets), and in how weights and K/V are stored. The measured peak is the allocator's; on a CPU that of all tensors. It
is compared as a whole, and without weights and pages, which are known to the byte.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from longbatch import models
from longbatch.bench import llama, vs_workload
from longbatch.bench.live_bytes import watched
from longbatch.bench.prefill import chosen_kernels
from longbatch.bench.process import say
from longbatch.bench.report import Measurement
from longbatch.cache import PAGE_TOKENS, KVCache
from longbatch.cache.pages import pages_for
from longbatch.config.kv_formats import kv_format
from longbatch.core import TASKS, Location, Prompt, Request, Result, Sampling
from longbatch.engine import Engine, EngineAttention, EngineLimits
from longbatch.errors import DeviceError
from longbatch.models.fp8 import has_kernels
from longbatch.models.spec import ModelSpec
from longbatch.plan.layer_memory import Formats
from longbatch.plan.peak import Peak, Work, predict
from longbatch.plan.weights import weights_place
from longbatch.prompt import Tokenizer
from longbatch.report.units import bytes_text
from longbatch.sparsity import LayerPatterns, PatternSpec

SEED = 20
TILE_ROWS = 8192
NEW_TOKENS = 4
# How far the measured peak may be from the predicted one.
MOST_ERROR = 0.05
GIB = 2**30
K = 1024
PREDICTED = "predicted"
KNOWN, KNOWN_NAME = ("weights", "K/V pages", "open K/V blocks"), "weights and pages"


@dataclass(frozen=True, slots=True)
class Case:
    """A model and a wave. shape: of `llama.SHAPES`. lengths: tokens of each row. weights_dtype, kv_dtype, weights: as
    in `Settings`. chunk: most tokens of a step, None for all. sparse: whether the rows run sparse. task: of the rows.
    """

    shape: str
    lengths: tuple[int, ...]
    weights_dtype: str = "auto"
    kv_dtype: str = "auto"
    chunk: int | None = None
    sparse: bool = False
    task: str = "generate"
    weights: str = "resident"

    @property
    def name(self) -> str:
        """For the table."""
        count, longest = len(self.lengths), max(self.lengths)
        rows = f"{longest:,} tokens" if count == 1 else f"{count:,} rows of {longest:,} tokens"
        chunk = f" in chunks of {self.chunk:,}" if self.chunk else ""
        attention = "sparse" if self.sparse else "dense"
        formats = f"weights {self.weights_dtype} {self.weights}, K/V {self.kv_dtype}"
        return f"{self.shape}, {self.task}, {rows}{chunk}, {attention}, {formats}"


CASES = (
    Case("smollm2-135m", (8 * K,)),
    Case("smollm2-135m", (128 * K,), kv_dtype="fp8"),
    Case("smollm2-135m", (512,) * 256),
    Case("smollm2-135m", (64 * K,), task="embed"),
    Case("llama-3.1-8b", (8 * K,)),
    Case("llama-3.1-8b", (32 * K,), "fp8"),
    Case("llama-3.1-8b", (128 * K,)),
    Case("llama-3.1-8b", (128 * K,), "fp8", "fp8", chunk=32 * K),
    Case("llama-3.1-8b", (64 * K,), weights="host"),
    Case("llama-3.1-8b", (2 * K,) * 128, kv_dtype="fp8"),
    Case("llama-3.1-8b", (256,) * 256, "fp8"),
    Case("llama-3.1-8b", (256 * K,), sparse=True),
    Case("llama-3.1-8b", (512 * K,), "fp8", "fp8", sparse=True),
    Case("llama-3.1-8b", (512 * K,), "auto", "fp8", chunk=128 * K, sparse=True),
    Case("qwen2.5-7b", (32 * K,)),
    Case("qwen2.5-7b", (128 * K,), "fp8"),
    Case("qwen2.5-7b", (256 * K,), "auto", "auto", chunk=64 * K, sparse=True),
    Case("qwen2.5-7b", (512 * K,), "fp8", "fp8", sparse=True),
    Case("qwen2.5-7b", (8 * K,) * 16, "auto", "fp8"),
)


def measure(*, quick: bool = False) -> Iterator[Measurement]:
    """Every case. quick: those of the smallest model alone. Raises DeviceError without a GPU."""
    if not torch.cuda.is_available():
        raise DeviceError("bench memory needs a CUDA device", hint="on a CPU the tests compare small waves")
    device = torch.device("cuda:0")
    for case in CASES:
        if quick and case.shape != CASES[0].shape:
            continue
        say(case.name)
        yield from compare(case, llama.SHAPES[case.shape], torch.bfloat16, device, TILE_ROWS)


def compare(
    case: Case, shape: llama.LlamaShape, dtype: torch.dtype, device: torch.device, tile_rows: int
) -> list[Measurement]:
    """The rows of the table for one case."""
    spec = models.describe(shape.config())
    peak = predicted(case, spec, dtype, device, tile_rows)
    measured, results = run(case, spec, dtype, device, tile_rows)
    failed = [result.error for result in results if result.error is not None]
    ratio = measured / peak.num_bytes
    holds = not failed and abs(ratio - 1) <= MOST_ERROR
    said = f"predicted {bytes_text(peak.num_bytes)} ({peak.moment}), measured {bytes_text(measured)}"
    say(f"{said}, which failed: {failed[0].message}" if failed else said)
    known = sum(num_bytes for part, num_bytes in peak.parts if part in KNOWN)
    beside = (measured - known) / (peak.num_bytes - known)
    return [
        *(
            Measurement(case.name, f"{PREDICTED}: {part}", num_bytes / GIB, "GiB", None, None, True)
            for part, num_bytes in peak.parts
        ),
        Measurement(case.name, PREDICTED, peak.num_bytes / GIB, "GiB", None, None, True),
        Measurement(case.name, "measured", measured / GIB, "GiB", PREDICTED, ratio, holds),
        Measurement(
            case.name, f"measured beside {KNOWN_NAME}", (measured - known) / GIB, "GiB", PREDICTED, beside, holds
        ),
    ]


def predicted(case: Case, spec: ModelSpec, dtype: torch.dtype, device: torch.device, tile_rows: int) -> Peak:
    """What the plan says."""
    kv = kv_format(case.kv_dtype, str(dtype).removeprefix("torch."))
    on_gpu = device.type == "cuda"
    formats = Formats(dtype.itemsize, case.weights_dtype, kv, on_gpu, multiplies_fp8=has_kernels(device))
    place = weights_place(case.weights, spec, dtype.itemsize, case.weights_dtype, on_gpu)
    work = Work(
        lengths=case.lengths,
        tile_rows=tile_rows,
        step_tokens=case.chunk or sum(case.lengths),
        kv_tokens=_num_pages(case) * PAGE_TOKENS,
        num_open=len(case.lengths),
        max_tokens=NEW_TOKENS if TASKS[case.task].decodes else 0,
        reads_all=case.task != "generate",
        scores=case.task == "score",
        patterns=patterns_of(spec) if case.sparse else None,
    )
    return predict(spec, formats, work, place.device_bytes + place.slot_bytes)


def run(
    case: Case, spec: ModelSpec, dtype: torch.dtype, device: torch.device, tile_rows: int
) -> tuple[int, list[Result]]:
    """The measured peak in bytes, and the results."""
    with tempfile.TemporaryDirectory(prefix="longbatch-bench-") as folder, watched(device) as watch:
        llama.write_tokenizer(Path(folder), 1)
        model = models.random_weights(spec, dtype, device, SEED, case.weights_dtype, case.weights)
        kv = kv_format(case.kv_dtype, str(dtype).removeprefix("torch."))
        shapes = [(layer.num_kv_heads, layer.head_dim) for layer in spec.layers]
        cache = KVCache(shapes, _num_pages(case), dtype=dtype, device=device, kv=kv, num_open=len(case.lengths))
        limits = EngineLimits(case.chunk or sum(case.lengths), tile_rows, len(case.lengths), NEW_TOKENS)
        engine = Engine(model, Tokenizer.load(Path(folder)), cache, limits, eos_ids=frozenset())
        engine.share = False
        engine.dense = chosen_kernels(model)
        if case.sparse:
            engine.attention = EngineAttention.of(spec, patterns_of(spec), 1)
        watch.reset()
        results = list(engine.run([_rows(case, spec)]))
        return watch.peak, results


def patterns_of(spec: ModelSpec) -> tuple[LayerPatterns, ...]:
    """The published mix, cut to a model's heads and layers, or repeated."""
    mix = vs_workload.layers()
    found = []
    for index, layer in enumerate(spec.layers):
        budgets = mix[index % len(mix)]
        heads = [budgets[head % len(budgets)] for head in range(layer.num_heads)]
        found.append(LayerPatterns(tuple(PatternSpec.make("vertical_slash", vertical=v, slash=s) for v, s in heads)))
    return tuple(found)


def _num_pages(case: Case) -> int:
    """Pages that the wave asks for, at least one."""
    new = NEW_TOKENS if TASKS[case.task].decodes else 0
    if not new and case.chunk is None:
        return 1
    return sum(pages_for(length + new) for length in case.lengths)


def _rows(case: Case, spec: ModelSpec) -> list[tuple[Request, Prompt]]:
    """Rows of random tokens."""
    chance = np.random.default_rng(SEED)
    rows = []
    for row, length in enumerate(case.lengths):
        ids = chance.integers(0, spec.vocab_size, length, dtype=np.int32)
        request = Request(
            row, None, Location(0, row, 0), TASKS[case.task], Sampling(max_tokens=NEW_TOKENS), pooling="mean"
        )
        rows.append((request, Prompt(ids, scored=(1, length))))
    return rows
