"""The kernels that quantize rows against their references: interpreted on a CPU, compiled where there is a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl
from longbatch_kernels.gated import ACTIVATIONS, gated_ref
from longbatch_kernels.rms_norm import rms_norm_ref
from longbatch_kernels.row_quant import gated_quant, rms_norm_quant, row_quant, row_quant_ref
from reference_driver import forward
from tiny_models import save
from triton.runtime import interpreter

from longbatch import models
from longbatch.models import blocks, fp8

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = pytest.mark.skipif(
    HAS_GPU and torch.cuda.get_device_capability() < (8, 9), reason="the GPU has no instruction for e4m3"
)


@pytest.fixture(autouse=True)
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.9's interpreter loses the carry when it rounds to e4m3, and all that is subnormal there: here torch
    rounds, as the instruction does."""
    convert = interpreter._convert_float

    def right(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(numbers, source, target, rounding)
        rounded = torch.from_numpy(np.ascontiguousarray(numbers)).to(torch.float8_e4m3fn)
        return rounded.view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", right)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def check(found: tuple[torch.Tensor, torch.Tensor], y: torch.Tensor) -> None:
    """found is y [T, N] in float32, quantized; a number that lies between two may be rounded to either."""
    data, scale = found
    wanted, wanted_scale = row_quant_ref(y)
    assert data.dtype == torch.float8_e4m3fn
    assert data.is_contiguous()
    torch.testing.assert_close(scale, wanted_scale, rtol=1e-4, atol=0)
    steps = codes(data) - codes(wanted)
    assert (steps.abs() <= 1).all()
    assert (steps != 0).float().mean().nan_to_num() < 0.01


def codes(data: torch.Tensor) -> torch.Tensor:
    """e4m3 numbers by their place in order."""
    bits = data.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (7, 127), (5, 640), (0, 8)])
def test_rows(num_tokens: int, size: int) -> None:
    x = 30 * normal(num_tokens, size + 5)[:, :size]
    check(row_quant(x), x)


def test_each_row_has_its_own_scale() -> None:
    x = normal(4, 64) * torch.tensor([1e-4, 1.0, 1e4, 1e30], device=DEVICE)[:, None]
    data, scale = row_quant(x)
    assert (data.float().abs().amax(-1) == 448).all()
    error = (data.float() * scale[:, None] - x).abs().amax(-1) / x.abs().amax(-1)
    assert error.max() < 2**-4
    check((data, scale), x)


def test_zeros_stay_zeros() -> None:
    data, scale = row_quant(torch.zeros(2, 32, device=DEVICE))
    assert (data.float() == 0).all()
    assert scale.isfinite().all()


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (7, 127), (5, 640), (0, 8)])
def test_norm(num_tokens: int, size: int) -> None:
    x = normal(num_tokens, size + 3)[:, :size]
    weight = 1 + torch.rand(size, device=DEVICE)
    check(rms_norm_quant(x, weight, 1e-6), rms_norm_ref(x, weight, 1e-6))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 63), (2, 5000), (0, 8)])
def test_gate(activation: str, num_tokens: int, size: int) -> None:
    gate_up = 3 * normal(num_tokens, 2 * size + 3)[:, : 2 * size]
    before = gate_up.clone()
    check(gated_quant(gate_up, activation, 1.5, 2.0), gated_ref(gate_up, activation, 1.5, 2.0))
    assert torch.equal(gate_up, before)


@pytest.mark.skipif(HAS_GPU, reason="there the kernels run anyway")
@pytest.mark.parametrize("case", ["llama", "gemma3", "gpt_oss"])
def test_decoders_run_through_them(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(case, tmp_path)
    decoder = models.load(tmp_path, torch.float32, torch.device("cpu"), "fp8")
    ids = torch.randint(3, 200, (40,), generator=torch.Generator().manual_seed(1))
    wanted = forward(decoder, ids)
    called = set()
    for module in (fp8, blocks):
        monkeypatch.setattr(module, "has_kernels", lambda device, module=module: not called.add(module))
    found = forward(decoder, ids)
    assert called == {fp8, blocks}
    # The order of sums decides which way a number is rounded that lies between two.
    assert ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median() < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    x = (3 * normal(200, 5376)).to(dtype)
    weight = 1 + torch.rand(5376, device=DEVICE) / 256
    check(row_quant(x), x.float())
    check(rms_norm_quant(x, weight, 1e-6), rms_norm_ref(x.float(), weight, 1e-6))
    for activation in ACTIVATIONS:
        check(gated_quant(x, activation), gated_ref(x.float(), activation))
