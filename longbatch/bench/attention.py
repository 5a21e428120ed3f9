"""`longbatch bench attention`: sparse prefill attention of a whole model, beside its rivals, on one GPU.

Llama-3.1-8B's shapes (32 query heads, 8 K/V heads, head dimension 128, 32 layers, bf16) and the vertical-slash budgets
that MInference published for the 1,024 heads of Llama-3-8B, on the clustered workload of `vs_workload`, whose density
is printed. Times are for all layers: every layer is measured with its own heads. "one selection per head" is the
published mix; "one selection per K/V group" has one class for each group of four heads, in the same proportions
(`vs_workload.shared_layers`). Rates count the operations of the selection and nothing else.

Rivals run in the same process on the same inputs, from `--rivals DIR` (see `attention_rivals`): MInference's own Triton
kernel, CUDA index and estimate, head by head with K and V expanded; FlexPrefill's kernel on the workload in its own
blocks of 128, and the whole of FlexPrefill by its own choice on structured inputs. cuDNN's dense attention, and
FlashAttention-3 where its package is installed, are timed on one layer. Every output is compared, on sampled rows, with
float64 over the keys that it was to see.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch

from longbatch.bench import vs_workload
from longbatch.bench.attention_check import MOST_ERROR
from longbatch.bench.attention_inputs import Inputs, random_inputs
from longbatch.bench.attention_layers import LayerTimes, Selection, measure_layers
from longbatch.bench.attention_others import (
    OWN_DENSE,
    OtherTimes,
    dense_kernels,
    measure_dense,
    measure_flex,
    measure_flex_blocks,
    measure_minference,
)
from longbatch.bench.attention_rivals import FLEX_PREFILL, MINFERENCE, FlexPrefill, MInference
from longbatch.bench.process import say
from longbatch.bench.report import Measurement
from longbatch.errors import DeviceError, UsageError

Outcome = TypeVar("Outcome")

LENGTHS = (1 << 15, 1 << 17, 1 << 18, 1 << 19, 1 << 20)
QUICK_LENGTHS = (1 << 15, 1 << 17)
# Between these the length is sought from which sparse attention is faster than dense.
BREAK_EVEN = (4096, 6144, 8192, 12288, 16384, 24576, 32768, 65536)
WHOLE = "attention + index + estimate"
EXACT = "softmax in float64"
MODES = {False: "one selection per head", True: "one selection per K/V group"}


@dataclass(frozen=True, slots=True)
class Model:
    """What is timed. layers, shared_layers: (vertical, slash) of each head, and of each K/V head, of every layer."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    layers: Sequence[Sequence[tuple[int, int]]] = field(default_factory=vs_workload.layers)
    shared_layers: Sequence[Sequence[tuple[int, int]]] = field(default_factory=vs_workload.shared_layers)
    most_error: float = MOST_ERROR

    def heads(self) -> Counter[tuple[int, int]]:
        """How many heads each class has."""
        return Counter(budget for layer in self.layers for budget in layer)


@dataclass(frozen=True, slots=True)
class Rivals:
    """Those that there are."""

    minference: MInference | None = None
    flex: FlexPrefill | None = None


def measure(
    *, rivals: Path | None = None, lengths: Sequence[int] | None = None, quick: bool = False
) -> Iterator[Measurement]:
    """The whole comparison, as it goes on. quick: 32K and 128K alone, fewer repeats, no break-even.

    Raises DeviceError without a GPU, UsageError for lengths that are no multiples of 128 and where the rivals' files
    are not those expected.
    """
    if not torch.cuda.is_available():
        raise DeviceError("bench attention needs a CUDA device", hint="on a CPU the tests run its kernels, interpreted")
    device = torch.device("cuda:0")
    lengths = lengths or (QUICK_LENGTHS if quick else LENGTHS)
    for length in lengths:
        # So that no rival has to fill up its last block.
        if length % 128:
            raise UsageError(f"--lengths: {length:,} is no multiple of 128")
    return compare(Model(), load(rivals, device), lengths, () if quick else BREAK_EVEN, 2 if quick else 5, device)


def load(folder: Path | None, device: torch.device) -> Rivals:
    """The rivals in a folder; those that it does not hold are left out."""
    if folder is None:
        say("without --rivals DIR: MInference and FlexPrefill are left out")
        return Rivals()
    paths = [folder / MINFERENCE, folder / FLEX_PREFILL]
    if not any(path.is_dir() for path in paths):
        raise UsageError(f"{folder} holds neither {MINFERENCE} nor {FLEX_PREFILL}")
    minference, flex = paths
    return Rivals(
        _attempt(MINFERENCE, lambda: MInference(minference, device)) if minference.is_dir() else None,
        _attempt(FLEX_PREFILL, lambda: FlexPrefill(flex)) if flex.is_dir() else None,
    )


@torch.inference_mode()
def compare(
    model: Model,
    rivals: Rivals,
    lengths: Sequence[int],
    break_even: Sequence[int],
    repeats: int,
    device: torch.device,
) -> Iterator[Measurement]:
    """Every length, then the break-even with dense attention. The first use of a kernel compiles it, in a warm-up."""
    for length in lengths:
        # Long runs vary by less than a percent; those around the break-even are short.
        yield from _compare_length(model, rivals, length, min(repeats, 3 if length <= 1 << 18 else 2), device)
    if break_even:
        yield from _break_even(model, break_even, repeats, device)


def _compare_length(
    model: Model, rivals: Rivals, length: int, repeats: int, device: torch.device
) -> Iterator[Measurement]:
    name = size_name(length)
    inputs = _inputs(model, length, device)
    against: list[tuple[str, float]] = []
    for kernel_name, kernel in dense_kernels(device).items():
        case = f"{kernel_name}, {name}"
        say(case)
        # A layer of a million tokens takes 16 s.
        times = measure_dense(kernel, inputs, len(model.layers), repeats if length <= 1 << 18 else 1)
        flops = 4 * model.head_dim * len(model.layers) * model.num_heads * length * (length + 1) / 2
        yield from _other_rows(case, times, flops)
        if kernel_name != OWN_DENSE:
            against.append((case, times.total))
    if (minference := rivals.minference) is not None:
        case = f"{MINFERENCE}, {name}"
        found = _attempt(case, lambda: measure_minference(minference, inputs, model.heads(), repeats))
        if found is not None:
            times, classes = found
            for (vertical, slash), one in classes.items():
                if one.holds:
                    yield Measurement(case, f"one head ({vertical}, {slash})", one.total * 1e3, "ms", None, None, True)
            yield from _other_rows(case, times)
            against.insert(0, (case, times.total))
    if (flex := rivals.flex) is not None:
        case = f"{FLEX_PREFILL}'s kernel, {name}"
        blocks = _attempt(case, lambda: measure_flex_blocks(flex, inputs, model.heads(), repeats))
        if blocks is not None:
            yield from _other_rows(case, blocks)
        case = f"{FLEX_PREFILL}, its own choice, {name}"
        num_heads = len(model.layers) * model.num_heads
        whole = _attempt(case, lambda: measure_flex(flex, inputs, num_heads, repeats))
        if whole is not None:
            yield from _other_rows(case, whole)
            against.append((case, whole.total))
    pairs: dict[Selection, float] = {}
    for shared, mode in MODES.items():
        case = f"longbatch, {mode}, {name}"
        say(case)
        yield from _own_rows(case, _own_times(model, inputs, shared, repeats, pairs), model, against)


def _attempt(case: str, work: Callable[[], Outcome]) -> Outcome | None:
    """What a rival gives; None, and a line about it, where it does not compile or run here."""
    say(case)
    try:
        return work()
    except UsageError:
        raise
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        say(f"{case} does not run: {type(error).__name__}: {text}")
        return None


def _own_times(model: Model, inputs: Inputs, shared: bool, repeats: int, pairs: dict[Selection, float]) -> LayerTimes:
    layers = model.shared_layers if shared else model.layers
    return measure_layers(inputs, layers, shared=shared, repeats=repeats, most_error=model.most_error, pairs=pairs)


def _own_rows(case: str, times: LayerTimes, model: Model, against: Sequence[tuple[str, float]]) -> list[Measurement]:
    total, beside = times.total, times.estimate + times.index
    rate = times.rate(model.head_dim) / 1e12
    # Enough to go by, should the table be lost.
    say(
        f"{case}: {total:.4g} s (estimate {times.estimate:.4g}, index {times.index:.4g}, attention"
        f" {times.attention:.4g}), {rate:.4g} TFLOP/s, density {times.density:.4g}, error {max(times.errors):.2g}"
    )
    rows = [
        # The same time once for each rival.
        *(Measurement(case, WHOLE, total, "s", rival, seconds / total, True) for rival, seconds in against),
        Measurement(case, "estimate", times.estimate, "s", None, None, True),
        Measurement(case, "index", times.index, "s", None, None, True),
        Measurement(case, "attention", times.attention, "s", None, None, True),
        Measurement(case, "estimate and index", beside, "s", "the whole", beside / total, True),
        Measurement(case, "executed rate", rate, "TFLOP/s", None, None, True),
        Measurement(case, "density", times.density, "share", None, None, True),
    ]
    # No speed without a result that holds.
    error = Measurement(case, "error of the worst layer", max(times.errors), "relative RMS", EXACT, None, times.holds)
    return [*(rows if times.holds else []), error]


def _other_rows(case: str, times: OtherTimes, flops: float | None = None) -> list[Measurement]:
    say(f"{case}: {times.total:.4g} s, error {times.error:.2g}")
    rows = [
        Measurement(case, WHOLE, times.total, "s", None, None, True),
        Measurement(case, "attention", times.attention, "s", None, None, True),
    ]
    if times.estimate:
        rows.append(Measurement(case, "estimate", times.estimate, "s", None, None, True))
    if times.index:
        rows.append(Measurement(case, "index", times.index, "s", None, None, True))
    if flops is not None:
        rows.append(Measurement(case, "executed rate", flops / times.attention / 1e12, "TFLOP/s", None, None, True))
    if times.density is not None:
        rows.append(Measurement(case, "density", times.density, "share", None, None, True))
    error = Measurement(case, "error", times.error, "relative RMS", EXACT, None, times.holds)
    return [*(rows if times.holds else []), error]


def _break_even(model: Model, lengths: Sequence[int], repeats: int, device: torch.device) -> Iterator[Measurement]:
    """The length from which on the whole of the model's sparse attention takes less time than dense attention."""
    (name, kernel), *_ = dense_kernels(device).items()
    ratios: dict[bool, list[tuple[int, float]]] = {shared: [] for shared in MODES}
    holds = True
    for length in lengths:
        say(f"break-even: {length:,} tokens")
        inputs = _inputs(model, length, device)
        dense = measure_dense(kernel, inputs, len(model.layers), repeats)
        pairs: dict[Selection, float] = {}
        for shared, mode in MODES.items():
            own = _own_times(model, inputs, shared, repeats, pairs)
            ratio, checked = dense.total / own.total, own.holds and dense.holds
            say(f"break-even: {length:,} tokens, {mode}: {ratio:.3f} times {name}, error {max(own.errors):.2g}")
            yield Measurement(
                f"longbatch, {mode}, {length:,} tokens", "speed", ratio, "times dense", name, ratio, checked
            )
            ratios[shared].append((length, ratio))
            holds = holds and checked
    for shared, mode in MODES.items():
        case, found = f"longbatch, {mode}", crossing(ratios[shared])
        if found is None:
            yield Measurement(case, "break-even lies above", lengths[-1], "tokens", name, None, False)
        else:
            yield Measurement(case, "break-even", found, "tokens", name, None, holds)


def crossing(ratios: Sequence[tuple[int, float]]) -> float | None:
    """The length from which on every ratio is at least 1, interpolated between the two lengths around it on logarithmic
    scales; None where the last ratio is below 1, the first length where none is."""
    if ratios[-1][1] < 1:
        return None
    for (before, low), (length, high) in reversed(list(pairwise(ratios))):
        if low < 1:
            share = math.log(high) / (math.log(high) - math.log(low))
            return math.exp(math.log(length) + share * (math.log(before) - math.log(length)))
    return float(ratios[0][0])


def size_name(length: int) -> str:
    """32K, 1M, or the number itself."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if length % unit == 0:
            return f"{length // unit}{letter}"
    return str(length)


def _inputs(model: Model, length: int, device: torch.device) -> Inputs:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return random_inputs(length, model.num_heads, model.num_kv_heads, model.head_dim, model.dtype, device)
