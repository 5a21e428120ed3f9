"""The block score kernels against their references: interpreted on a CPU, compiled where there is a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from longbatch_kernels.block_scores import (
    antidiagonal_scores,
    antidiagonal_scores_ref,
    pooled,
    pooled_ref,
    pooled_scores,
    pooled_scores_ref,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is NaN, so that a place nobody writes shows."""

    def empty(*size: object, **options: object) -> torch.Tensor:
        return real(*size, **options).fill_(float("nan"))  # type: ignore[call-overload]

    real = torch.empty
    monkeypatch.setattr(torch, "empty", empty)


def rows_of(
    num_rows: int, heads: int, dim: int, dtype: torch.dtype = torch.float32, device: str = DEVICE
) -> torch.Tensor:
    """Random [n, H, D] with gaps of NaN between rows and heads, and beyond the end."""
    generator = torch.Generator(device).manual_seed(num_rows + heads)
    x = torch.full((num_rows + 40, heads + 1, dim), float("nan"), dtype=dtype, device=device)
    x[:num_rows, 1:] = torch.randn(num_rows, heads, dim, generator=generator, device=device).to(dtype)
    return x[:num_rows, 1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_rows", "block", "first_position", "dim"),
    [
        pytest.param(1, 64, 0, 64, id="one-row"),
        pytest.param(64, 64, 0, 96, id="one-block-dim-96"),
        pytest.param(129, 64, 0, 128, id="partial-last-block"),
        pytest.param(100, 64, 90, 64, id="partial-first-block"),
        pytest.param(5, 64, 70, 256, id="inside-one-block"),
        pytest.param(70, 16, 31, 64, id="small-blocks"),
    ],
)
def test_means_equal_reference(num_rows: int, block: int, first_position: int, dim: int, dtype: torch.dtype) -> None:
    x = rows_of(num_rows, 3, dim, dtype)
    found = pooled(x, block, first_position)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(found, pooled_ref(x, block, first_position), rtol=tolerance, atol=tolerance)


def test_means_by_hand() -> None:
    x = torch.arange(6.0, device=DEVICE)[:, None, None].expand(6, 1, 16).contiguous()
    for function in (pooled, pooled_ref):
        assert function(x, 4, 3)[:, 0, 0].tolist() == [0.0, 2.5, 5.0]


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "first_block", "heads", "kv_heads", "dim"),
    [
        pytest.param(1, 1, 0, 1, 1, 64, id="one-block"),
        pytest.param(70, 70, 0, 3, 1, 96, id="dim-96-group-3"),
        pytest.param(5, 140, 133, 4, 2, 128, id="last-tile"),
        pytest.param(9, 90, 20, 7, 1, 64, id="group-7-keys-beyond"),
        pytest.param(66, 131, 65, 8, 1, 256, id="dim-256-group-8"),
        pytest.param(3, 4, 1, 2, 2, 80, id="dim-80"),
    ],
)
def test_pooled_scores_equal_reference(
    num_rows: int, num_columns: int, first_block: int, heads: int, kv_heads: int, dim: int
) -> None:
    q, k = rows_of(num_rows, heads, dim), rows_of(num_columns, kv_heads, dim)
    found = pooled_scores(q, k, first_block=first_block)
    expected = pooled_scores_ref(q.double(), k.double(), first_block=first_block)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    assert found[:, 0].isfinite().sum(-1).eq(min(first_block + 1, num_columns)).all()


ANTIDIAGONAL = [
    # num_queries, num_keys, q_offset, heads, kv_heads, dim, stride, block
    pytest.param(1, 1, 0, 1, 1, 64, 8, 64, id="one-key"),
    pytest.param(200, 200, 0, 2, 1, 64, 8, 64, id="odd-end"),
    pytest.param(128, 384, 256, 3, 1, 96, 16, 128, id="dim-96-group-3"),
    pytest.param(61, 261, 200, 4, 2, 128, 8, 64, id="odd-start"),
    pytest.param(40, 300, 201, 7, 1, 64, 4, 32, id="keys-beyond-group-7"),
    pytest.param(64, 128, 64, 8, 1, 64, 16, 64, id="group-8"),
    pytest.param(66, 130, 64, 2, 2, 256, 32, 128, id="dim-256"),
    pytest.param(70, 70, 0, 1, 1, 64, 16, 16, id="one-group-per-block"),
    pytest.param(90, 90, 0, 1, 1, 64, 1, 64, id="stride-1"),
]


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "q_offset", "heads", "kv_heads", "dim", "stride", "block"), ANTIDIAGONAL
)
def test_antidiagonals_equal_reference(
    num_queries: int, num_keys: int, q_offset: int, heads: int, kv_heads: int, dim: int, stride: int, block: int
) -> None:
    q, k = rows_of(num_queries, heads, dim), rows_of(num_keys, kv_heads, dim)
    options = {"stride": stride, "block": block, "scale": 0.4, "q_offset": q_offset}
    found = antidiagonal_scores(q, k, **options)
    expected = antidiagonal_scores_ref(q.double(), k.double(), **options)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_antidiagonals_by_definition() -> None:
    """Group by group, in loops, from the formula."""
    stride, block, q_offset = 4, 8, 10
    q, k = rows_of(9, 1, 64), rows_of(19, 1, 64)
    zero = torch.zeros(64, device=DEVICE)
    queries = {q_offset + i: q[i, 0] for i in range(9)}
    keys = {j: k[j, 0] for j in range(19)}
    expected = torch.zeros(1, 2, 3, device=DEVICE)
    for a in range(2, 5):
        scores = torch.zeros(a + 1, device=DEVICE)
        for b in range(a + 1):
            for i in range(stride):
                scores[b] += queries.get(a * stride + stride - 1 - i, zero) @ keys.get(b * stride + i, zero)
        for b, weight in enumerate((scores * 0.3 / stride).softmax(0)):
            expected[0, a * stride // block - 1, b * stride // block] += weight
    for function in (antidiagonal_scores, antidiagonal_scores_ref):
        found = function(q, k, stride=stride, block=block, scale=0.3, q_offset=q_offset)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_small_workspace_changes_nothing() -> None:
    q, k = rows_of(150, 6, 64), rows_of(350, 3, 64)
    options = {"stride": 8, "block": 32, "scale": 0.4, "q_offset": 200}
    whole = antidiagonal_scores(q, k, **options)
    for workspace in (1, 2 * 4 * 11 * 3, 2 * 4 * 11 * 6 * 2):
        torch.testing.assert_close(
            antidiagonal_scores(q, k, **options, workspace=workspace), whole, rtol=1e-6, atol=1e-6
        )


def test_tiles_of_a_prompt_equal_the_whole() -> None:
    q, k = rows_of(256, 2, 64), rows_of(256, 1, 64)
    options = {"stride": 8, "block": 64, "scale": 0.4}
    whole = antidiagonal_scores(q, k, **options, q_offset=0)
    tiles = [antidiagonal_scores(q[i : i + 128], k, **options, q_offset=i) for i in (0, 128)]
    torch.testing.assert_close(torch.cat(tiles, 1), whole, rtol=1e-6, atol=1e-6)


def test_half_precision() -> None:
    q, k = rows_of(100, 4, 64, torch.float16), rows_of(190, 2, 64, torch.float16)
    options = {"stride": 8, "block": 64, "scale": 0.2, "q_offset": 90}
    expected = antidiagonal_scores_ref(q.double(), k.double(), **options)
    assert relative_error(antidiagonal_scores(q, k, **options), expected) < 2e-3
    means = pooled_scores(pooled(q, 16, 90), pooled(k, 16), first_block=90 // 16)
    expected = pooled_scores_ref(pooled_ref(q, 16, 90), pooled_ref(k, 16), first_block=90 // 16)
    seen = expected.isfinite()
    assert torch.equal(means.isfinite(), seen)
    assert relative_error(means[seen], expected[seen]) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("stride", "block"), [(8, 128), (16, 128), (16, 64)])
def test_real_antidiagonals(stride: int, block: int, dim: int, dtype: torch.dtype) -> None:
    q, k = rows_of(8192 - 1, 6, dim, dtype, "cuda"), rows_of(131_072 - 1, 2, dim, dtype, "cuda")
    # Scores that spread like a model's: a flat softmax would hide what is wrong.
    options = {"stride": stride, "block": block, "scale": 1.0, "q_offset": 131_072 - 8192}
    expected = antidiagonal_scores_ref(q.float(), k.float(), **options)
    found = antidiagonal_scores(q, k, **options)
    assert relative_error(found, expected) < 4e-3
    assert torch.equal(antidiagonal_scores(q, k, **options, workspace=1 << 20), found)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_real_means(dim: int, dtype: torch.dtype) -> None:
    q, k = rows_of(16_000, 7, dim, dtype, "cuda"), rows_of(300_001, 1, dim, dtype, "cuda")
    q_means, k_means = pooled(q, 64, 284_001), pooled(k, 64)
    assert relative_error(k_means, pooled_ref(k.double(), 64)) < 4e-3
    assert relative_error(q_means, pooled_ref(q.double(), 64, 284_001)) < 4e-3
    found = pooled_scores(q_means, k_means, first_block=284_001 // 64)
    expected = pooled_scores_ref(q_means.double(), k_means.double(), first_block=284_001 // 64)
    seen = expected.isfinite()
    assert torch.equal(found.isfinite(), seen)
    assert relative_error(found[seen], expected[seen]) < 1e-5


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    num_keys = (1 << 31) // (8 * 128) + 4096
    k = torch.zeros((num_keys, 8, 128), dtype=torch.bfloat16, device="cuda")
    k[-4096:].normal_()
    q = torch.randn(1024, 8, 128, dtype=torch.bfloat16, device="cuda")
    options = {"stride": 16, "block": 128, "scale": 1.0, "q_offset": num_keys - 1024}
    found = antidiagonal_scores(q, k, **options)
    expected = antidiagonal_scores_ref(q[:, 7:].float(), k[:, 7:].float(), **options)
    assert relative_error(found[7:], expected) < 4e-3
    assert relative_error(pooled(k, 128)[-32:], pooled_ref(k[-4096:], 128)) < 4e-3


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected||; NaN never passes a comparison with it."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
