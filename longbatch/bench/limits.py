"""What the hardware itself allows: matrix products at the shapes of a model, warm and back to back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longbatch import device

if TYPE_CHECKING:
    import torch

MOST_ROWS = 16_384


@dataclass(frozen=True, slots=True)
class Limits:
    """gemm_seconds: each product of the shapes given, once, over `rows` rows. bandwidth: bytes read and written per
    second by a copy."""

    rows: int
    gemm_seconds: tuple[float, ...]
    bandwidth: float


def measure_limits(
    products: Sequence[tuple[int, int]], num_tokens: int, device_name: str, dtype_name: str, seconds: float = 0.5
) -> Limits:
    """Time the products (inputs, outputs) over `num_tokens` rows or 16,384, whichever is less. Each shape runs for
    `seconds` to warm up, so that clocks are those of a long prefill, and for as long again under the clock. dtype_name:
    torch's, or `fp8`: e4m3 rows and weights, quantized before, as longbatch multiplies them."""
    import torch

    info = next(info for info in device.detect() if info.torch_name == device_name)
    bandwidth = device.measure(info, "bfloat16" if dtype_name == "fp8" else dtype_name).bandwidth
    place = torch.device(device_name)
    rows, found = min(num_tokens, MOST_ROWS), []
    with torch.inference_mode():
        for num_inputs, num_outputs in products:
            product = _product(rows, num_inputs, num_outputs, place, dtype_name)

            def multiply(times: int, product: Callable[[], object] = product) -> float:
                """Seconds for each of `times` products."""
                start = time.perf_counter()
                for _ in range(times):
                    product()
                if place.type == "cuda":
                    torch.cuda.synchronize(place)
                return (time.perf_counter() - start) / times

            multiply(1)
            times = max(1, int(seconds / multiply(2)))
            multiply(times)
            found.append(multiply(times))
    return Limits(rows, tuple(found), bandwidth)


def _product(
    rows: int, num_inputs: int, num_outputs: int, place: torch.device, dtype_name: str
) -> Callable[[], object]:
    """One product of random numbers, ready to run."""
    import torch

    from longbatch.models.fp8 import Fp8Weight, quantize_rows
    from longbatch.models.linear import linear

    dtype = torch.bfloat16 if dtype_name == "fp8" else getattr(torch, dtype_name)
    left = torch.randn(rows, num_inputs, device=place, dtype=dtype)
    weight = torch.randn(num_outputs, num_inputs, device=place, dtype=dtype) * 0.02
    if dtype_name == "fp8":
        narrow, small = quantize_rows(left), Fp8Weight.of(weight)
        return lambda: linear(narrow, small)
    out = torch.empty(rows, num_outputs, device=place, dtype=dtype)
    return lambda: torch.mm(left, weight.t(), out=out)
