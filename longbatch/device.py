"""What hardware there is, and how fast it is: measured once and remembered.

torch is imported inside the functions, so that reading a plan or `--help` never pays for it.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longbatch import __version__
from longbatch.errors import DeviceError
from longbatch.folders import write_table

if TYPE_CHECKING:
    import torch

RATES_FILE = "rates.json"


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One GPU, or the CPU with all its cores. Set by `detect`.

    memory_bytes: all of the device's memory; on a CPU what this process may use (cgroup limits counted).
    free_bytes: what was free when it was looked at. capability: CUDA compute capability, (0, 0) on a CPU.
    """

    kind: str
    index: int
    name: str
    memory_bytes: int
    capability: tuple[int, int] = (0, 0)
    free_bytes: int = 0

    @property
    def on_gpu(self) -> bool:
        """Whether this is a GPU."""
        return self.kind == "cuda"

    @property
    def torch_name(self) -> str:
        """The name torch knows it by: `cpu`, `cuda:0`."""
        return f"cuda:{self.index}" if self.on_gpu else "cpu"


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device was measured to do per second.

    gemm_flops: dense matrix products. attention_flops: causal attention, counting only the pairs that it
    computes. bandwidth: bytes of memory read plus bytes written. host_to_device: bytes copied from
    page-locked host memory to a GPU; None on a CPU.
    """

    gemm_flops: float
    attention_flops: float
    bandwidth: float
    host_to_device: float | None = None


def detect(gpus: str = "auto") -> list[DeviceInfo]:
    """The devices to use: `auto` all GPUs or else the CPU, `all` every GPU, a number the first N, `0` the CPU.

    Raises DeviceError when a GPU is asked for that is not there.
    """
    if gpus == "0":
        return [cpu_info()]
    found = gpu_infos()
    if gpus == "auto":
        return found or [cpu_info()]
    wanted = max(len(found), 1) if gpus == "all" else int(gpus)
    if wanted > len(found):
        asked = "a GPU was" if wanted == 1 else f"{wanted} GPUs were"
        raise DeviceError(f"{asked} asked for, and {len(found)} can be used", hint=_missing_gpu_hint(len(found)))
    return found[:wanted]


def gpu_infos() -> list[DeviceInfo]:
    """Every GPU that torch can use, in its order (CUDA_VISIBLE_DEVICES counts)."""
    import torch

    if not torch.cuda.is_available():
        return []
    infos = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = (properties.major, properties.minor)
        infos.append(DeviceInfo("cuda", index, properties.name, total, capability, free))
    return infos


def cpu_info() -> DeviceInfo:
    """The CPU of this machine, with the memory that this process may use."""
    total, free = _host_memory()
    return DeviceInfo("cpu", 0, cpu_name(), total, free_bytes=free)


def cpu_name() -> str:
    """The processor's own name, with the number of cores this process may use."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name} x {usable_cores()}"


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def survey(gpus: str, dtype: str, folder: Path) -> tuple[list[DeviceInfo], str, Rates]:
    """The devices to use, the dtype that `dtype` means there, and the rates remembered in `folder` or measured now.

    A child process imports torch where that is needed, so that the caller neither pays for the import nor holds
    device memory. Raises DeviceError.
    """
    if gpus == "0" or (gpus == "auto" and not _may_have_gpu()):
        info = cpu_info()
        resolved = default_dtype(info) if dtype == "auto" else dtype
        remembered = _read_rates(folder / RATES_FILE).get(_rates_key(info, resolved))
        if remembered is not None:
            return [info], resolved, remembered
    command = [sys.executable, "-m", "longbatch.device", gpus, dtype, str(folder)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        message, _, hint = child.stderr.strip().rpartition("\n")[2].partition("\t")
        raise DeviceError(message or f"looking for devices ended with {child.returncode}", hint=hint or None)
    found = json.loads(child.stdout.strip().rpartition("\n")[2])
    devices = [DeviceInfo(**{**device, "capability": tuple(device["capability"])}) for device in found["devices"]]
    return devices, found["dtype"], Rates(**found["rates"])


def _survey_here(gpus: str, dtype: str, folder: Path) -> int:
    """The child of `survey`: one line of JSON, or one line of error and hint."""
    try:
        devices = detect(gpus)
    except DeviceError as error:
        sys.stderr.write(f"{error.message}\t{error.hint or ''}\n")
        return error.exit_code
    resolved = default_dtype(devices[0]) if dtype == "auto" else dtype
    found = {
        "devices": [asdict(device) for device in devices],
        "dtype": resolved,
        "rates": asdict(rates(devices[0], resolved, folder)),
    }
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def _may_have_gpu() -> bool:
    """False where it is plain without torch that there is no GPU that it could use."""
    if sys.platform != "linux":
        return sys.platform == "win32"
    return any(Path("/dev").glob("nvidia*")) or Path("/dev/dxg").exists()


def default_dtype(info: DeviceInfo) -> str:
    """What `--dtype auto` means: bfloat16 from compute capability 8.0, float16 below it, float32 on a CPU."""
    if not info.on_gpu:
        return "float32"
    return "bfloat16" if info.capability >= (8, 0) else "float16"


def kernels_key(info: DeviceInfo, dtype: str, *packages: str) -> str:
    """What the speed of kernels depends on: device, dtype, and the versions of the packages that bring them."""
    versions = [f"{name} {_version(name)}" for name in packages]
    return ", ".join([info.name, f"{info.memory_bytes >> 30} GiB", dtype, *versions, f"longbatch {__version__}"])


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def rates(info: DeviceInfo, dtype: str, folder: Path, *, refresh: bool = False) -> Rates:
    """The device's rates for `dtype`, remembered in `folder`, measured when they are not (or on `refresh`)."""
    path = folder / RATES_FILE
    key = _rates_key(info, dtype)
    remembered = _read_rates(path)
    if not refresh and key in remembered and (remembered[key].host_to_device or not info.on_gpu):
        return remembered[key]
    measured = measure(info, dtype)
    table = {**_read_rates(path), key: measured}
    write_table(path, {name: asdict(value) for name, value in table.items()})
    return measured


def measure(info: DeviceInfo, dtype: str) -> Rates:
    """Measure the device now: a matrix product, a causal attention, a copy and, on a GPU, one from the host, about
    0.1 s each."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    device, number = torch.device(info.torch_name), getattr(torch, dtype)
    size, length, heads, copied = (8192, 8192, 16, 1 << 30) if info.on_gpu else (1024, 1024, 8, 128 << 20)
    head_dim = 128 if info.on_gpu else 64
    with torch.inference_mode():
        left = torch.randn(size, size, dtype=number, device=device)
        right = torch.randn(size, size, dtype=number, device=device)
        product = torch.empty(size, size, dtype=number, device=device)
        gemm = _fastest(lambda: torch.mm(left, right, out=product), device)
        q, k, v = torch.randn(3, 1, heads, length, head_dim, dtype=number, device=device)
        attention = _fastest(lambda: scaled_dot_product_attention(q, k, v, is_causal=True), device)
        source = torch.zeros(copied, dtype=torch.uint8, device=device)
        target = torch.zeros(copied, dtype=torch.uint8, device=device)
        copy = _fastest(lambda: target.copy_(source), device)
        host_to_device = None
        if info.on_gpu:
            pinned = torch.zeros(copied // 4, dtype=torch.uint8, pin_memory=True)
            part = target[: len(pinned)]
            host_to_device = len(pinned) / _fastest(lambda: part.copy_(pinned, non_blocking=True), device)
    # Causal attention computes half of the length x length pairs, each one product with q and one with v.
    attention_flops = 4 * heads * head_dim * length * (length + 1) / 2
    return Rates(2 * size**3 / gemm, attention_flops / attention, 2 * copied / copy, host_to_device)


def _fastest(work: Callable[[], Any], device: torch.device, seconds: float = 0.1) -> float:
    """Seconds of the fastest call of `work` within about `seconds`, after one call to warm up."""
    best = math.inf
    work()
    _synchronize(device)
    end = time.perf_counter() + seconds
    while best == math.inf or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _rates_key(info: DeviceInfo, dtype: str) -> str:
    # torch's own version carries its CUDA build; read without importing it.
    parts = [info.name, f"{info.memory_bytes >> 30} GiB", dtype, f"torch {metadata.version('torch')}"]
    return ", ".join([*parts, *([] if info.on_gpu else [f"{usable_cores()} threads"])])


def _read_rates(path: Path) -> dict[str, Rates]:
    # A cache: whatever is wrong with it, measuring again mends it.
    with suppress(OSError, ValueError, TypeError, AttributeError):
        read = {key: Rates(**value) for key, value in json.loads(path.read_text()).items()}
        return {key: value for key, value in read.items() if _are_rates(asdict(value))}
    return {}


def _are_rates(values: dict[str, object]) -> bool:
    return all(_is_rate(value) or (name == "host_to_device" and value is None) for name, value in values.items())


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0


def _host_memory() -> tuple[int, int]:
    """(bytes this process may use, bytes free)."""
    total = free = 0
    with suppress(OSError, ValueError):
        total = free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    limit, used = _cgroup_memory()
    if limit is not None and limit < total:
        total, free = limit, min(free, max(limit - used, 0))
    return total, free


def _cgroup_memory() -> tuple[int | None, int]:
    """(limit, bytes used) of this process's control group, version 2 or 1; limit None where there is none."""
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):
            return int(Path(limit_file).read_text()), int(Path(used_file).read_text())
    return None, 0


def _missing_gpu_hint(num_found: int) -> str:
    import torch

    if num_found:
        return f"use --gpus {num_found}, or check CUDA_VISIBLE_DEVICES"
    if torch.version.cuda is None:
        return "this torch build has no CUDA; install a CUDA build of torch, or use --gpus 0 to run on the CPU"
    return "check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --gpus 0 to run on the CPU"


if __name__ == "__main__":
    sys.exit(_survey_here(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
