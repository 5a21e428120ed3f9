"""Rows of a matrix product are the same bits whatever the number of rows."""

from __future__ import annotations

import pytest
import torch

from longbatch.models.linear import add_linear, linear, linear_into


@pytest.mark.parametrize(("width", "outputs"), [(576, 960), (1536, 576), (64, 200)])
@pytest.mark.parametrize("num_threads", [1, 2, 16])
def test_rows_do_not_depend_on_their_number(width: int, outputs: int, num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for num_rows in [*range(1, 40), 63, 99, 255, 257]:
            check(width, outputs, num_rows)
    finally:
        torch.set_num_threads(before)


def check(width: int, outputs: int, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, width, generator=generator)
    weight, bias = torch.randn(outputs, width, generator=generator), torch.randn(outputs, generator=generator)
    residual = torch.randn(300, outputs, generator=generator)
    assert torch.equal(linear(x[:num_rows], weight, bias), linear(x, weight, bias)[:num_rows])
    few, many = residual[:num_rows].clone(), residual.clone()
    add_linear(few, x[:num_rows], weight, bias)
    assert torch.equal(few, add_linear(many, x, weight, bias)[:num_rows])
    out = torch.full((num_rows, outputs), float("nan"))
    linear_into(out, x[:num_rows], weight)
    assert torch.equal(out, linear(x, weight)[:num_rows])


def test_no_rows() -> None:
    assert linear(torch.zeros(0, 4), torch.zeros(3, 4)).shape == (0, 3)
