"""The mixed-precision norm kernel against its reference: interpreted on a CPU, compiled where there is a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from longbatch_kernels.rms_norm import rms_norm, rms_norm_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (63, 127), (5, 640), (0, 8)])
def test_equals_reference(num_tokens: int, size: int) -> None:
    x = torch.randn(num_tokens, size + 5, device=DEVICE)[:, :size]
    weight = torch.rand(size, device=DEVICE)
    found = rms_norm(x, weight, 1e-6)
    assert found.is_contiguous()
    torch.testing.assert_close(found, rms_norm_ref(x, weight, 1e-6), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_float32_weight_on_bfloat16() -> None:
    x = torch.randn(200, 5376, device=DEVICE).bfloat16()
    weight = 1 + torch.rand(5376, device=DEVICE) / 256  # bfloat16 could not tell it from 1
    found = rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(found, rms_norm_ref(x, weight, 1e-6), rtol=1e-2, atol=1e-3)
    assert (found != rms_norm(x, torch.ones_like(weight), 1e-6)).any()
