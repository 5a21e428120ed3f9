"""Where the weights of the layers are kept, and what that takes: on the device, in host memory, or on disk."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from longbatch.config.kv_formats import KVFormat
from longbatch.device import DeviceInfo, cpu_info
from longbatch.errors import DeviceError
from longbatch.models.layout import layer_layouts
from longbatch.models.parameters import weight_bytes
from longbatch.models.spec import ModelSpec
from longbatch.plan.cost import multiplies_fp8
from longbatch.plan.memory import GIB, Budget, budget

# In the order in which `auto` tries them.
PLACES = ("resident", "host", "disk")
# Host memory that is left to tokenizers, results and everybody else.
_HOST_RESERVE_BYTES = 2 * GIB
_HOST_RESERVE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class WeightsPlace:
    """What weights take in one place. place: one of `PLACES`. device_bytes: of what stays on the device.
    slot_bytes: of the two layers there that others take turns in, 0 where none do. host_bytes: page-locked in host
    memory for each device. layer_bytes: what is copied to the device in each pass over the layers."""

    place: str
    device_bytes: int
    slot_bytes: int = 0
    host_bytes: int = 0
    layer_bytes: int = 0


def weights_place(place: str, spec: ModelSpec, width: int, weights_dtype: str, on_gpu: bool) -> WeightsPlace:
    """What the weights take in a place. width: bytes of a number that is not quantized; weights_dtype: as in
    `Settings`."""
    everything = weight_bytes(spec, width, weights_dtype)
    # A CPU computes with what is in host memory where it is.
    if place == "resident" or (place == "host" and not on_gpu):
        return WeightsPlace(place, everything)
    outside = spec.vocab_size * spec.hidden_size * width * (1 if spec.tied_embeddings else 2)
    sizes = [layout.num_bytes for layout in layer_layouts(spec, width, weights_dtype)]
    slots = 2 * max(sizes)
    # From disk a GPU's layers pass through two buffers; a CPU reads them to where it computes.
    staged = sum(sizes) if place == "host" else slots if on_gpu else 0
    return WeightsPlace(place, outside, slots, staged, sum(sizes) if on_gpu else 0)


def check_host(place: WeightsPlace, num_devices: int, memory_bytes: int, free_bytes: int) -> None:
    """Raise DeviceError unless host memory holds what the weights take there, for each of the devices."""
    reserve = _HOST_RESERVE_BYTES + int(_HOST_RESERVE_SHARE * memory_bytes)
    needed = place.host_bytes * num_devices
    if place.host_bytes and needed + reserve > free_bytes:
        each = f"{num_devices} x {place.host_bytes / GIB:.1f}" if num_devices > 1 else f"{needed / GIB:.1f}"
        raise DeviceError(
            f"--weights {place.place} needs {each} GiB of host memory beside {reserve / GIB:.1f} GiB for all else,"
            f" and {free_bytes / GIB:.1f} GiB are free",
            hint="use --weights disk, fewer --gpus or --weights-dtype fp8" if place.place == "host" else "free memory",
        )


def budget_with_weights(
    asked: str,
    spec: ModelSpec,
    devices: Sequence[DeviceInfo],
    width: int,
    weights_dtype: str,
    kv: KVFormat,
    *,
    wave_tokens: int | None = None,
    kv_tokens: int | None = None,
    sparse_heads: int = 0,
    decode_rows: int = 0,
) -> Budget:
    """Share out the memory of each of some devices of one kind, with the weights where they are asked for; for `auto`,
    in the first place where they fit. width: bytes of a number that is not quantized; the rest: as for `budget`.

    Raises DeviceError where the device's memory or the host's is too little; for `auto`, in the last place.
    """
    device, host = devices[0], cpu_info()
    memory = min(device.memory_bytes, device.free_bytes or device.memory_bytes)

    def shared(name: str) -> Budget:
        place = weights_place(name, spec, width, weights_dtype, device.on_gpu)
        shares = budget(
            spec,
            memory,
            width,
            kv,
            device.on_gpu,
            wave_tokens=wave_tokens,
            kv_tokens=kv_tokens,
            weight_bytes=place.device_bytes,
            slot_bytes=place.slot_bytes,
            sparse_heads=sparse_heads,
            decode_rows=decode_rows,
            weights_dtype=weights_dtype,
            multiplies_fp8=multiplies_fp8(device.capability),
        )
        check_host(place, len(devices), host.memory_bytes, host.free_bytes)
        return replace(shares, weights=place.place, host_bytes=place.host_bytes)

    if asked != "auto":
        return shared(asked)
    *others, last = PLACES
    for name in others:
        with suppress(DeviceError):
            return shared(name)
    return shared(last)
