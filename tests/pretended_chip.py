"""Launchers run on a machine without a GPU as on a chip of one's choice: their kernels are compiled and not run.

Everything between a launcher's arguments and the machine code is the real thing: its choices of tiles, the signature
that Triton reads off the arguments, the compiler. Only three things are pretended, and only in this process: the
driver's target, what torch says about the device, and the place where tensors say they live (it is the host).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Chip(NamedTuple):
    """What a compute capability has. shared_memory: bytes that one block can ask for (CUDA C++ programming guide,
    technical specifications per compute capability)."""

    arch: int
    shared_memory: int
    num_processors: int


CHIPS = {
    chip.arch: chip
    for chip in (
        Chip(80, 163 << 10, 108),
        Chip(86, 99 << 10, 84),
        Chip(89, 99 << 10, 142),
        Chip(90, 227 << 10, 132),
        Chip(100, 227 << 10, 148),
        Chip(120, 99 << 10, 170),
    )
}
# Columns of tensor memory that sm_100 has.
TENSOR_MEMORY = 512
DEVICE = torch.device("cuda", 0)


class Compiled(NamedTuple):
    """One kernel that a launcher asked for. stack: bytes of local memory per thread, spills for the most part."""

    kernel: str
    shared: int
    tensor_memory: int
    registers: int
    stack: int


def pretend(chip: Chip) -> list[Compiled]:
    """From now on this process has that chip. The list grows by one with each launch."""
    properties = SimpleNamespace(
        major=chip.arch // 10,
        minor=chip.arch % 10,
        multi_processor_count=chip.num_processors,
        shared_memory_per_block_optin=chip.shared_memory,
    )
    driver.set_active(_Driver(chip))
    for name, value in (
        ("get_device_properties", properties),
        ("get_device_capability", (properties.major, properties.minor)),
    ):
        setattr(torch.cuda, name, lambda device=None, value=value: value)
    torch.Tensor.device = property(lambda self: DEVICE)
    torch.Tensor.is_cuda = property(lambda self: True)
    _OnTheHost().__enter__()
    compiled: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        facts = kernel.metadata
        compiled.append(
            Compiled(
                self.fn.__name__, facts.shared, getattr(facts, "tmem_size", 0) or 0, *_resources(kernel.asm["cubin"])
            )
        )
        return kernel

    JITFunction.run = compile_only
    return compiled


class _Driver:
    """What Triton asks of a driver before it compiles, and what launchers ask of it."""

    def __init__(self, chip: Chip) -> None:
        self._target = GPUTarget("cuda", chip.arch, 32)
        facts = {"max_shared_mem": chip.shared_memory, "multiprocessor_count": chip.num_processors}
        self.utils = SimpleNamespace(get_device_properties=lambda device: facts)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _OnTheHost(TorchFunctionMode):
    """What is asked for on the device is made on the host; and as no kernel fills new tensors, zeros do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [_host(x) for x in args]
        result = func(*args, **{name: _host(x) for name, x in (kwargs or {}).items()})
        return result.zero_() if func.__name__ in ("empty", "empty_like", "empty_strided", "new_empty") else result


def _host(x: Any) -> Any:
    return "cpu" if isinstance(x, torch.device) or (isinstance(x, str) and x.startswith("cuda")) else x


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack per thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])
