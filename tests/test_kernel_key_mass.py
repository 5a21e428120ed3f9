"""The key-mass kernels against their reference: interpreted on a CPU, compiled where there is a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from longbatch_kernels import key_mass as module
from longbatch_kernels.key_mass import key_mass, key_mass_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("shared", [False, True], ids=["per-head", "shared"])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prompts come in several pieces where kernels are interpreted."""
    if DEVICE == "cpu":
        monkeypatch.setattr(module, "SPLIT", 128)
        monkeypatch.setattr(module, "LONGEST_SPAN", 128)


def case(
    num_queries: int,
    num_keys: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
    device: str = DEVICE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random strided q and k, with NaN between their rows and heads and beyond their ends."""
    generator = torch.Generator(device).manual_seed(num_keys)

    def random(num_rows: int, num_heads: int) -> torch.Tensor:
        wide = torch.full((num_rows + 70, num_heads + 1, dim), float("nan"), dtype=dtype, device=device)
        wide[:num_rows, 1:] = torch.randn(num_rows, num_heads, dim, generator=generator, device=device).to(dtype)
        return wide[:num_rows, 1:]

    return random(num_queries, heads), random(num_keys, kv_heads)


def by_row(
    q: torch.Tensor, k: torch.Tensor, *, scale: float, q_offset: int, rows: int, step: int, window: int, shared: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums of the keys outside the window, of those inside, and how many rows; row by row, as the definition says."""
    group, stop = q.shape[1] // k.shape[1], q_offset + q.shape[0]
    first_run, last_run = q_offset // rows, (stop - 1) // rows
    outside = torch.zeros(last_run - first_run + 1, q.shape[1], k.shape[0], dtype=torch.float64, device=q.device)
    inside, counts = torch.zeros_like(outside), torch.zeros_like(outside[..., 0])
    keys = k.double().repeat_interleave(group, 1)
    for p in range(q_offset, stop):
        ends_run = (p + 1) % rows == 0 or p + 1 == stop
        if (p + 1) % step == 0 or ends_run:
            b = p // rows - first_run
            weights = torch.einsum("hd,jhd->hj", q[p - q_offset].double(), keys[: p + 1]).mul_(scale).softmax(-1)
            far = max(0, p + 1 - window)
            outside[b, :, :far] += weights[:, :far]
            inside[b, :, far : p + 1] += weights[:, far:]
            counts[b] += 1
    results = outside, inside, counts
    if not shared:
        return results
    one, other, rest = (x.unflatten(1, (-1, group)).sum(2) for x in results)
    return one, other, rest


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is NaN, so that a place nobody writes shows."""

    def empty(*size: object, **options: object) -> torch.Tensor:
        return real(*size, **options).fill_(float("nan"))  # type: ignore[call-overload]

    real = torch.empty
    monkeypatch.setattr(torch, "empty", empty)


SHAPES = pytest.mark.parametrize(
    ("num_queries", "q_offset", "num_keys", "heads", "kv_heads", "dim", "rows", "step", "window"),
    [
        pytest.param(1, 0, 1, 1, 1, 64, 64, 16, 0, id="one-key"),
        pytest.param(1, 299, 300, 4, 2, 64, 64, 16, 1, id="one-query"),
        pytest.param(7, 0, 7, 2, 1, 64, 64, 4, 2, id="short-prompt"),
        pytest.param(64, 64, 128, 2, 2, 64, 64, 16, 16, id="one-whole-run"),
        pytest.param(150, 37, 187, 3, 1, 64, 64, 16, 20, id="group-3-starts-inside"),
        pytest.param(193, 100, 293, 4, 1, 128, 128, 16, 64, id="group-4"),
        pytest.param(130, 71, 201, 7, 1, 64, 64, 8, 5, id="group-7"),
        pytest.param(70, 60, 130, 2, 1, 96, 64, 32, 33, id="dim-96"),
        pytest.param(150, 111, 261, 8, 2, 256, 128, 4, 64, id="dim-256-some-tiles"),
        pytest.param(65, 190, 255, 3, 3, 64, 64, 1, 3, id="every-row"),
        pytest.param(150, 33, 300, 4, 2, 64, 64, 16, 7, id="keys-beyond"),
        pytest.param(150, 50, 200, 3, 1, 64, 64, 256, 10, id="last-row-only"),
        pytest.param(150, 50, 200, 14, 2, 64, 64, 64, 10, id="one-sample-group-7"),
        pytest.param(20, 129, 149, 3, 1, 64, 64, 32, 10, id="no-aligned-sample"),
        pytest.param(140, 0, 140, 3, 1, 64, 64, 16, 1000, id="window-over-all"),
        pytest.param(140, 0, 140, 3, 1, 64, 64, 16, 0, id="no-window"),
    ],
)


@BOTH
@SHAPES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_equals_definition(
    num_queries: int,
    q_offset: int,
    num_keys: int,
    heads: int,
    kv_heads: int,
    dim: int,
    rows: int,
    step: int,
    window: int,
    shared: bool,
    dtype: torch.dtype,
) -> None:
    """The kernels and the reference; and what is not in the sums is the mass inside the window."""
    q, k = case(num_queries, num_keys, heads, kv_heads, dim, dtype)
    options = {"scale": 0.3, "q_offset": q_offset, "rows": rows, "step": step, "window": window, "shared": shared}
    outside, inside, counts = by_row(q, k, **options)
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 1e-4}
    for sums, totals in (key_mass_ref(q, k, **options), key_mass(q, k, **options)):
        assert sums.dtype == totals.dtype == torch.float32
        torch.testing.assert_close(sums.double(), outside, **tolerance)
        assert torch.equal(totals.double(), counts)
        torch.testing.assert_close((totals - sums.sum(-1)).double(), inside.sum(-1), rtol=1e-3, atol=1e-3)
        assert sums.sum() > 0 or window >= q_offset + num_queries or num_keys == 1
    exact, totals = key_mass_ref(q.double(), k.double(), **options)
    torch.testing.assert_close(exact, outside, rtol=1e-10, atol=1e-13)
    assert totals.dtype == torch.float64


def test_sums_by_hand() -> None:
    """Equal scores: the row at position p gives 1 / (p + 1) to every key it sees."""
    _, k = case(1, 200, 1, 1, 64)
    q = torch.zeros(132, 1, 64, device=DEVICE)
    # Runs 1 (positions 68..127, samples 95 and 127), 2 (samples 159, 191) and 3 (192..199, its last row alone).
    sums, totals = key_mass(q, k, scale=1.0, q_offset=68, rows=64, step=32, window=100, shared=False)
    expected = torch.zeros(3, 200)
    expected[0, :28] = 1 / 128
    expected[1, :60] = 1 / 160
    expected[1, :92] += 1 / 192
    expected[2, :100] = 1 / 200
    torch.testing.assert_close(sums[:, 0].cpu(), expected)
    assert totals[:, 0].tolist() == [2, 2, 1]


@BOTH
def test_planted_keys(shared: bool) -> None:
    """A key that every row of a run looks at gets the weight of all its samples."""
    at = torch.eye(256, device=DEVICE) * 16
    q = torch.cat([at[30].repeat(64, 2, 1), at[77].repeat(64, 2, 1)])
    options = {"scale": 1.0, "q_offset": 128, "rows": 64, "step": 8, "window": 40, "shared": shared}
    sums, totals = key_mass(q, at[:, None], **options)
    for b, key in enumerate((30, 77)):
        assert sums[b].argmax(1).eq(key).all()
        torch.testing.assert_close(sums[b, :, key], totals[b])
    assert totals.eq(16 if shared else 8).all()


@BOTH
def test_spans_and_other_runs_change_nothing(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = case(200, 700, 3, 1, 64)
    options = {"scale": 0.3, "rows": 64, "step": 16, "window": 30, "shared": shared}
    sums, totals = key_mass(q, k, q_offset=500, **options)
    for span in (256, 640, 2048):
        monkeypatch.setattr(module, "LONGEST_SPAN", span)
        again, _ = key_mass(q, k, q_offset=500, **options)
        assert torch.equal(again, sums)
    # Run 8 holds the positions 512..575, with all its samples.
    alone, its_total = key_mass(q[12:76], k[:576], q_offset=512, **options)
    assert torch.equal(alone[0], sums[1, :, :576])
    assert torch.equal(its_total[0], totals[1])
    assert not sums[1, :, 576:].any()


def test_large_scores() -> None:
    """Scores of hundreds, whose exponentials float32 cannot hold."""
    q, k = case(100, 200, 2, 1, 64)
    options = {"scale": 40.0, "q_offset": 100, "rows": 64, "step": 8, "window": 16, "shared": False}
    expected, _ = key_mass_ref(q.double(), k.double(), **options)
    for sums, _ in (key_mass(q, k, **options), key_mass_ref(q, k, **options)):
        torch.testing.assert_close(sums.double(), expected, rtol=1e-2, atol=1e-4)


@BOTH
def test_reference_in_pieces(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    q, k = case(150, 300, 4, 2, 64, torch.float64)
    options = {"scale": 0.3, "q_offset": 150, "rows": 128, "step": 4, "window": 20, "shared": shared}
    whole, _ = key_mass_ref(q, k, **options)
    monkeypatch.setattr(module, "WORKSPACE", 2000)
    pieces, _ = key_mass_ref(q, k, **options)
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rows", "step"),
    [(9, 3, 64, 512, 16), (4, 1, 256, 512, 16), (14, 2, 128, 4096, 4), (8, 2, 96, 64, 256)],
)
def test_real_sizes(
    heads: int,
    kv_heads: int,
    dim: int,
    rows: int,
    step: int,
    dtype: torch.dtype,
    shared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k = case(8001, 130_000, heads, kv_heads, dim, dtype, "cuda")
    options = {"q_offset": 130_000 - 8001, "rows": rows, "step": step, "window": 256, "shared": shared}
    options["scale"] = 2 * dim**-0.5
    sums, totals = key_mass(q, k, **options)
    monkeypatch.setattr(module, "LONGEST_SPAN", 384)
    again, _ = key_mass(q, k, **options)
    assert torch.equal(sums, again)
    expected, counts = key_mass_ref(q.double(), k.double(), **options)
    assert relative_error(sums, expected) < 4e-3
    assert torch.equal(totals.double(), counts)


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """A layer of 2^31 numbers and more, all but its last keys equal; and sums of as many."""
    num_keys = (1 << 31) // (8 * 128) + 4096
    k = torch.zeros((num_keys, 8, 128), dtype=torch.bfloat16, device="cuda")
    k[-2048:].normal_()
    q = torch.randn(4096, 32, 128, dtype=torch.bfloat16, device="cuda")
    options = {"scale": 0.2, "q_offset": num_keys - 4096, "rows": 64, "step": 256, "window": 64, "shared": False}
    sums, _ = key_mass(q, k, **options)
    assert sums.numel() > 1 << 31
    expected, _ = key_mass_ref(q[-64:, 28:].float(), k[:, 7:].float(), **{**options, "q_offset": num_keys - 64})
    assert relative_error(sums[-1, 28:], expected[0]) < 4e-3


@pytest.mark.gpu
@BOTH
def test_the_device_is_not_waited_for(shared: bool) -> None:
    q, k = case(3000, 5000, 4, 2, 64, torch.bfloat16, "cuda")
    options = {"scale": 0.125, "q_offset": 2000, "rows": 512, "step": 16, "window": 128, "shared": shared}
    key_mass(q, k, **options)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        sums, totals = key_mass(q, k, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected, counts = key_mass_ref(q.float(), k.float(), **options)
    assert relative_error(sums, expected) < 4e-3
    assert torch.equal(totals, counts)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected||; NaN never passes a comparison with it."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
