"""K/V pages in float8: the references' numbers, the kernel's bits, and what a page reads back as."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from longbatch_kernels import kv_fp8, kv_plain

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def new_pool(num_pages: int, num_kv: int, dim: int, device: str = DEVICE) -> tuple[torch.Tensor, ...]:
    """Pages whose bytes are all 0xAB: nothing that a test writes."""
    found = []
    for shape, dtype in kv_fp8.tensors(num_pages, num_kv, dim, torch.bfloat16):
        found.append(torch.full(shape, 0xAB, dtype=torch.uint8) if dtype == torch.uint8 else torch.full(shape, -7.0))
    return tuple(tensor.to(device) for tensor in found)


def stored_by(quantize: object, x: torch.Tensor, rows: list[int], pages: list[int]) -> tuple[torch.Tensor, ...]:
    pool = new_pool(max(pages) + 2, *x.shape[1:], device=x.device.type)
    index = [torch.tensor(numbers, device=x.device) for numbers in (rows, pages)]
    quantize(x, index[0], pool, index[1])  # type: ignore[operator]
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1e-3, 3e4])
def test_a_number_is_read_back_to_its_precision(dtype: torch.dtype, size: float) -> None:
    x = (torch.randn(200, 3, 16) * size).clamp(-6e4, 6e4).to(dtype)
    pool = stored_by(kv_fp8.quantize_ref, x, [5, 100], [4, 1])
    found = kv_fp8.dequantize_ref(pool, torch.tensor([4, 1]), dtype).float()
    expected = torch.cat([x[5:69], x[100:164]]).float()
    # Half of the last of three bits, and below the smallest normal number half of the smallest one.
    scales = pool[1][[4, 1]].repeat_interleave(64, 0)[..., None]
    assert ((found - expected).abs() <= torch.maximum(expected.abs() / 16, scales * 2**-10) * 1.0001).all()
    largest = expected.view(2, 64, 3, 16).abs().amax((1, 3))
    assert (largest <= 448 * pool[1][[4, 1]]).all()
    assert (largest > 224 * pool[1][[4, 1]]).all()
    assert (torch.frexp(pool[1][[4, 1]])[0] == 0.5).all(), "a power of two"


def test_each_block_and_head_has_its_own_scale() -> None:
    x = torch.ones(128, 2, 8)
    x[:64, 1] = 1000
    x[64:, 0] = 1e-6
    pool = stored_by(kv_fp8.quantize_ref, x, [0, 64], [0, 1])
    assert pool[1][:2].tolist() == [[2.0**-8, 4.0], [2.0**-28, 2.0**-8]]
    assert (pool[0][128:] == 0xAB).all(), "other pages are untouched"
    assert (pool[1][2:] == -7).all()


@pytest.mark.parametrize("value", [448.0, 448.1, 449.0, 1.75, 1.7500001, 1e-38, 1e-45, 3e38, 0.0, -0.0])
def test_edges_of_the_scale(value: float) -> None:
    x = torch.full((64, 1, 4), value)
    found = kv_fp8.dequantize_ref(stored_by(kv_fp8.quantize_ref, x, [0], [0]), torch.tensor([0]), torch.float32)
    assert ((found - x).abs() <= x.abs() / 16 + 1e-38).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("quantize", [kv_fp8.quantize_ref, kv_fp8.quantize_by_kernel])
def test_what_is_not_finite_stays_so(value: float, quantize: object) -> None:
    x = torch.ones(64, 2, 8, device=DEVICE)
    x[17, 1, 3] = value
    pool = stored_by(quantize, x, [0], [0])
    found = kv_fp8.dequantize_ref(pool, torch.tensor([0], device=DEVICE), torch.float32)
    assert torch.isfinite(found[:, 0]).all()
    assert torch.isnan(found[:, 1]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_kv", "dim"), [(1, 16), (3, 64), (2, 80), (2, 128)])
def test_the_kernel_stores_the_same_bits(dtype: torch.dtype, num_kv: int, dim: int) -> None:
    x = torch.randn(300, num_kv, dim, device=DEVICE) * torch.logspace(-6, 3, 300, device=DEVICE)[:, None, None]
    x = (x * torch.logspace(0, -8, dim, device=DEVICE)).to(dtype)
    rows, pages = [0, 64, 5, 130, 236], [3, 0, -1, 7, 2]
    expected = stored_by(kv_fp8.quantize_ref, x, rows, pages)
    found = stored_by(kv_fp8.quantize_by_kernel, x, rows, pages)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0], expected[0])
    assert len(found[0].unique()) > 100
    assert (found[0][8 * 64 :] == 0xAB).all(), "a page below 0 is none"


def test_the_kernel_rounds_every_number_as_torch_does() -> None:
    """All float16 numbers in the range, which hold every number of the format and every midpoint of two."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = x[x.abs() <= 448]
    x = x[: len(x) // 64 * 64 - 64].view(-1, 64).contiguous()
    x = torch.cat([x, torch.full((x.shape[0], 1), 448.0, dtype=torch.float16)], 1)[:, None, :].float().to(DEVICE)
    x = x[: len(x) // 64 * 64]
    rows = list(range(0, len(x), 64))
    pages = list(range(len(rows)))
    expected = stored_by(kv_fp8.quantize_ref, x, rows, pages)
    assert (expected[1][: len(pages)] == 1).all()
    found = stored_by(kv_fp8.quantize_by_kernel, x, rows, pages)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(expected[0][: len(x)].view(torch.float8_e4m3fn).cpu(), x.cpu().to(torch.float8_e4m3fn))


def test_rows_need_not_be_packed() -> None:
    wide = torch.randn(100, 5, 32, device=DEVICE)
    for part in (wide[:, 1:3], wide[:, ::2], wide[:, :, :16]):
        for quantize in (kv_fp8.quantize_ref, kv_fp8.quantize_by_kernel):
            found = stored_by(quantize, part, [9], [0])
            expected = stored_by(quantize, part.contiguous(), [9], [0])
            assert torch.equal(found[0][:64], expected[0][:64])


@triton.jit
def load_kernel(pool, pages, places, out, num_kv, LOAD: tl.constexpr, DIM: tl.constexpr, NATIVE: tl.constexpr):
    o_n, o_d = tl.arange(0, 64), tl.arange(0, 32)
    m_n, m_d = o_n < 61, o_d < DIM
    i_kv = tl.program_id(0)
    b_pages, b_places = tl.load(pages + o_n), tl.load(places + o_n)
    b = LOAD(pool, b_pages, b_places, i_kv, num_kv, o_d, m_n, m_d, DIM, out.dtype.element_ty, NATIVE)
    tl.store(out + (o_n[:, None] * num_kv + i_kv) * DIM + o_d[None, :], b, mask=m_d[None, :])


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tile_is_what_the_reference_reads(dtype: torch.dtype, native: bool) -> None:
    if native and DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the chip cannot convert the type")
    x = torch.randn(256, 2, 24, device=DEVICE) * torch.logspace(-4, 2, 24, device=DEVICE)
    pool = stored_by(kv_fp8.quantize_ref, x, [0, 64, 128, 192], [2, 5, 0, 1])
    pages = torch.tensor([5] * 30 + [0] * 20 + [1] * 14, dtype=torch.int32, device=DEVICE)
    places = torch.arange(64, dtype=torch.int32, device=DEVICE).flip(0).contiguous()
    found = torch.full((64, 2, 24), 9.0, dtype=dtype, device=DEVICE)
    load_kernel[(2,)](pool, pages, places, found, 2, LOAD=kv_fp8.load_tile, DIM=24, NATIVE=native)
    whole = kv_fp8.dequantize_ref(pool, torch.arange(6, device=DEVICE), dtype)
    expected = whole[pages.long() * 64 + places]
    expected[61:] = 0
    assert torch.equal(found, expected)


def test_plain_pages_round_to_their_own_type_only() -> None:
    x = torch.randn(200, 2, 8)
    for dtype in (torch.float32, torch.bfloat16):
        ((shape, kind),) = kv_plain.tensors(4, 2, 8, dtype)
        pool = (torch.zeros(shape, dtype=kind),)
        kv_plain.quantize(x, torch.tensor([3, 100]), pool, torch.tensor([2, 0]))
        found = kv_plain.dequantize_ref(pool, torch.tensor([0, 2]), torch.float32)
        assert torch.equal(found, torch.cat([x[100:164], x[3:67]]).to(dtype).float())
