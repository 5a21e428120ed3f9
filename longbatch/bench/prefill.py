"""`longbatch bench prefill`: the prefill of one long prompt, Llama-3.1-8B shapes with random weights, on one GPU.

The engine's own prefill runs: all layers over the prompt, sparse by the clustered workload with the published mix of
heads (`prefill_workload`), and the logits of the last position. Beside it stand the same engine's dense attention,
measured on a few layers and extrapolated, and the bound of the matrix products alone, measured warm in the same run.
One more run under the profiler says where the time goes. K and V of earlier layers are not kept, as for a task that
generates nothing.

On GPUs that multiply e4m3 numbers all of it runs with fp8 weights too (`--weights-dtype fp8`).

The check: two layers on a short prompt, kernels in half precision beside masks in float32, the same weights and
selections; the last position's hidden state must agree.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from longbatch import models
from longbatch.attention import DenseKernels, Executed, Segment, SparseLayer, Step
from longbatch.attention.measure import dense_kernels
from longbatch.bench.limits import measure_limits
from longbatch.bench.llama import LlamaShape
from longbatch.bench.prefill_workload import workload_layers
from longbatch.bench.process import say
from longbatch.bench.report import Measurement
from longbatch.cache import KVCache
from longbatch.device import gpu_infos
from longbatch.engine.prefill import prefill
from longbatch.errors import DeviceError
from longbatch.folders import cache_folder
from longbatch.models.decoder import Decoder
from longbatch.models.fp8 import Fp8Weight, Weight, has_kernels
from longbatch.models.parameters import parameters
from longbatch.models.spec import ModelSpec
from longbatch.timing import free_memory, wait_for

LENGTHS = (1 << 17, 1 << 18, 1 << 19, 1 << 20)
QUICK_LENGTHS = (1 << 15,)
SEED = 20
TILE_ROWS = 8192
# Beyond these tokens a run takes so long that it needs no warm-up of its own length, and is made once.
LONG = 1 << 18
WARM_TOKENS = 1 << 14
CHECK_LAYERS, CHECK_TOKENS = 2, 4096
# Each of the four matrix products runs so long under load before it is timed, and again under the clock.
LIMIT_SECONDS = 2.5
# Relative distance of the last hidden state from float32 with the same weights: bfloat16 rounds every product and sum
# of two layers; with fp8 weights inputs are rounded to three bits of mantissa.
MOST_ERROR = {"auto": 2e-2, "fp8": 1e-1}
PRODUCTS, DENSE = "GEMM bound", "longbatch, dense"
MODES = {False: "one selection per head", True: "one selection per K/V group"}
# What a kernel's name says about its work; the first that fits.
PARTS = (
    ("attention", ("range_attention", "range_stream", "block_attention", "flash", "cudnn", "sdpa")),
    ("index", ("last_query", "histogram", "narrow", "tally", "places", "joined", "cut_kernel", "records", "column")),
    ("GEMM", ("gemm", "nvjet", "cutlass", "xmma")),
)


@dataclass(frozen=True, slots=True)
class Model:
    """What is timed. weights_dtype: as in `Settings`."""

    shape: LlamaShape = field(default_factory=lambda: LlamaShape(max_length=1 << 21))
    dtype: torch.dtype = torch.bfloat16
    weights_dtype: str = "auto"

    @property
    def name(self) -> str:
        """For the table."""
        return "fp8 weights" if self.weights_dtype == "fp8" else _dtype_name(self.dtype)

    def decoder(self, num_layers: int, device: torch.device) -> Decoder:
        """The first layers, with random weights."""
        return models.random_weights(_shallow(self.spec, num_layers), self.dtype, device, SEED, self.weights_dtype)

    @property
    def spec(self) -> ModelSpec:
        return models.describe(self.shape.config())


def measure(*, lengths: Sequence[int] | None = None, quick: bool = False) -> Iterator[Measurement]:
    """Every length, the check first. quick: 32K alone. Raises DeviceError without a GPU."""
    if not torch.cuda.is_available():
        raise DeviceError("bench prefill needs a CUDA device", hint="on a CPU, bench job measures a whole job")
    lengths = lengths or (QUICK_LENGTHS if quick else LENGTHS)
    device = torch.device("cuda:0")
    for weights_dtype in ("auto", "fp8") if has_kernels(device) else ("auto",):
        yield from compare(Model(weights_dtype=weights_dtype), lengths, device, repeats=1 if quick else 2)


@torch.inference_mode()
def compare(model: Model, lengths: Sequence[int], device: torch.device, *, repeats: int) -> Iterator[Measurement]:
    """The rows of the table for one model."""
    say(f"{model.name}: check and limits")
    error = check(model, device)
    holds = error <= MOST_ERROR[model.weights_dtype]
    case = f"two layers, {model.name}"
    yield Measurement(case, "hidden state", error, "relative L2", "masks in float32", None, holds)
    shape = model.shape
    dtype_name = "fp8" if model.weights_dtype == "fp8" else _dtype_name(model.dtype)
    limits = measure_limits(shape.products(), max(lengths), str(device), dtype_name, seconds=LIMIT_SECONDS)
    # The last layer needs only K and V, but for one position.
    kv_share = 2 * shape.num_kv_heads / (shape.num_heads + 2 * shape.num_kv_heads)
    per_row = (shape.num_layers - 1) * sum(limits.gemm_seconds) + kv_share * limits.gemm_seconds[0]
    decoder = model.decoder(shape.num_layers, device)
    for length in lengths:
        name = f"{model.name}, {length:,} tokens"
        bound = per_row * length / limits.rows
        yield Measurement(f"{PRODUCTS}, {name}", "prefill", bound, "s", None, None, True)
        dense = _dense_seconds(model, length, device)
        yield Measurement(f"{DENSE}, {name}, extrapolated", "prefill", dense, "s", None, None, holds)
        for shared, mode in MODES.items():
            say(f"{name}, {mode}")
            seconds, density = timed(decoder, length, shared, repeats)
            say(f"{name}, {mode}: {seconds:.3f} s, products alone {bound:.3f} s, dense {dense:.3f} s")
            case = f"longbatch, {mode}, {name}"
            yield Measurement(case, "prefill", seconds, "s", PRODUCTS, bound / seconds, holds)
            yield Measurement(case, "prefill", seconds, "s", DENSE, dense / seconds, holds)
            yield Measurement(case, "density", density, "share", None, None, holds)
            for part, spent in breakdown(decoder, length, shared).items():
                yield Measurement(case, part, spent, "s", "prefill", spent / seconds, holds)
            free_memory(device)


def step_of(length: int, attention: tuple[SparseLayer, ...] | None, decoder: Decoder) -> Step:
    """One prompt of random tokens in one piece, whose last position is read and whose K/V are not kept."""
    ids = np.random.default_rng(SEED).integers(0, decoder.spec.vocab_size, length, dtype=np.int32)
    executed = Executed(sparse=attention is not None)
    segment = Segment(0, 0, length, reads=((length - 1, length),), rope_length=length, executed=executed)
    return Step.build(
        ids,
        [segment],
        None,
        tile_rows=min(TILE_ROWS, length),
        device=decoder.device,
        attention=attention,
        dense=chosen_kernels(decoder),
    )


def chosen_kernels(decoder: Decoder) -> DenseKernels | None:
    """The kernels that run dense attention, as in a run."""
    if decoder.device.type != "cuda":
        return None
    info = gpu_infos()[decoder.device.index or 0]
    return dense_kernels(decoder.spec.layers, info, _dtype_name(decoder.dtype), cache_folder())


def run(decoder: Decoder, step: Step) -> tuple[Tensor, Tensor]:
    """The last position's hidden state [1, hidden] before the final norm, and its logits [1, vocab]."""
    layers = [(layer.num_kv_heads, layer.head_dim) for layer in decoder.spec.layers]
    hidden = prefill(decoder, KVCache(layers, 1, dtype=decoder.dtype, device=decoder.device), step)
    return hidden, decoder.logits(decoder.final_norm(hidden))


def attention_of(decoder: Decoder, length: int, shared: bool | None) -> tuple[SparseLayer, ...] | None:
    """The workload's layers; none where shared is None: dense."""
    return None if shared is None else workload_layers(decoder.spec, length, decoder.device, shared=shared)


def timed(decoder: Decoder, length: int, shared: bool | None, repeats: int) -> tuple[float, float]:
    """Least seconds of some runs from the tokens to the logits, and the executed density. What is compiled is compiled
    before, on the same prompt or on a shorter one."""
    long = length > LONG
    warm = WARM_TOKENS if long else length
    run(decoder, step_of(warm, attention_of(decoder, warm, shared), decoder))
    attention = attention_of(decoder, length, shared)
    best, density = float("inf"), 1.0
    for _ in range(1 if long else repeats):
        step = step_of(length, attention, decoder)
        wait_for(decoder.device)
        begin = time.perf_counter()
        run(decoder, step)
        wait_for(decoder.device)
        best = min(best, time.perf_counter() - begin)
        executed = step.segments[0].executed
        assert executed is not None
        density = float(executed.selected) / executed.causal
    return best, density


def breakdown(decoder: Decoder, length: int, shared: bool | None) -> dict[str, float]:
    """Seconds on the device by kind of work, and what the device waited: `idle`. Nothing where there is no GPU."""
    if decoder.device.type != "cuda":
        return {}
    step = step_of(length, attention_of(decoder, length, shared), decoder)
    wait_for(decoder.device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        begin = time.perf_counter()
        run(decoder, step)
        wait_for(decoder.device)
        seconds = time.perf_counter() - begin
    found = {part: 0.0 for part, _ in PARTS} | {"elementwise": 0.0}
    for event in profile.key_averages():
        found[part_of(event.key)] += event.self_device_time_total / 1e6
    return {**found, "idle": max(0.0, seconds - sum(found.values()))}


def part_of(kernel: str) -> str:
    """The kind of work that a kernel does, by its name."""
    name = kernel.lower()
    return next((part for part, words in PARTS if any(word in name for word in words)), "elementwise")


def check(model: Model, device: torch.device) -> float:
    """Relative L2 distance of the last position's hidden state from float32 by masks, with the same weights."""
    spec = _shallow(model.spec, CHECK_LAYERS)
    generator = torch.Generator(device).manual_seed(SEED)
    own: dict[str, Weight] = {}
    exact: dict[str, Weight] = {}
    for parameter in parameters(spec):
        tensor = torch.ones(parameter.shape, dtype=model.dtype, device=device)
        if parameter.role != "norm":
            tensor.normal_(0, 0.02, generator=generator)
        own[parameter.name], exact[parameter.name] = tensor, tensor.float()
        if model.weights_dtype == "fp8" and parameter.is_product:
            weight = Fp8Weight.of(tensor)
            own[parameter.name], exact[parameter.name] = weight, weight.data.float() * weight.scale[..., None]
    length = min(CHECK_TOKENS, spec.max_length)
    attention = workload_layers(spec, length, device, shared=False)
    found, wanted = (
        run(decoder, step_of(length, attention, decoder))[0].double()
        for decoder in (Decoder(spec, own), Decoder(spec, exact))
    )
    return float((found - wanted).norm() / wanted.norm())


def _dense_seconds(model: Model, length: int, device: torch.device) -> float:
    """Seconds of the same engine's dense prefill of the whole model: those of the last layer, of which little is
    computed, and of some before it, times the rest."""
    seconds, most = [], 1 if length > LONG else 2
    for count in (1, 1 + most):
        decoder = model.decoder(count, device)
        seconds.append(timed(decoder, length, None, 1)[0])
        del decoder
        free_memory(device)
    last, some = seconds
    return last + (some - last) / most * (model.shape.num_layers - 1)


def _shallow(spec: ModelSpec, num_layers: int) -> ModelSpec:
    """The model's first layers alone."""
    return replace(spec, layers=spec.layers[:num_layers])


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
