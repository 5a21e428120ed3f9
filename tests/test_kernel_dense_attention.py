"""Dense attention of packed prompts against its reference: interpreted on a CPU, compiled where there is a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from longbatch_kernels.dense_attention import (
    _index,
    _records,
    _units,
    _walk,
    balanced,
    dense_attention,
    dense_attention_ref,
    prepare_dense,
)
from longbatch_kernels.range_attention import Carry
from longbatch_kernels.range_index import PackedPrompt
from range_lists import taken
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# A whole prompt, one of a single token, one whose queries begin in the middle of a block, the middle of a longer one,
# and one that begins past an unused row of q and keys that overlap another's.
MIXED = [
    PackedPrompt(0, 130, 0, 0, 130),
    PackedPrompt(130, 1, 0, 130, 1),
    PackedPrompt(131, 70, 130, 131, 200),
    PackedPrompt(201, 40, 90, 331, 300),
    PackedPrompt(242, 17, 3, 400, 20),
]


def tensors(prompts: list[PackedPrompt], heads: int, group: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v; keys and values are strided views of one tensor, as projections leave them."""
    generator = torch.Generator().manual_seed(len(prompts))
    rows = max(prompt.first_query + prompt.num_queries for prompt in prompts)
    keys = max(prompt.first_key + prompt.num_keys for prompt in prompts)
    q = torch.randn(rows, heads, dim, generator=generator)
    both = torch.randn(keys, 2, heads // group, dim, generator=generator).to(DEVICE, dtype)
    return [q.to(DEVICE, dtype), both[:, 0], both[:, 1]]


def run(
    prompts: list[PackedPrompt],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    carry: Carry | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows of no prompt hold what the reference gives them."""
    prepared = prepare_dense(prompts, k, num_heads=q.shape[1], causal=causal, window=window)
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), -torch.inf, device=DEVICE)
    dense_attention(q, k, v, prepared, scale=q.shape[2] ** -0.5, out=out, lse=lse, carry=carry)
    return out, lse


def check(
    prompts: list[PackedPrompt],
    heads: int,
    group: int,
    dim: int,
    *,
    causal: bool = True,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    q, k, v = tensors(prompts, heads, group, dim, dtype)
    wanted = dense_attention_ref(
        q.double(), k.double(), v.double(), prompts, scale=dim**-0.5, causal=causal, window=window
    )
    agree(run(prompts, q, k, v, causal, window), wanted, 1e-5 if dtype == torch.float32 else 4e-3)


def agree(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], tolerance: float) -> None:
    assert float((found[0].double() - wanted[0]).norm() / wanted[0].norm()) <= tolerance
    assert torch.equal(torch.isinf(found[1]), torch.isinf(wanted[1]))
    assert float((found[1] - wanted[1]).nan_to_num().abs().max()) <= max(tolerance, 1e-5)


@pytest.mark.parametrize("window", [None, 1, 50, 64, 128, 177, 1000])
@pytest.mark.parametrize(("heads", "group", "dim"), [(4, 2, 64), (3, 3, 64)])
def test_equals_reference(heads: int, group: int, dim: int, window: int | None) -> None:
    check(MIXED, heads, group, dim, window=window)


@pytest.mark.parametrize(("heads", "group", "dim"), [(2, 1, 96), (4, 4, 128), (2, 2, 256)])
def test_head_dimensions(heads: int, group: int, dim: int) -> None:
    prompts = [PackedPrompt(0, 80, 60, 0, 140), PackedPrompt(80, 5, 0, 140, 5)]
    check(prompts, heads, group, dim)
    check(prompts, heads, group, dim, window=33)
    check(prompts, heads, group, dim, causal=False)


@pytest.mark.parametrize(("heads", "group"), [(4, 2), (7, 7)])
def test_rows_that_see_all_keys(heads: int, group: int) -> None:
    """More queries than keys, fewer, one of each, and keys that two prompts share."""
    prompts = [
        PackedPrompt(0, 100, 0, 0, 33),
        PackedPrompt(100, 1, 0, 33, 1),
        PackedPrompt(101, 3, 0, 34, 300),
        PackedPrompt(110, 70, 0, 34, 300),
    ]
    check(prompts, heads, group, 64, causal=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_carry_goes_on(dtype: torch.dtype) -> None:
    """Two beginnings one after the other, the second of one prompt alone, then their own keys: as if they were whole;
    a prompt without a beginning has none in the carry."""
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(150, heads, 64, generator=generator).to(DEVICE, dtype) for heads in (4, 2, 2))
    rows = [slice(0, 40), slice(40, 60), slice(60, 150)]
    first = [PackedPrompt(0, 40, 0, 0, 70), PackedPrompt(40, 20, 0, 0, 70)]
    second = [PackedPrompt(40, 20, 0, 75, 9)]
    own = [PackedPrompt(0, 40, 0, 100, 40), PackedPrompt(40, 20, 0, 84, 20), PackedPrompt(60, 90, 0, 0, 90)]
    carry = None
    for prompts in (first, second):
        ready = prepare_dense(prompts, k, num_heads=4, causal=False)
        carry = dense_attention(q, k, v, ready, scale=0.125, carry=carry, carry_out=True)
        assert isinstance(carry, Carry)
    found = run(own, q, k, v, True, None, carry)
    keys = [
        torch.cat([torch.arange(70), torch.arange(100, 140)]),
        torch.cat([torch.arange(70), torch.arange(75, 104)]),
        torch.arange(90),
    ]
    for part, columns in zip(rows, keys, strict=True):
        number, count = part.stop - part.start, len(columns)
        prompt = [PackedPrompt(0, number, count - number, 0, count)]
        wanted = dense_attention_ref(q[part].double(), k[columns].double(), v[columns].double(), prompt, scale=0.125)
        agree((found[0][part], found[1][:, part]), wanted, tolerance)


def test_a_prompt_full_of_nan_harms_no_other() -> None:
    q, k, v = tensors(MIXED, 4, 2, 64, torch.float32)
    wanted, _ = run(MIXED, q, k, v, True, None)
    v[131:331] = torch.nan
    k[131:331:2] = torch.nan
    found, _ = run(MIXED, q, k, v, True, None)
    assert torch.equal(found[:131], wanted[:131])
    assert torch.equal(found[201:], wanted[201:])


def test_same_numbers_whatever_the_prompts_beside() -> None:
    q, k, v = tensors(MIXED, 4, 2, 64, torch.float32)
    found, lse = run(MIXED, q, k, v, True, 50)
    for prompt in MIXED:
        rows = slice(prompt.first_query, prompt.first_query + prompt.num_queries)
        out, own_lse = run([prompt], q, k, v, True, 50)
        assert torch.equal(out[rows], found[rows])
        assert torch.equal(own_lse[:, rows], lse[:, rows])


def test_what_is_prepared_serves_every_layer_of_the_shape() -> None:
    q, k, v = tensors(MIXED, 4, 2, 64, torch.float32)
    prepared = prepare_dense(MIXED, k, num_heads=4)
    for _ in range(2):
        q, k, v = torch.randn_like(q), torch.randn_like(k), torch.randn_like(v)
        wanted = dense_attention_ref(q.double(), k.double(), v.double(), MIXED, scale=0.1)[0]
        found = dense_attention(q, k, v, prepared, scale=0.1, out=torch.zeros_like(q))
        assert not isinstance(found, Carry)
        assert float((found[0] - wanted).norm() / wanted.norm()) <= 1e-5


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("window", [None, 1, 64, 100, 128, 192, 500, 512])
def test_takes_every_key_once(window: int | None, paired: bool) -> None:
    """As the kernels walk through the records, those of pairs of blocks too, which no interpreter runs."""
    prompts = [PackedPrompt(0, 900, 0, 0, 900), PackedPrompt(900, 133, 517, 900, 800), PackedPrompt(1033, 20, 0, 5, 20)]
    units = _units(prompts, 128 if paired else 64, True)
    walk = _walk(True, window, paired, 1024)
    items = torch.from_numpy(_records(units, walk, 1, 1, 1, window))
    index = _index(True, window, paired, 1024, 16, torch.float32, torch.device("cpu"))
    seen = 0
    for record in items:
        end, place, low, high, num_keys = (int(record[number]) for number in (2, 4, 5, 6, 8))
        (prompt,) = (one for one in prompts if one.first_query - one.q_offset == place)
        assert (int(record[7]), num_keys) == (prompt.first_key, prompt.num_keys)
        for which in range(1 + paired):
            first = end - 64 + 64 * which
            for row in range(max(first, low), min(first + 64, high)):
                seen += 1
                if row % 7 == 0 or row in (low, high - 1):
                    counts = taken(index, record, row, which, num_keys)
                    wanted = torch.arange(num_keys)
                    wanted = (wanted <= row) & (row - wanted < (window or 10**6))
                    assert torch.equal(counts, wanted.int()), (window, paired, row)
    assert seen == sum(prompt.num_queries for prompt in prompts)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("num_keys", [1, 16, 33, 128, 129, 400])
def test_takes_every_key_before_the_rows_once(num_keys: int, paired: bool) -> None:
    prompt = PackedPrompt(7, 300, 0, 11, num_keys)
    units = _units([prompt], 128 if paired else 64, False)
    walk = _walk(False, None, paired, 512)
    items = torch.from_numpy(_records(units, walk, 1, 1, 1, None))
    index = _index(False, None, paired, 512, 16, torch.float32, torch.device("cpu"))
    rows: list[int] = []
    for record in items:
        end, place, low, high = (int(record[number]) for number in (2, 4, 5, 6))
        for which in range(1 + paired):
            first = end - 64 + 64 * which
            for row in range(max(first, low), min(first + 64, high)):
                rows.append(place + row)
                assert torch.equal(taken(index, record, row, which, num_keys), torch.ones(num_keys, dtype=torch.int32))
    assert sorted(rows) == list(range(7, 307))


def test_programs_get_equal_work() -> None:
    """8,192 rows of 32 heads on 132 programs, which would wait for a quarter more than the mean in order."""
    units = _units([PackedPrompt(0, 8192, 0, 0, 8192)], 64, True)
    items = _records(units, _walk(True, None, False, 8192), 8, 2, 2, None)
    work = items[:, 14] + items[:, 15]
    order = balanced(work, 132)
    assert sorted(order.tolist()) == list(range(len(work)))
    # What begins together still does.
    assert (order // 132 == np.arange(len(work)) // 132).all()

    def most_of_mean(which: np.ndarray) -> float:
        shares = np.concatenate([work[which], np.zeros(-len(work) % 132, dtype=work.dtype)]).reshape(-1, 132).sum(0)
        return float(shares.max() / shares.mean())

    assert most_of_mean(order) < 1.04 < 1.2 < most_of_mean(np.arange(len(work)))


@pytest.mark.parametrize(("num_tasks", "num_programs"), [(0, 4), (1, 4), (7, 4), (8, 4)])
def test_few_tasks_are_all_given_out(num_tasks: int, num_programs: int) -> None:
    order = balanced(np.arange(num_tasks), num_programs)
    assert sorted(order.tolist()) == list(range(num_tasks))


# ------------------------------------------------------------------------------------------ real sizes

LONG = [
    PackedPrompt(0, 3000, 0, 0, 3000),
    PackedPrompt(3000, 100, 0, 3000, 100),
    PackedPrompt(3100, 1000, 5001, 3100, 7000),
    PackedPrompt(4101, 1, 0, 10_200, 1),
    PackedPrompt(4102, 700, 3, 10_201, 1500),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 1, 128, 1000, 1024])
@pytest.mark.parametrize(
    ("heads", "group", "dim"), [(8, 4, 128), (7, 7, 128), (4, 1, 128), (16, 8, 64), (6, 3, 96), (4, 2, 256)]
)
def test_half_precision(heads: int, group: int, dim: int, window: int | None, dtype: torch.dtype) -> None:
    check(LONG, heads, group, dim, window=window, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "group", "dim"), [(8, 4, 128), (7, 7, 128), (4, 1, 128), (16, 8, 64), (6, 3, 96), (4, 2, 256)]
)
def test_half_precision_before_the_rows(heads: int, group: int, dim: int, dtype: torch.dtype) -> None:
    prompts = [
        PackedPrompt(0, 777, 0, 0, 2001),
        PackedPrompt(777, 1, 0, 0, 2001),
        PackedPrompt(778, 130, 0, 2001, 128),
        PackedPrompt(1000, 500, 0, 2129, 45),
        PackedPrompt(1500, 64, 0, 2300, 5000),
    ]
    check(prompts, heads, group, dim, causal=False, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "group", "dim"), [(8, 4, 128), (3, 3, 128), (4, 2, 256)])
def test_half_precision_carry(heads: int, group: int, dim: int) -> None:
    """4,000 queries over 6,000 keys before them and their own, beside a prompt without any before."""
    generator = torch.Generator("cuda").manual_seed(0)

    def noise(rows: int, count: int) -> Tensor:
        return torch.randn(rows, count, dim, generator=generator, dtype=torch.bfloat16, device="cuda")

    q, k, v = noise(5000, heads), noise(11_000, heads // group), noise(11_000, heads // group)
    ready = prepare_dense([PackedPrompt(0, 4000, 0, 0, 6000)], k, num_heads=heads, causal=False)
    carry = dense_attention(q, k, v, ready, scale=dim**-0.5, carry_out=True)
    assert isinstance(carry, Carry)
    own = [PackedPrompt(0, 4000, 0, 6000, 4000), PackedPrompt(4000, 1000, 0, 10_000, 1000)]
    found = run(own, q, k, v, True, None, carry)
    whole = [PackedPrompt(0, 4000, 6000, 0, 10_000), own[1]]
    wanted = dense_attention_ref(q.float(), k.float(), v.float(), whole, scale=dim**-0.5)
    agree(found, (wanted[0].double(), wanted[1]), 4e-3)


@pytest.mark.gpu
def test_300_000_tokens_beyond_32_bit_offsets() -> None:
    """The last 8,192 of 300,001 tokens of 64 heads, over K and V of more than 2^31 bytes."""
    num_keys, heads, dim = 300_001, 64, 128
    generator = torch.Generator("cuda").manual_seed(0)
    k, v = (torch.randn(num_keys, 32, dim, generator=generator, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    assert k.nbytes > 2**31
    q = torch.randn(8192, heads, dim, generator=generator, dtype=torch.bfloat16, device="cuda")
    prompts = [PackedPrompt(0, 8192, num_keys - 8192, 0, num_keys)]
    out, _ = run(prompts, q, k, v, True, None)
    assert bool(out.isfinite().all())
    for row in (0, 4000, 8191):
        stop = num_keys - 8192 + row + 1
        for head in (0, 63):
            scores = k[:stop, head // 2].double() @ q[row, head].double() * dim**-0.5
            wanted = scores.softmax(0) @ v[:stop, head // 2].double()
            assert float((out[row, head] - wanted).norm() / wanted.norm()) <= 4e-3
