"""`longbatch bench weights`: prefill with layers that arrive from host memory, or from disk, beside resident ones.

Shapes of Qwen2.5-32B by default, with random bf16 weights and as many layers as fit. First the limits, in the same run:
seconds of a resident layer at several lengths, and seconds in which a layer arrives, nothing else going on. The length
at which both are equal is the break-even. Then the whole prefill of one prompt at the break-even and at twice as many
tokens, streamed and resident in turns; every bit of the last hidden state and of the logits must be equal. A run under
the profiler says how much of the copies' time kernels ran as well.

From disk: model files that the benchmark writes into the folder for temporary files, of as many layers as fit there,
dropped from the page cache before each run where the system lets them go. How fast they are read, dropped and not, is
in the table.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from longbatch import models
from longbatch.bench import llama, prefill
from longbatch.bench.attention import crossing
from longbatch.bench.llama import LlamaShape
from longbatch.bench.process import say
from longbatch.bench.report import Measurement
from longbatch.bench.timeline import traced
from longbatch.device import cpu_info
from longbatch.errors import DeviceError, UsageError
from longbatch.models.decoder import Decoder
from longbatch.models.layout import layer_layouts
from longbatch.timing import free_memory, wait_for

SHAPE = "qwen2.5-32b"
SEED = 20
LENGTHS = (1 << 12, 1 << 13, 1 << 14, 1 << 15, 1 << 16, 1 << 17)
FACTORS = (1, 2)
# A resident layer's time is that of the last of these numbers of layers less that of the first.
SHALLOW = (1, 4)
# Lengths are multiples of it, as the kernels of matrix products like.
UNIT = 128
ARRIVES = "one layer arrives"
GIB = 1 << 30
# What is left free on the device, in host memory and on the disk.
DEVICE_RESERVE, HOST_RESERVE, DISK_RESERVE = 24 * GIB, 12 * GIB, 4 * GIB


@dataclass(frozen=True, slots=True)
class Model:
    """What is measured, on a device."""

    shape: LlamaShape
    dtype: torch.dtype
    device: torch.device

    @property
    def layer_bytes(self) -> int:
        """Of one layer's weights."""
        return layer_layouts(models.describe(self.shape.config()), self.dtype.itemsize, "auto")[0].num_bytes

    @property
    def outside_bytes(self) -> int:
        """Of the embedding and the vocabulary projection."""
        return 2 * self.shape.vocab * self.shape.hidden * self.dtype.itemsize

    def cut(self, num_layers: int) -> Model:
        """The first layers alone."""
        return replace(self, shape=replace(self.shape, num_layers=num_layers))

    def random(self, weights: str) -> Decoder:
        """With random weights, resident or in host memory; the same ones."""
        spec = models.describe(self.shape.config())
        return models.random_weights(spec, self.dtype, self.device, SEED, weights=weights)


def measure(
    *,
    shape: str | None = None,
    layers: int | None = None,
    lengths: Sequence[int] | None = None,
    trace: Path | None = None,
    quick: bool = False,
) -> Iterator[Measurement]:
    """Host memory, then disk. layers: how many of the shape's; as many as fit if left out. lengths: at which a layer is
    timed. trace: file for the timeline of a prefill at twice the break-even. quick: without disk.

    Raises DeviceError without a GPU, UsageError for shapes that are not known.
    """
    if not torch.cuda.is_available():
        raise DeviceError("bench weights needs a CUDA device", hint="on a CPU weights are not copied anywhere")
    if shape is not None and shape not in llama.SHAPES:
        raise UsageError(f"--shape: there is no {shape!r}", hint=f"one of: {', '.join(llama.SHAPES)}")
    device = torch.device("cuda:0")
    whole = Model(llama.SHAPES[shape or SHAPE], torch.bfloat16, device)
    fitting = num_fitting(whole, torch.cuda.mem_get_info(device)[0], cpu_info().free_bytes)
    model = whole.cut(min(layers or whole.shape.num_layers, fitting))
    say(f"{model.shape.num_layers} of {whole.shape.num_layers} layers of {model.layer_bytes / GIB:.2f} GiB each")
    with tempfile.TemporaryDirectory(prefix="longbatch-bench-") as folder:
        yield from compare(model, lengths or LENGTHS, Path(folder), trace=trace, from_disk=not quick, repeats=3)


def num_fitting(model: Model, device_bytes: int, host_bytes: int) -> int:
    """How many layers fit on the device and, a second time, in host memory. Raises DeviceError for too few."""
    on_device = (device_bytes - DEVICE_RESERVE - 2 * model.outside_bytes) // model.layer_bytes
    found = min(on_device, (host_bytes - HOST_RESERVE) // model.layer_bytes)
    if found < max(SHALLOW):
        raise DeviceError(f"fewer than {max(SHALLOW)} layers of {model.layer_bytes / GIB:.1f} GiB fit in memory")
    return found


def compare(
    model: Model, lengths: Sequence[int], folder: Path, *, trace: Path | None, from_disk: bool, repeats: int
) -> Iterator[Measurement]:
    """The rows of the table. folder: for the model's files and for traces."""
    layer_seconds = []
    for length, seconds in zip(lengths, _layer_seconds(model, lengths), strict=True):
        layer_seconds.append((length, seconds))
        yield Measurement(f"resident, {length:,} tokens", "one layer", seconds * 1e3, "ms", None, None, True)
    resident, host = (model.random(weights) for weights in ("resident", "host"))
    yield from _streamed("host", model, resident, host, layer_seconds, folder, trace=trace, repeats=repeats)
    del resident, host
    free_memory(model.device)
    if from_disk:
        yield from _from_disk(model, layer_seconds, folder)


def _from_disk(model: Model, layer_seconds: list[tuple[int, float]], folder: Path) -> Iterator[Measurement]:
    """The same from files."""
    room = shutil.disk_usage(folder).free - DISK_RESERVE - model.outside_bytes
    model = model.cut(min(model.shape.num_layers, room // model.layer_bytes))
    if model.shape.num_layers < max(SHALLOW):
        say(f"from disk: {folder} has no room for {max(SHALLOW)} layers")
        return
    files = folder / "model"
    say(f"from disk: writing {model.shape.num_layers} layers")
    llama.write_model(files, model.shape, str(model.device), SEED)
    resident, disk = (
        models.load(files, model.dtype, model.device, weights=weights) for weights in ("resident", "disk")
    )
    rate = model.shape.num_layers * model.layer_bytes / arrival_seconds(disk) / 1e9
    yield Measurement("disk, page cache", "rate", rate, "GB/s", None, None, True)
    # Long runs vary little.
    before = partial(drop_cache, files)
    yield from _streamed("disk", model, resident, disk, layer_seconds, folder, before=before, repeats=1)


def _streamed(
    place: str,
    model: Model,
    resident: Decoder,
    streamed: Decoder,
    layer_seconds: list[tuple[int, float]],
    folder: Path,
    *,
    before: Callable[[], None] = lambda: None,
    trace: Path | None = None,
    repeats: int,
) -> Iterator[Measurement]:
    """Rate, break-even, and prefill there and beyond. before: called before each streamed run."""
    num_layers = model.shape.num_layers
    before()
    arrival = arrival_seconds(streamed) / num_layers
    say(f"{place}: a layer arrives in {arrival * 1e3:.1f} ms")
    yield Measurement(place, ARRIVES, arrival * 1e3, "ms", None, None, True)
    yield Measurement(place, "rate", model.layer_bytes / arrival / 1e9, "GB/s", None, None, True)
    found = crossing([(length, seconds / arrival) for length, seconds in layer_seconds])
    if found is None:
        yield Measurement(place, "break-even lies above", layer_seconds[-1][0], "tokens", ARRIVES, None, True)
        return
    yield Measurement(place, "break-even", found, "tokens", ARRIVES, None, True)
    for decoder in (resident, streamed):
        run(decoder, min(prefill.WARM_TOKENS, UNIT * round(found / UNIT) or UNIT))
    for factor in FACTORS:
        length = max(1, round(factor * found / UNIT)) * UNIT
        wanted, other = Run(), Run()
        for _ in range(repeats):
            wanted.add(*run(resident, length))
            other.add(*run(streamed, length, before))
        equal = wanted.outputs_equal(other)
        ratio = other.seconds / wanted.seconds
        say(f"{place}, {length:,} tokens: {other.seconds:.3f} s, {ratio:.3f} times resident")
        at = f"{num_layers} layers, {length:,} tokens, {factor} x break-even of {place}"
        yield Measurement(f"resident, {at}", "prefill", wanted.seconds, "s", None, None, True)
        yield Measurement(f"{place}, {at}", "prefill", other.seconds, "s", "resident", ratio, equal)
        path = trace if trace is not None and factor == max(FACTORS) else folder / "trace.json"
        before()
        shown = traced(partial(run, streamed, length), path)
        if shown is not None:
            yield Measurement(f"{place}, {at}", "copies", shown.copies / 1e6, "s", None, None, equal)
            yield Measurement(f"{place}, {at}", "copies hidden", shown.share, "share", "copies", shown.share, equal)


@dataclass(slots=True)
class Run:
    """The least seconds of some prefills, and the last hidden state and logits of each."""

    seconds: float = float("inf")
    outputs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, seconds: float, outputs: tuple[Tensor, Tensor]) -> None:
        """One more."""
        self.seconds = min(self.seconds, seconds)
        self.outputs.append(outputs)

    def outputs_equal(self, other: Run) -> bool:
        """Whether all runs of both gave the same bits."""
        first = self.outputs[0]
        return all(
            torch.equal(wanted, found)
            for outputs in (*self.outputs, *other.outputs)
            for wanted, found in zip(first, outputs, strict=True)
        )


def _layer_seconds(model: Model, lengths: Sequence[int]) -> Iterator[float]:
    """Seconds of one resident layer at each length."""
    few, many = SHALLOW
    decoders = [model.cut(count).random("resident") for count in SHALLOW]
    for length in lengths:
        say(f"a resident layer, {length:,} tokens")
        less, more = (prefill.timed(decoder, length, None, 2)[0] for decoder in decoders)
        yield max(1e-9, more - less) / (many - few)


def arrival_seconds(decoder: Decoder) -> float:
    """Seconds until every layer has arrived once, nothing being computed meanwhile."""
    decoder.layers[0]
    wait_for(decoder.device)
    begin = time.perf_counter()
    for _ in decoder.layers:
        pass
    # It was there at the beginning, and comes again behind the last one.
    decoder.layers[0]
    wait_for(decoder.device)
    return time.perf_counter() - begin


def run(
    decoder: Decoder, length: int, before: Callable[[], None] = lambda: None
) -> tuple[float, tuple[Tensor, Tensor]]:
    """Seconds of one prefill, from the tokens to the logits; and the last hidden state and these."""
    step = prefill.step_of(length, None, decoder)
    before()
    wait_for(decoder.device)
    begin = time.perf_counter()
    outputs = prefill.run(decoder, step)
    wait_for(decoder.device)
    return time.perf_counter() - begin, outputs


def drop_cache(folder: Path) -> None:
    """Let the system forget what it holds of the files in a folder, as far as it does so for one who asks."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
