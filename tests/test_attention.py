"""Attention of pieces against plain softmax attention: merged extents, windows, sinks and soft-caps, on CPU and GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from longbatch.attention import DecodeStep, DeviceRows, Extent, Piece, Segment, attend, decode_attention
from longbatch.attention.state import merge, partial
from longbatch.cache import KVCache, Writes

CPU_CASE = pytest.param("cpu", torch.float32, 1e-5, id="cpu-float32")
GPU_CASES = [
    pytest.param("cuda", torch.float32, 1e-3, id="cuda-float32", marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, 8e-3, id="cuda-bfloat16", marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float16, 2e-3, id="cuda-float16", marks=pytest.mark.gpu),
]
DEVICES = pytest.mark.parametrize(("device", "dtype", "tolerance"), [CPU_CASE, *GPU_CASES])


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Queries at positions start.. over keys from position 0, in float64."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    distance = torch.arange(start, start + len(q), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
    scores = scores.masked_fill((distance < 0) | (distance >= (window or len(k) + 1)), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def tensors(length: int, heads: int, kv_heads: int, dim: int, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length * 31 + heads)
    shapes = [(length, heads, dim), (length, kv_heads, dim), (length, kv_heads, dim)]
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return q, k, v


@DEVICES
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (9, 3, 64), (8, 1, 128), (7, 1, 96), (4, 2, 256)])
@pytest.mark.parametrize("length", [1, 63, 200])
def test_states_merge_exactly(
    heads: int, kv_heads: int, dim: int, length: int, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    q, k, v = tensors(2 * length, heads, kv_heads, dim, device, dtype)
    own = partial(q[length:], k[length:], v[length:], scale=0.1, causal=True)
    before = partial(q[length:], k[:length], v[:length], scale=0.1)
    merged = merge([before, own])
    assert relative_error(merged.out, reference(q[length:], k, v, length, scale=0.1)) < tolerance


@DEVICES
@pytest.mark.parametrize("window", [None, 1, 30, 300])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_attend_over_split_extents(
    window: int | None, softcap: float | None, sinks: bool, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Keys of positions 0..99 in scattered pages, the rest in the step."""
    q, k, v = tensors(400, 6, 2, 64, device, dtype)
    logits = torch.linspace(-1, 2, 6, device=device) if sinks else None
    cache = KVCache([(2, 64)], 5, dtype=dtype, device=torch.device(device))
    pages = np.array([3, 1], dtype=np.int32)
    slots = torch.cat([torch.arange(192, 256), torch.arange(64, 100)]).to(device)
    cache.write(0, Writes(slots), k[:100], v[:100])
    segment = Segment(0, 100, 300, (Extent(0, 100, pages=pages),))

    def read(extent: Extent, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return cache.read(0, pages, start, stop) if extent.base is None else (k[start:stop], v[start:stop])

    for start, stop in ((100, 101), (100, 228), (350, 400)):
        found = attend(
            q[start:stop],
            Piece(segment, start, stop),
            read,
            scale=0.125,
            window=window,
            softcap=softcap,
            sinks=logits,
        )
        expected = reference(
            q[start:stop], k[:stop], v[:stop], start, scale=0.125, window=window, softcap=softcap, sinks=logits
        )
        assert relative_error(found, expected) < tolerance


@DEVICES
@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_decode(
    window: int | None, softcap: float | None, sinks: bool, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    lengths, tables = (1, 64, 150), (np.array([4]), np.array([0]), np.array([3, 1, 2]))
    cache = KVCache([(2, 64)], 5, dtype=dtype, device=torch.device(device))
    logits = torch.linspace(-1, 2, 6, device=device) if sinks else None
    rows = [tensors(length, 6, 2, 64, device, dtype) for length in lengths]
    for (_, k, v), table, length in zip(rows, tables, lengths, strict=True):
        slots = torch.from_numpy((table[:, None] * 64 + np.arange(64)).reshape(-1)[:length]).to(device)
        cache.write(0, Writes(slots), k, v)
    q = torch.stack([row[0][-1] for row in rows])
    device_rows = None
    if device == "cuda":
        padded = np.zeros((3, 3), dtype=np.int32)
        for b, table in enumerate(tables):
            padded[b, : len(table)] = table
        counts = torch.tensor(lengths, dtype=torch.int32, device=device)
        device_rows = DeviceRows(torch.from_numpy(padded).to(device), counts, torch.zeros_like(counts))
    step = DecodeStep(max(lengths), tables, lengths, device=device_rows)
    found = decode_attention(q, cache, 0, step, scale=0.125, window=window, softcap=softcap, sinks=logits)
    for b, (_, k, v) in enumerate(rows):
        expected = reference(
            q[b : b + 1], k, v, lengths[b] - 1, scale=0.125, window=window, softcap=softcap, sinks=logits
        )
        assert relative_error(found[b : b + 1], expected) < tolerance
