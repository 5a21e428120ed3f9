"""The norm-and-rotate kernel against its reference: interpreted on a CPU, compiled where there is a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from longbatch_kernels.qk_rope import qk_rope, qk_rope_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def values(num_tokens: int, heads: int, dim: int, half: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens + heads)
    x = torch.randn(num_tokens, heads, dim, generator=generator)
    angles = torch.rand(num_tokens, half, generator=generator) * 6
    return x.to(DEVICE, dtype), angles.cos().to(DEVICE), angles.sin().to(DEVICE)


@pytest.mark.parametrize("num_tokens", [1, 63, 127])
@pytest.mark.parametrize(
    ("num_q", "num_k", "dim", "half"),
    [
        pytest.param(4, 2, 32, 16, id="grouped"),
        pytest.param(17, 1, 20, 10, id="odd-heads"),
        pytest.param(9, 0, 16, 8, id="queries-only"),
        pytest.param(0, 3, 64, 32, id="keys-only"),
        pytest.param(3, 3, 24, 9, id="partial"),
    ],
)
@pytest.mark.parametrize("norm", [False, True])
def test_equals_reference(num_tokens: int, num_q: int, num_k: int, dim: int, half: int, norm: bool) -> None:
    x, cos, sin = values(num_tokens, num_q + num_k + 2, dim, half, torch.float32)
    weights = [torch.rand(dim, device=DEVICE) + 0.5 for _ in range(2)] if norm else [None, None]
    before = x.clone()
    found = qk_rope(x, num_q, num_k, cos, sin, *weights, eps=1e-5)
    expected = qk_rope_ref(x, num_q, num_k, cos, sin, *weights, eps=1e-5)
    for own, wanted in zip(found, expected, strict=True):
        assert own.is_contiguous()
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(x, before)


def test_one_weight_is_enough_for_one_kind() -> None:
    x, cos, sin = values(5, 4, 16, 8, torch.float32)
    weight = torch.rand(16, device=DEVICE)
    torch.testing.assert_close(qk_rope(x, 4, 0, cos, sin, weight)[0], qk_rope_ref(x, 4, 0, cos, sin, weight)[0])
    k = qk_rope(x, 0, 2, cos, sin, None, weight)[1]
    torch.testing.assert_close(k, qk_rope_ref(x, 0, 2, cos, sin, None, weight)[1])


def test_no_tokens() -> None:
    x, cos, sin = values(0, 6, 16, 8, torch.float32)
    q, k = qk_rope(x, 4, 2, cos, sin)
    assert (q.shape, k.shape) == ((0, 4, 16), (0, 2, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, norm: bool) -> None:
    x, cos, sin = values(200, 48, 128, 64, dtype)
    weights = [torch.rand(128, device=DEVICE).to(dtype) for _ in range(2)] if norm else [None, None]
    found = qk_rope(x, 32, 8, cos, sin, *weights)
    for own, wanted in zip(found, qk_rope_ref(x, 32, 8, cos, sin, *weights), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-2, atol=1e-3)
