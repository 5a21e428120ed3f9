"""Layers whose weights are not on the device: each arrives, from host memory or from files, while the one before it
computes.

The device has two slots, each as large as the largest layer. While the layer in one of them computes, the next one is
copied into the other on a stream of its own; that copy waits for the last use of the slot, and computation waits for
the copy, both by events, so that the host never waits. After the last layer comes the first: of the next token, or of
the next step. From files, a thread reads a layer ahead into one of two page-locked buffers; on a CPU into the slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, overload

import torch
from torch import Tensor

from longbatch.models.decoder import Layer, build_layer
from longbatch.models.fp8 import FP8, Fp8Weight, Weight
from longbatch.models.layout import LayerLayout
from longbatch.models.pinned import HostMemory
from longbatch.models.spec import ModelSpec

# Fills the weights of a layer, by the names of its parameters.
ReadLayer = Callable[[int, Mapping[str, Weight]], None]


def weights_in(buffer: Tensor, layout: LayerLayout, dtype: torch.dtype) -> dict[str, Weight]:
    """The weights of a layer, by the names of its parameters, as views of its buffer. dtype: of what is not quantized
    nor float32 by its nature."""
    found: dict[str, Weight] = {}
    for place in layout.places:
        shape = place.parameter.shape
        numbers = buffer[place.start : place.stop]
        if place.scale_start is None:
            weight = numbers.view(dtype if place.width == dtype.itemsize else torch.float32).view(shape)
            found[place.parameter.name] = weight
        else:
            scales = buffer[place.scale_start : place.scale_stop].view(torch.float32)
            found[place.parameter.name] = Fp8Weight(numbers.view(FP8).view(shape), scales.view(shape[:-1]))
    return found


def layer_in(buffer: Tensor, spec: ModelSpec, index: int, layout: LayerLayout, dtype: torch.dtype) -> Layer:
    """A layer that computes with the weights in a buffer."""
    weights = weights_in(buffer, layout, dtype)
    return build_layer(spec, index, {place.parameter.key: weights[place.parameter.name] for place in layout.places})


class Slot:
    """A layer's bytes on the device. layer: the number of the one that is there or on its way, None for none."""

    def __init__(self, num_bytes: int, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self.buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.layer: int | None = None
        self.coming: Future[None] | None = None
        self._stream = stream
        if stream is not None:
            # Whoever gets this memory next waits for the copies that are under way.
            self.buffer.record_stream(stream)
            self._used = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """What the device has been given to compute until now is the last that reads what is here."""
        self.layer = None
        if self.coming is not None:
            self.coming.cancel()
            self.coming = None
        if self._stream is not None:
            self._used.record(torch.cuda.current_stream(self.buffer.device))

    def fill(self, host: Tensor) -> None:
        """Copy a layer's bytes here, on the slot's stream where there is one: `host` must stay as it is until
        `copied`."""
        if self._stream is None:
            self.buffer[: len(host)].copy_(host)
            return
        self._stream.wait_event(self._used)
        with torch.cuda.stream(self._stream):
            self.buffer[: len(host)].copy_(host, non_blocking=True)
        self._arrived.record(self._stream)

    def copied(self) -> None:
        """Wait, on the host, for the last `fill`."""
        if self._stream is not None:
            self._arrived.synchronize()

    def await_layer(self) -> None:
        """Let what the device computes from now on come after the layer's arrival. Raises what reading it raised."""
        if self.coming is not None:
            self.coming.result()
            self.coming = None
        if self._stream is not None:
            torch.cuda.current_stream(self.buffer.device).wait_event(self._arrived)


class WeightSource(Protocol):
    """Where layers come from."""

    def bring(self, index: int, slot: Slot) -> Future[None] | None:
        """Begin to fill a slot with a layer; a future where that happens in another thread."""


class HostWeights:
    """All layers in host memory, page-locked for a GPU. buffers: a layer's bytes each."""

    def __init__(self, layouts: Sequence[LayerLayout], device: torch.device) -> None:
        self._memory = HostMemory(device)
        self.buffers = [self._memory.empty(layout.num_bytes) for layout in layouts]

    def bring(self, index: int, slot: Slot) -> Future[None] | None:
        """See `WeightSource`."""
        slot.fill(self.buffers[index])
        return None


class DiskWeights:
    """Layers that are read from their files whenever they are wanted. read: fills a layer's weights."""

    def __init__(
        self, layouts: Sequence[LayerLayout], dtype: torch.dtype, device: torch.device, read: ReadLayer
    ) -> None:
        self._layouts, self._dtype, self._device, self._read = layouts, dtype, device, read
        # One thread, so that layers arrive in the order in which they were asked for.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        # The page-locked buffers, the one used longest ago first, each with the slot that was filled from it.
        self._staging: list[tuple[Tensor, Slot | None]] = []
        if device.type == "cuda":
            largest = max(layout.num_bytes for layout in layouts)
            self._memory = HostMemory(device)
            self._staging = [(self._memory.empty(largest), None) for _ in range(2)]
            # What is computed on the way, as when a checkpoint is quantized, does not wait for the layers.
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def bring(self, index: int, slot: Slot) -> Future[None] | None:
        """See `WeightSource`."""
        return self._thread.submit(self._bring, index, slot)

    def _bring(self, index: int, slot: Slot) -> None:
        layout = self._layouts[index]
        if not self._staging:
            self._read(index, weights_in(slot.buffer, layout, self._dtype))
            return
        buffer, filled = self._staging.pop(0)
        try:
            if filled is not None:
                filled.copied()
            with torch.cuda.stream(self._stream):
                self._read(index, weights_in(buffer, layout, self._dtype))
            slot.fill(buffer[: layout.num_bytes])
        finally:
            self._staging.append((buffer, slot))


class StreamedLayers(Sequence[Layer]):
    """The layers of a decoder, in order over and over, or by number.

    A layer that was drawn may be used until another one is drawn, and no longer: its memory is the next one's. Loops
    may be left early and begun anew at any time. To draw a layer raises what reading it raised, such as `DiskError`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layouts: Sequence[LayerLayout],
        dtype: torch.dtype,
        device: torch.device,
        source: WeightSource,
    ) -> None:
        self._spec, self._layouts, self._dtype, self._source = spec, layouts, dtype, source
        stream = None
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        largest = max(layout.num_bytes for layout in layouts)
        self.slots = (Slot(largest, device, stream), Slot(largest, device, stream))
        self._drawn = 0
        self._made: dict[tuple[int, int], Layer] = {}

    def __len__(self) -> int:
        return len(self._layouts)

    @overload
    def __getitem__(self, index: int) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Layer]: ...
    def __getitem__(self, index: int | slice) -> Layer | Sequence[Layer]:
        if isinstance(index, slice):
            raise TypeError("layers that are streamed are drawn one at a time")
        return self._draw(range(len(self))[index], None)

    def __iter__(self) -> Iterator[Layer]:
        for index in range(len(self)):
            yield self._draw(index, (index + 1) % len(self))

    def _draw(self, index: int, following: int | None) -> Layer:
        """A layer, and `following` on its way behind it."""
        number = next((number for number, slot in enumerate(self.slots) if slot.layer == index), None)
        if number is None:
            # Not where the layer drawn last may still compute: the copy would wait for it.
            number = 1 - self._drawn
            self._bring(index, self.slots[number])
        slot, other = self.slots[number], self.slots[1 - number]
        try:
            slot.await_layer()
        except BaseException:
            slot.layer = slot.coming = None
            raise
        self._drawn = number
        if following is not None and following not in (index, other.layer):
            self._bring(following, other)
        if (number, index) not in self._made:
            self._made[number, index] = layer_in(slot.buffer, self._spec, index, self._layouts[index], self._dtype)
        return self._made[number, index]

    def _bring(self, index: int, slot: Slot) -> None:
        slot.release()
        slot.coming = self._source.bring(index, slot)
        slot.layer = index
