"""`longbatch bench decode`: tokens per second of rows that answer over long contexts, Llama-3.1-8B shapes with random
weights, on one GPU.

The engine's own steps run, from the tokens of one to the results of the next, over pages filled with random K and V.
Beside them stands what no step can go below: the bytes of the weights and of the rows' K and V, at the bandwidth that a
copy reaches in the same run. The profiler's timeline says how long the device waited.

The check, for every case: a step as a CUDA graph gives the same logits as the step as it is, bit for bit; and the
attention of a row over its pages agrees with a softmax in float32 over what the pages hold.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longbatch import device as devices
from longbatch.attention import decode_attention
from longbatch.bench.llama import write_tokenizer
from longbatch.bench.prefill import Model
from longbatch.bench.process import say
from longbatch.bench.report import Measurement
from longbatch.cache import PAGE_TOKENS, KVCache
from longbatch.cache.pages import pages_for
from longbatch.config.kv_formats import KV_DTYPES, kv_format
from longbatch.core import TASKS, Location, Prompt, Request, Result, Sampling
from longbatch.engine.answers import Answers
from longbatch.engine.decode import DecodeBatch
from longbatch.engine.decoding import Decoding
from longbatch.engine.ladder import Shape
from longbatch.engine.limits import Counters, EngineLimits
from longbatch.engine.sequence import Sequence as Row
from longbatch.engine.stopping import StopRule
from longbatch.errors import DeviceError, UsageError
from longbatch.models.decoder import Decoder
from longbatch.plan.memory import entry_bytes
from longbatch.prompt import Tokenizer
from longbatch.timing import free_memory, wait_for

CASES = "1x1M:fp8,1x256K:auto,32x8K:auto,64x16K:fp8"
QUICK_CASES = "8x8K:auto"
SEED = 20
# Steps before the clock, which compile and capture; those under it; and those under the profiler. Together fewer than
# an answer that is taken for a loop.
WARM_STEPS, STEPS, PROFILED_STEPS = 8, 96, 16
# Pages that are filled at a time.
SOME_PAGES = 256
# Relative distance of a row's attention from float32.
MOST_ERROR = 2e-2
BOUND = "byte bound"


@dataclass(frozen=True, slots=True)
class Case:
    """rows: that decode together. context: tokens that each of them has at the end. kv: as in `Settings`."""

    rows: int
    context: int
    kv: str

    @property
    def name(self) -> str:
        return f"{self.rows} x {self.context:,} tokens, K/V {self.kv}"

    @property
    def start(self) -> int:
        """Tokens that each row begins with; the device is a step ahead of those that are counted."""
        return self.context - WARM_STEPS - STEPS - PROFILED_STEPS - 1


def parse_cases(text: str) -> list[Case]:
    """ROWSxTOKENS:KV,...; K and M multiply tokens by 1,024. Raises UsageError."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)([KM]?)(?::(\w+))?", part.strip())
        if match is None:
            raise UsageError(f"--cases {part!r} is not ROWSxTOKENS:KV", hint=f"such as {CASES}")
        context = int(match[2]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[3]]
        case = Case(int(match[1]), context, match[4] or "auto")
        if case.rows < 1 or case.start < 1:
            least = context - case.start + 1
            raise UsageError(f"--cases {part!r} is too small", hint=f"at least one row of {least} tokens")
        if case.kv not in KV_DTYPES:
            raise UsageError(f"--cases {part!r}: no K/V format {case.kv!r}", hint=f"one of: {', '.join(KV_DTYPES)}")
        found.append(case)
    return found


def measure(*, cases: str | None = None, quick: bool = False, trace: Path | None = None) -> Iterator[Measurement]:
    """Every case. quick: a small one alone. trace: where timelines go. Raises DeviceError without a GPU, UsageError."""
    wanted = parse_cases(cases or (QUICK_CASES if quick else CASES))
    if not torch.cuda.is_available():
        raise DeviceError("bench decode needs a CUDA device", hint="on a CPU, bench job measures a whole job")
    yield from compare(Model(), wanted, torch.device("cuda:0"), trace)


@torch.inference_mode()
def compare(
    model: Model, cases: Sequence[Case], device: torch.device, trace: Path | None = None
) -> Iterator[Measurement]:
    """The rows of the table."""
    info = next(info for info in devices.detect() if info.torch_name == str(device))
    bandwidth = devices.measure(info, str(model.dtype).removeprefix("torch.")).bandwidth
    yield Measurement("copy", "bandwidth", bandwidth, "B/s", None, None, True)
    decoder = model.decoder(model.shape.num_layers, device)
    for case in cases:
        say(case.name)
        bench = Bench(decoder, case)
        for _ in range(WARM_STEPS):
            bench.step()
        error, is_same = bench.attention_error(), bench.graph_is_same()
        holds = error <= MOST_ERROR and is_same
        yield Measurement(case.name, "attention", error, "relative L2", "float32", None, error <= MOST_ERROR)
        seconds = bench.timed(STEPS)
        mean_length = case.start + WARM_STEPS + STEPS / 2
        kv_bytes = case.rows * mean_length * decoder.spec.kv_entries_per_token * entry_bytes(decoder.spec, bench.kv)
        weight_bytes = model.shape.num_read_in_decode * model.dtype.itemsize
        bound = (weight_bytes + kv_bytes) / bandwidth
        say(f"{case.name}: {seconds * 1e3:.3f} ms, {BOUND} {bound * 1e3:.3f} ms")
        yield Measurement(f"{BOUND}, {case.name}", "step", bound, "s", None, None, True)
        yield Measurement(case.name, "step", seconds, "s", BOUND, bound / seconds, holds)
        yield Measurement(case.name, "rate", case.rows / seconds, "tokens/s", BOUND, bound / seconds, holds)
        place = trace
        if place is not None and len(cases) > 1:
            place = place.with_stem(f"{place.stem}-{case.rows}x{case.context}-{case.kv}")
        for name, value, unit in bench.waits(PROFILED_STEPS, place):
            yield Measurement(case.name, name, value, unit, None, None, holds)
        del bench
        free_memory(device)


class Bench:
    """Rows of one case in the engine's decode."""

    def __init__(self, decoder: Decoder, case: Case) -> None:
        self._decoder, self._case = decoder, case
        self.kv = kv_format(case.kv, str(decoder.dtype).removeprefix("torch."))
        self._cache = filled_cache(decoder, case)
        limits = EngineLimits(step_tokens=1, tile_rows=1, decode_rows=case.rows, max_tokens=1)
        with tempfile.TemporaryDirectory() as folder:
            write_tokenizer(Path(folder), 1)
            tokenizer = Tokenizer.load(Path(folder))
        self._decoding = Decoding(decoder, self._cache, Answers(tokenizer, self._cache, limits), limits)
        self._counters = Counters()
        tokens = np.random.default_rng(SEED).integers(0, decoder.spec.vocab_size, case.rows).tolist()
        self._decoding.join([self._row(number, tokenizer) for number in range(case.rows)], tokens)

    @property
    def batch(self) -> DecodeBatch:
        return self._decoding.batch

    def step(self) -> None:
        """One step as the engine makes it."""
        self._decoding.step(self._counters)

    def timed(self, num_steps: int) -> float:
        """Seconds of a step, from token to token."""
        wait_for(self._cache.device)
        begin = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        wait_for(self._cache.device)
        return (time.perf_counter() - begin) / num_steps

    def attention_error(self) -> float:
        """Relative L2 distance, in the last row of the first layer, of attention with random queries."""
        batch, spec = self.batch, self._decoder.spec.layers[0]
        generator = torch.Generator(self._cache.device).manual_seed(SEED)
        shape = (batch.shape.rows, spec.num_heads, spec.head_dim)
        q = torch.randn(shape, generator=generator, device=self._cache.device).to(self._decoder.dtype)
        step, last = batch.seen(batch.shape), len(batch) - 1
        found = decode_attention(q, self._cache, 0, step, scale=spec.scale)[last].double()
        block = None if step.open_blocks is None else step.open_blocks[last]
        k, v = (x.float() for x in self._cache.read(0, step.tables[last], 0, step.lengths[last], block))
        grouped = q[last].float().view(spec.num_kv_heads, -1, spec.head_dim)
        weights = (torch.matmul(grouped, k.permute(1, 2, 0)) * spec.scale).softmax(-1)
        wanted = torch.matmul(weights, v.transpose(0, 1)).reshape(found.shape).double()
        return float((found - wanted).norm() / wanted.norm())

    def graph_is_same(self) -> bool:
        """Whether a step gives the same logits however it runs; it is the next one, which is not read."""
        return torch.equal(self.batch.forward().clone(), self.batch.forward(as_graph=False))

    def waits(self, num_steps: int, trace: Path | None) -> Iterator[tuple[str, float, str]]:
        """How long the device had nothing to do in some steps, by the profiler; nothing where there is no GPU. trace:
        where the timeline goes."""
        activity = torch.profiler.ProfilerActivity
        on_gpu = self._cache.device.type == "cuda"
        wait_for(self._cache.device)
        with torch.profiler.profile(activities=[activity.CPU, activity.CUDA] if on_gpu else [activity.CPU]) as profile:
            for _ in range(num_steps):
                self.step()
            wait_for(self._cache.device)
        if trace is not None:
            profile.export_chrome_trace(str(trace))
        found = [
            (event.time_range.start, event.time_range.end)
            for event in profile.events() or ()
            if event.device_type.name == "CUDA"
        ]
        if found:
            share, longest = gaps(found)
            yield "idle", share, "share"
            yield "longest gap", longest * 1e-6, "s"

    def _row(self, number: int, tokenizer: Tokenizer) -> Row:
        case, sampling = self._case, Sampling()
        request = Request(number, None, Location(0, number, 0), TASKS["generate"], sampling)
        prompt = Prompt(np.zeros(case.start, dtype=np.int32))
        row = Row(request, prompt, Result(request.key, number), number, Shape(1, 1), case.context)
        row.stop = StopRule(frozenset(), (), row.max_tokens, tokenizer)
        row.stop.push(0)
        row.num_pages = pages_for(case.context)
        row.take(self._cache.pool)
        return row


def filled_cache(decoder: Decoder, case: Case) -> KVCache:
    """Pages for all rows of a case, and open blocks, full of normal numbers."""
    shapes = [(layer.num_kv_heads, layer.head_dim) for layer in decoder.spec.layers]
    num_pages, device = case.rows * pages_for(case.context), decoder.device
    stored = kv_format(case.kv, str(decoder.dtype).removeprefix("torch."))
    cache = KVCache(shapes, num_pages, dtype=decoder.dtype, device=device, kv=stored, num_open=case.rows)
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=decoder.dtype)

    for layer, (heads, dim) in enumerate(shapes):
        for pool in (cache.keys[layer], cache.values[layer]):
            for pages in torch.split(torch.arange(num_pages, device=device), SOME_PAGES):
                rows = torch.arange(len(pages), device=device) * PAGE_TOKENS
                cache.format.quantize(normal(len(pages) * PAGE_TOKENS, heads, dim), rows, pool, pages)
    for opened in (*cache.open_keys, *cache.open_values):
        opened.copy_(normal(*opened.shape))
    return cache


def gaps(intervals: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of the time from the first beginning to the last end, the share that no interval covers, and the longest such
    gap."""
    ordered = sorted(intervals)
    first, reached = ordered[0][0], ordered[0][1]
    idle = longest = 0.0
    for start, end in ordered:
        gap = max(0.0, start - reached)
        idle, longest, reached = idle + gap, max(longest, gap), max(reached, end)
    return idle / (reached - first), longest
