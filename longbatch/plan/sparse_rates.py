"""How fast a device runs selections: measured once, remembered beside the device's other rates. Torch-free.

Measuring needs torch and the GPU, so it happens in a child process (`longbatch.engine.sparse_measure`).
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from longbatch.device import DeviceInfo, kernels_key
from longbatch.errors import DeviceError
from longbatch.folders import write_table

RATES_FILE = "sparse-rates.json"
MEASURE_MODULE = "longbatch.engine.sparse_measure"


@dataclass(frozen=True, slots=True)
class SparseRates:
    """What a device was measured to do with attention, all heads of a layer in one launch.

    device: its name. Rates count the operations of the selected (query, key) pairs, 4 x head dimension each, and never
    those of a kernel's larger tiles: dense_flops of causal attention; ranges_flops of `Ranges` with one selection per
    query head; shared_flops of `Ranges` with one per kv group; blocks_flops of `Blocks`. estimate_seconds: scoring the
    keys by the last queries, choosing, and preparing the lists, for each key and query head; shared_estimate_seconds:
    likewise where the heads of a kv group choose together. pooled_seconds: pooled scores for each pair of 64-token
    blocks and query head. antidiagonal_flops: antidiagonal scores, 2 x head dimension / stride for each causal pair.
    layer_seconds: what a sparse layer costs whatever its length.
    """

    device: str
    dense_flops: float
    ranges_flops: float
    shared_flops: float
    blocks_flops: float
    estimate_seconds: float
    shared_estimate_seconds: float
    pooled_seconds: float
    antidiagonal_flops: float
    sampled_flops: float
    layer_seconds: float

    @property
    def sharing_pays(self) -> bool:
        """Whether one selection for a kv group can cost less than one of the same size for each head."""
        return self.shared_flops > self.ranges_flops or self.shared_estimate_seconds < self.estimate_seconds

    def __post_init__(self) -> None:
        for item in fields(self)[1:]:
            value = getattr(self, item.name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
                raise ValueError(f"{item.name} must be a positive number, not {value!r}")


# What a profile is priced for where the device itself only checks selections, by masking: one H200 as it was measured,
# with bfloat16, head dimension 128, 32 query and 8 kv heads.
REFERENCE = SparseRates(
    device="NVIDIA H200 (reference)",
    dense_flops=558e12,
    ranges_flops=417e12,
    shared_flops=521e12,
    blocks_flops=127e12,
    estimate_seconds=8.0e-10,
    shared_estimate_seconds=6.3e-10,
    pooled_seconds=4.3e-11,
    antidiagonal_flops=106e12,
    sampled_flops=200e12,
    layer_seconds=2.6e-3,
)

# No device: selected pairs alone cost, all alike, so that the least price is the least density. (No rate may be 0.)
PAIRS = SparseRates(
    device="selected pairs alone",
    dense_flops=1e12,
    ranges_flops=1e12,
    shared_flops=1e12,
    blocks_flops=1e12,
    estimate_seconds=1e-30,
    shared_estimate_seconds=1e-30,
    pooled_seconds=1e-30,
    antidiagonal_flops=1e40,
    sampled_flops=1e40,
    layer_seconds=1e-30,
)


def sparse_rates(
    info: DeviceInfo, dtype: str, folder: Path, say: Callable[[str], None] = lambda text: None
) -> SparseRates | None:
    """The device's rates for `dtype`: remembered in `folder`, else measured now by a child process. None on a CPU and
    in float32, where a selection runs as masked dense attention and nothing is gained by it. say: told, in one line,
    when a measurement begins.

    Raises DeviceError where the measurement fails.
    """
    if not info.on_gpu or dtype == "float32":
        return None
    key = kernels_key(info, dtype, "torch", "triton")
    remembered = read_rates(folder / RATES_FILE).get(key)
    if remembered is not None:
        return remembered
    say(f"measuring sparse attention on {info.name} in {dtype}, once, for some seconds")
    command = [sys.executable, "-m", MEASURE_MODULE, info.torch_name, dtype]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        measured = SparseRates(**json.loads(child.stdout.strip().rpartition("\n")[2]))
    except (ValueError, TypeError) as error:
        reason = child.stderr.strip().rpartition("\n")[2] or f"the measurement ended with {child.returncode}"
        raise DeviceError(f"sparse attention could not be measured on {info.name}: {reason}") from error
    remember(folder / RATES_FILE, key, measured)
    return measured


def read_rates(path: Path) -> dict[str, SparseRates]:
    """Remembered rates by key; none where the file is missing or damaged, which measuring again mends."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        return {key: SparseRates(**value) for key, value in json.loads(path.read_text(encoding="utf-8")).items()}
    return {}


def remember(path: Path, key: str, rates: SparseRates) -> None:
    """Add rates to the file."""
    table = {**read_rates(path), key: rates}
    write_table(path, {name: asdict(value) for name, value in table.items()})
