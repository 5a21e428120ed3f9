"""The gate kernel against its reference: interpreted on a CPU, compiled where there is a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from longbatch_kernels.gated import ACTIVATIONS, gated, gated_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 63), (2, 2049), (0, 8)])
def test_equals_reference_in_place(activation: str, num_tokens: int, size: int) -> None:
    whole = 6 * torch.randn(num_tokens, 2 * size + 3, device=DEVICE)
    gate_up = whole[:, : 2 * size]
    expected, up, beyond = gated_ref(gate_up, activation), gate_up[:, size:].clone(), whole[:, 2 * size :].clone()
    found = gated(gate_up, activation)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert found.data_ptr() == gate_up.data_ptr()
    assert torch.equal(gate_up[:, size:], up)
    assert torch.equal(whole[:, 2 * size :], beyond)


def test_clamps_at_its_limit() -> None:
    gate_up = torch.tensor([[100.0, -100.0, 3.0, 100.0, -100.0, -3.0]], device=DEVICE)
    expected = gated_ref(gate_up, "clamped", alpha=1.5, limit=2.0)
    torch.testing.assert_close(gated(gate_up, "clamped", alpha=1.5, limit=2.0), expected)


def test_extreme_gates_stay_finite() -> None:
    for activation in ACTIVATIONS:
        gate_up = torch.tensor([[-1e4, -89.0, 0.0, 89.0, 1.0, 1.0, 1.0, 1.0]], device=DEVICE)
        expected = gated_ref(gate_up, activation)
        torch.testing.assert_close(gated(gate_up, activation), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(activation: str, dtype: torch.dtype) -> None:
    gate_up = (3 * torch.randn(200, 2 * 2880, device=DEVICE)).to(dtype)
    expected = gated_ref(gate_up, activation)
    torch.testing.assert_close(gated(gate_up, activation), expected, rtol=1e-2, atol=1e-3)
