"""What this machine has and lacks: versions, devices, optional parts, disk, limits, Slurm, caches.

Each finding is one line; a warning or a failure says what would mend it. Nothing here changes anything but the
remembered rates.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from longbatch import device
from longbatch.config import Settings
from longbatch.errors import DeviceError, ExitCode
from longbatch.folders import cache_folder

VERSIONS = ("torch", "triton", "numpy", "pyarrow", "tokenizers", "safetensors", "huggingface_hub", "transformers")
GIBIBYTE = 1 << 30
LEAST_FREE_BYTES = 5 * GIBIBYTE
LEAST_OPEN_FILES = 1024
# What a part is for, the module that brings it, and what installs it.
PARTS = (
    ("kernels on the GPU", "triton", "pip install triton"),
    ("tokenizers without tokenizer.json", "transformers", "pip install 'longbatch[hub]'"),
    ("fast downloads from the hub", "hf_xet", "pip install 'longbatch[hub]'"),
    ("PDF documents", "pypdf", "pip install 'longbatch[documents]'"),
    ("results in a data frame", "pandas", "pip install 'longbatch[report]'"),
    ("sound", "soundfile", "pip install soundfile"),
    ("pictures", "PIL", "pip install pillow"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact. status: ok, warn or fail; hint: what mends a warning or a failure."""

    section: str
    name: str
    value: str
    status: str = "ok"
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that was found, in the order in which it is printed."""

    items: tuple[Finding, ...]

    @property
    def exit_code(self) -> ExitCode:
        """DEVICE when something that every run needs is missing."""
        failed = any(item.status == "fail" for item in self.items)
        return ExitCode.DEVICE if failed else ExitCode.OK

    def lines(self) -> list[str]:
        """The findings as text, a heading per section."""
        width = max(len(item.name) for item in self.items)
        lines, section = [], ""
        for item in self.items:
            if item.section != section:
                lines += ["", item.section] if section else [item.section]
                section = item.section
            mark = {"ok": " ", "warn": "?", "fail": "!"}[item.status]
            lines.append(f"{mark} {item.name:{width}}  {item.value}")
            if item.hint:
                lines.append(f"  {'':{width}}  {item.hint}")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """The findings as JSON values, by section and name."""
        table: dict[str, Any] = {"ok": self.exit_code == ExitCode.OK}
        for item in self.items:
            entry = {"value": item.value, "status": item.status} | ({"hint": item.hint} if item.hint else {})
            table.setdefault(item.section, {})[item.name] = entry
        return table


def examine(settings: Settings, *, measure_anew: bool = False) -> Findings:
    """Look at everything. measure_anew: measure the devices even if their rates are remembered."""
    return Findings(
        (
            *_versions(),
            *_devices(settings, measure_anew),
            *_parts(),
            *_disk(),
            *_limits(),
            *_slurm(),
            *_caches(),
        )
    )


def _versions() -> Iterator[Finding]:
    from longbatch import __version__

    yield Finding("versions", "longbatch", __version__)
    yield Finding("versions", "python", f"{platform.python_version()} {sys.executable}")
    yield Finding("versions", "system", platform.platform())
    for name in VERSIONS:
        version = _version(name)
        if version is not None:
            yield Finding("versions", name, version)
    driver = Path("/proc/driver/nvidia/version")
    if driver.is_file():
        yield Finding("versions", "nvidia driver", driver.read_text().splitlines()[0].removeprefix("NVRM version: "))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices(settings: Settings, measure_anew: bool) -> Iterator[Finding]:
    try:
        found = device.detect(settings.gpus)
    except DeviceError as error:
        yield Finding("devices", "GPU", error.message, "fail", error.hint or "")
        found = [device.cpu_info()]
    for info in found:
        yield _device(info)
        dtype = device.default_dtype(info) if settings.dtype == "auto" else settings.dtype
        rates = device.rates(info, dtype, cache_folder(), refresh=measure_anew)
        yield Finding(
            "devices",
            f"{info.torch_name} rates",
            f"{dtype}: products {rates.gemm_flops / 1e12:.3g} TFLOP/s, attention "
            f"{rates.attention_flops / 1e12:.3g} TFLOP/s, memory {rates.bandwidth / 1e9:.3g} GB/s"
            + (f", from the host {rates.host_to_device / 1e9:.3g} GB/s" if rates.host_to_device else ""),
        )
        yield from _dense_kernels(info, dtype)
    yield from _peers(found)


def _dense_kernels(info: device.DeviceInfo, dtype: str) -> Iterator[Finding]:
    """What runs measured on the device, for the layers of their models."""
    if info.on_gpu:
        from longbatch.attention.choice import choices_key, read_choices

        for shape, choice in read_choices(cache_folder(), choices_key(info, dtype)).items():
            yield Finding("devices", f"{info.torch_name} {shape}", f"dense attention: {choice.describe()}")


def _device(info: device.DeviceInfo) -> Finding:
    value = f"{info.name}, {info.memory_bytes / GIBIBYTE:.1f} GiB, {info.free_bytes / GIBIBYTE:.1f} GiB free"
    if not info.on_gpu:
        return Finding("devices", info.torch_name, value)
    value += f", compute capability {info.capability[0]}.{info.capability[1]}"
    if info.capability < (7, 0):
        return Finding("devices", info.torch_name, value, "fail", "needs compute capability 7.0 or newer; use --gpus 0")
    if info.free_bytes < info.memory_bytes // 2:
        return Finding("devices", info.torch_name, value, "warn", "another process holds much of its memory")
    return Finding("devices", info.torch_name, value)


def _peers(found: list[device.DeviceInfo]) -> Iterator[Finding]:
    if len(found) < 2 or not found[0].on_gpu:
        return
    import torch

    pairs = [(a.index, b.index) for a in found for b in found if a.index < b.index]
    linked = sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
    yield Finding("devices", "peer access", f"{linked} of {len(pairs)} pairs of GPUs")


def _parts() -> Iterator[Finding]:
    for purpose, module, install in PARTS:
        if importlib.util.find_spec(module) is not None:
            yield Finding("optional parts", purpose, module)
        else:
            yield Finding("optional parts", purpose, "missing", "warn", install)
    readers = [module for module in ("decord", "av") if importlib.util.find_spec(module) is not None]
    status, hint = ("ok", "") if readers else ("warn", "pip install av")
    yield Finding("optional parts", "video", ", ".join(readers) or "missing", status, hint)


def _disk() -> Iterator[Finding]:
    places = {"working folder": Path.cwd(), "temporary files": Path(tempfile.gettempdir()), "cache": cache_folder()}
    if Path("/dev/shm").is_dir():
        places["shared memory"] = Path("/dev/shm")
    for name, folder in places.items():
        # A cache that does not exist yet will be made on the file system of its nearest parent.
        there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
        free = shutil.disk_usage(there).free
        value = f"{free / GIBIBYTE:.1f} GiB free at {folder}"
        if not os.access(there, os.W_OK):
            yield Finding("disk", name, f"{value}, not writable", "warn", f"make {there} writable")
        elif free < LEAST_FREE_BYTES and name != "shared memory":
            yield Finding("disk", name, value, "warn", "results and models need more; free some space")
        else:
            yield Finding("disk", name, value)


def _limits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    low = files != resource.RLIM_INFINITY and files < LEAST_OPEN_FILES
    hint = f"ulimit -n {LEAST_OPEN_FILES}" if low else ""
    yield Finding("limits", "open files", _limit_text(files), "warn" if low else "ok", hint)
    memory = resource.getrlimit(resource.RLIMIT_AS)[0]
    hint = "" if memory == resource.RLIM_INFINITY else "CUDA reserves address space freely; ulimit -v unlimited"
    yield Finding("limits", "address space", _limit_text(memory), "warn" if hint else "ok", hint)
    yield Finding("limits", "cores", str(device.usable_cores()))


def _limit_text(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _slurm() -> Iterator[Finding]:
    job = os.environ.get("SLURM_JOB_ID")
    if job:
        task = os.environ.get("SLURM_PROCID", "0")
        yield Finding("slurm", "job", f"{job}, task {task} of {os.environ.get('SLURM_NTASKS', '1')}")
    else:
        there = shutil.which("sbatch")
        yield Finding("slurm", "job", "none; sbatch is there" if there else "none, and no sbatch here")


def _caches() -> Iterator[Finding]:
    yield Finding("caches", "longbatch", f"{_folder_bytes(cache_folder()) / GIBIBYTE:.2f} GiB at {cache_folder()}")
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    hub = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    models = len(list(hub.glob("models--*"))) if hub.is_dir() else 0
    yield Finding("caches", "hub", f"{models} models at {hub}")
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        yield Finding("caches", "hub access", "off by HF_HUB_OFFLINE=1")


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            if not os.path.islink(path) and os.path.exists(path):
                total += os.path.getsize(path)
    return total
