"""The last-query kernels against their reference: interpreted on a CPU, compiled where there is a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from longbatch_kernels.last_query import last_query, last_query_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def case(
    num_queries: int,
    num_keys: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
    device: str = DEVICE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random q and a strided k with NaN between its rows and heads, and beyond its end."""
    generator = torch.Generator(device).manual_seed(num_keys)
    q = torch.randn(num_queries, heads, dim, generator=generator, device=device)
    k = torch.full((num_keys + 70, kv_heads + 1, dim), float("nan"), dtype=dtype, device=device)
    k[:num_keys, 1:] = torch.randn(num_keys, kv_heads, dim, generator=generator, device=device).to(dtype)
    return q.to(dtype), k[:num_keys, 1:]


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is NaN, so that a place nobody writes shows."""

    def empty(*size: object, **options: object) -> torch.Tensor:
        return real(*size, **options).fill_(float("nan"))  # type: ignore[call-overload]

    real = torch.empty
    monkeypatch.setattr(torch, "empty", empty)


@pytest.mark.parametrize("shared", [False, True], ids=["per-head", "shared"])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "heads", "kv_heads", "dim"),
    [
        pytest.param(1, 1, 1, 1, 64, id="one-key"),
        pytest.param(7, 7, 2, 1, 64, id="short-prompt"),
        pytest.param(64, 64, 2, 2, 64, id="one-tile"),
        pytest.param(64, 65, 3, 1, 96, id="dim-96-group-3"),
        pytest.param(64, 127, 4, 1, 128, id="group-4"),
        pytest.param(64, 193, 7, 1, 64, id="group-7"),
        pytest.param(33, 200, 8, 1, 64, id="group-8"),
        pytest.param(64, 130, 2, 1, 256, id="dim-256"),
        pytest.param(1, 300, 4, 2, 64, id="one-query"),
    ],
)
def test_equals_reference(num_queries: int, num_keys: int, heads: int, kv_heads: int, dim: int, shared: bool) -> None:
    q, k = case(num_queries, num_keys, heads, kv_heads, dim)
    options = {"scale": 0.3, "q_offset": num_keys - num_queries, "shared": shared}
    expected = last_query_ref(q.double(), k.double(), **options)
    found = last_query(q, k, **options, split=64, length=16)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == (kv_heads if shared else heads, num_keys)
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


def test_sums_by_hand() -> None:
    """Equal scores: row r gives 1 / (q_offset + r + 1) to every key it sees."""
    _, k = case(3, 5, 1, 1, 64)
    found = last_query(torch.zeros(3, 1, 64, device=DEVICE), k, scale=1.0, q_offset=2, shared=False)
    rows = torch.tensor([1 / 3, 1 / 4, 1 / 5], device=DEVICE)
    by_key = torch.stack([rows.sum(), rows.sum(), rows.sum(), rows[1:].sum(), rows[2]])
    by_distance = torch.stack([rows.sum(), rows.sum(), rows.sum(), rows[1:].sum(), rows[2]])
    torch.testing.assert_close(found[0][0], by_key)
    torch.testing.assert_close(found[1][0], by_distance)


@pytest.mark.parametrize("shared", [False, True])
def test_planted_key_and_distance(shared: bool) -> None:
    """A key that every row looks at, or a distance that every row looks to, gets the weight of all 64 rows."""
    num_keys = 256
    at = torch.eye(256, device=DEVICE) * 16
    k = at[:, None, :].contiguous()
    by_key = last_query(at[77].repeat(64, 2, 1), k, scale=1.0, q_offset=192, shared=shared, length=32)
    assert by_key[0].argmax(1).eq(77).all()
    torch.testing.assert_close(
        by_key[0][:, 77], torch.full((1 if shared else 2,), 128.0 if shared else 64.0).to(DEVICE)
    )
    q = at[192 - 91 : num_keys - 91][:, None].repeat(1, 2, 1)
    by_distance = last_query(q, k, scale=1.0, q_offset=192, shared=shared, length=32)
    assert by_distance[1].argmax(1).eq(91).all()
    torch.testing.assert_close(by_distance[1].sum(1), by_key[0].sum(1))


def test_keys_beyond_the_last_row_count_nothing() -> None:
    q, k = case(20, 150, 2, 1, 64)
    whole = last_query(q, k, scale=0.3, q_offset=70, shared=False, split=64, length=16)
    expected = last_query_ref(q, k, scale=0.3, q_offset=70, shared=False)
    cut = last_query(q, k[:90], scale=0.3, q_offset=70, shared=False, split=64, length=16)
    for one, other, short in zip(whole, expected, cut, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert torch.equal(one[:, :90], short)
        assert not one[:, 90:].any()


@pytest.mark.parametrize("shared", [False, True])
def test_streams_change_nothing(shared: bool) -> None:
    q, k = case(50, 330, 3, 1, 64)
    found = [
        last_query(q, k, scale=0.3, q_offset=280, shared=shared, split=128, length=length)
        for length in (8, 40, 64, None)
    ]
    for vertical, slash in found[1:]:
        # The CPU's matrix product rounds a row by its place; a GPU's does not (test_real_sizes).
        torch.testing.assert_close(vertical, found[0][0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(slash, found[0][1], rtol=1e-5, atol=1e-6)


def test_half_precision() -> None:
    q, k = case(64, 260, 4, 2, 96, torch.float16)
    expected = last_query_ref(q.double(), k.double(), scale=0.1, q_offset=196, shared=False)
    found = last_query(q, k, scale=0.1, q_offset=196, shared=False, split=128, length=32)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 2e-3


def test_large_scores() -> None:
    """Scores of hundreds, whose exponentials float32 cannot hold."""
    q, k = case(64, 200, 2, 1, 64)
    expected = last_query_ref(q.double(), k.double(), scale=40.0, q_offset=136, shared=False)
    found = last_query(q, k, scale=40.0, q_offset=136, shared=False, split=64, length=16)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_queries", "num_keys", "group"), [(64, 131_072, 4), (64, 300_001, 7), (19, 65_537, 3)])
def test_real_sizes(num_queries: int, num_keys: int, group: int, dim: int, dtype: torch.dtype, shared: bool) -> None:
    q, k = case(num_queries, num_keys, 2 * group, 2, dim, dtype, "cuda")
    options = {"scale": dim**-0.5, "q_offset": num_keys - num_queries, "shared": shared}
    expected = last_query_ref(q.double(), k.double(), **options)
    found = last_query(q, k, **options)
    again = last_query(q, k, **options, length=104)
    for one, other, same in zip(found, expected, again, strict=True):
        assert relative_error(one, other) < 4e-3
        assert torch.equal(one, same)


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """A layer of 2^31 numbers and more, all but its last keys equal."""
    num_keys = (1 << 31) // (8 * 128) + 4096
    k = torch.zeros((num_keys, 8, 128), dtype=torch.bfloat16, device="cuda")
    k[-2048:].normal_()
    q = torch.randn(64, 32, 128, dtype=torch.bfloat16, device="cuda")
    vertical, slash = last_query(q, k, scale=1.0, q_offset=num_keys - 64, shared=False)
    expected = last_query_ref(q[:, 28:].float(), k[:, 7:].float(), scale=1.0, q_offset=num_keys - 64, shared=False)
    assert relative_error(vertical[28:], expected[0]) < 4e-3
    assert relative_error(slash[28:], expected[1]) < 4e-3


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected||; NaN never passes a comparison with it."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
