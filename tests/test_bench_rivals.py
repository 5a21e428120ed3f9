"""Rivals of `longbatch bench attention`: how they are imported, and how their times and results are counted.

Small files and classes stand in for the real ones, which are no part of the project.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longbatch.bench import attention, attention_others, attention_rivals
from longbatch.bench.attention import Model, Rivals, compare
from longbatch.bench.attention_inputs import random_inputs
from longbatch.errors import UsageError

CPU = torch.device("cpu")
LAYERS = [[(30, 100), (40, 110), (30, 100), (50, 150)]]
TINY = Model(4, 2, 16, torch.float32, LAYERS, [[(30, 100), (50, 150)]], most_error=1e-5)
LENGTH = 256

FORWARD = """
import module_that_is_not_there

def sum_all_diagonal_matrix(mat):
    n, m = mat.shape[-2:]
    rows = [torch.nn.functional.pad(mat[..., r, : m - n + 1 + r], (n - 1 - r, 0)) for r in range(n)]
    return torch.nn.functional.pad(sum(rows), (0, n - 1))

def minference_prefill_kernel(q, k, v, head_id, layer_idx, config):
    head_dim = q.size(-1)
    def vertical_and_slash_kernel(q, k, v, vertical_size, slash_size):
        last = min(64, q_len)
        scores = q[:, :, -last:] @ k.transpose(2, 3) / math.sqrt(head_dim)
        scores[..., -last:] = torch.where(LAST_Q_MASK[..., -last:, -last:], scores[..., -last:], -torch.inf)
        mass = scores.softmax(-1)
        slash = sum_all_diagonal_matrix(mass)[..., : -last + 1]
        columns = mass.sum(-2, keepdim=True).topk(vertical_size).indices
        return vertical_slash_sparse_attention(q, k, v, columns, q_len - 1 - slash.topk(slash_size).indices)
    return vertical_and_slash_kernel(q, k, v, 1, 1)
"""
KERNELS = """
from ..cuda import convert_vertical_slash_indexes
try:
    from vllm_flash_attn import sparse_attn_func
except ImportError:
    sparse_attn_func = None
    print("noise")
"""
INDEX = """#include <torch/extension.h>
#include <pybind11/stl.h>
#include <cuda.h>
__global__ void kernel() {}
void convert_vertical_slash_indexes_64x64(const int* seqlens) {}
std::vector<at::Tensor> convert_vertical_slash_indexes(
    torch::Tensor seqlens) { return {}; }
"""
FLEX = """
GPU_NAME = "nvidia h200"

def transform_veritcal_slash_idx(vertical, diagonals, num_blocks):
    return [[(vertical, diagonals, num_blocks)]]
"""


@pytest.fixture
def rival_folder(tmp_path: Path) -> Iterator[Path]:
    """Small files in the places of the real ones. Running an `__init__` fails."""
    files = {
        "MInference/minference/__init__.py": "raise SystemError",
        "MInference/minference/ops/__init__.py": "raise SystemError",
        "MInference/minference/ops/pit_sparse_flash_attention_v2.py": KERNELS,
        "MInference/minference/modules/minference_forward.py": FORWARD,
        "MInference/csrc/vertical_slash_index.cu": INDEX,
        "FlexPrefill/flex_prefill/__init__.py": "raise SystemError",
        "FlexPrefill/flex_prefill/ops/flex_prefill_attention.py": FLEX,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in ("minference", "flex_prefill")]:
        del sys.modules[name]


def test_kernels_are_imported_without_their_package(
    rival_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faster: Any = type(sys)("vllm_flash_attn")
    faster.sparse_attn_func = max
    monkeypatch.setitem(sys.modules, "vllm_flash_attn", faster)
    module = attention_rivals.import_kernels(rival_folder / "MInference")
    assert module.sparse_attn_func is None
    assert sys.modules["vllm_flash_attn"] is faster
    assert capsys.readouterr().out == ""


def test_estimate_is_taken_out_of_its_module() -> None:
    torch.manual_seed(2)
    q, k = torch.randn(1, 1, 150, 16), torch.randn(1, 1, 150, 16)
    columns, distances = attention_rivals.estimate_of(FORWARD, CPU)(q, k, 5, 7)
    rows = torch.arange(86, 150)[:, None]
    mass = (q[0, 0, 86:] @ k[0, 0].T / 4).masked_fill(torch.arange(150) > rows, -torch.inf).softmax(-1)
    assert sorted(columns.flatten().tolist()) == sorted(mass.sum(0).topk(5).indices.tolist())
    sums = torch.zeros(150).scatter_add_(0, (rows - torch.arange(150)).clamp(min=0).flatten(), mass.flatten())
    assert sorted(distances.flatten().tolist()) == sorted(sums.topk(7).indices.tolist())


def test_index_source_needs_no_torch() -> None:
    text = attention_rivals.index_source(INDEX)
    assert "torch" not in text
    assert "pybind11" not in text
    assert "#include <cuda.h>" in text
    assert text.count('extern "C" void convert(') == 1
    with pytest.raises(UsageError, match="fb56c91"):
        attention_rivals.index_source(INDEX.replace("_64x64", ""))


def test_flex_prefill_is_told_its_gpu_and_its_blocks(rival_folder: Path) -> None:
    rival = attention_rivals.FlexPrefill(rival_folder / "FlexPrefill")
    assert rival.module.GPU_NAME == "nvidia h100"
    columns, distances = np.arange(0, 1280, 5, dtype=np.int32), np.array([0, 3, 130, 700], dtype=np.int32)
    found: Any = rival.blocks(columns, distances, 1300, CPU)
    vertical, diagonals, num_blocks = found
    # 256 columns fill two blocks.
    assert vertical.flatten().tolist() == [0, 5]
    assert diagonals.flatten().tolist() == [0, 1, 5]
    assert num_blocks == 11


def test_missing_and_other_files(rival_folder: Path) -> None:
    with pytest.raises(UsageError, match="holds neither MInference nor FlexPrefill"):
        attention.load(rival_folder / "MInference", CPU)
    with pytest.raises(UsageError, match="its estimate is missing"):
        attention_rivals.estimate_of("x = 1", CPU)
    (rival_folder / "FlexPrefill/flex_prefill/ops/flex_prefill_attention.py").write_text("import einopsy")
    with pytest.raises(UsageError, match="needs the package einopsy"):
        attention_rivals.FlexPrefill(rival_folder / "FlexPrefill")
    (rival_folder / "FlexPrefill/flex_prefill/ops/flex_prefill_attention.py").unlink()
    with pytest.raises(UsageError, match=r"flex_prefill_attention\.py is missing"):
        attention_rivals.FlexPrefill(rival_folder / "FlexPrefill")
    assert attention.load(None, CPU) == Rivals()


class WholeRows:
    """A rival that reads every earlier key, in two halves. error: what its output is multiplied with."""

    error = 1.0

    def estimate(self, q: torch.Tensor, k: torch.Tensor, *budget: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(budget[0]), torch.arange(budget[1])

    def index(self, columns: torch.Tensor, distances: torch.Tensor, num_keys: int) -> int:
        return num_keys

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: int) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True) * self.error

    def keys_of_row(self, index: int, row: int) -> torch.Tensor:
        return torch.cat([torch.arange(row // 2), torch.arange(row // 2, row + 1)])


def test_times_of_a_rival_are_summed_over_the_mix() -> None:
    inputs = random_inputs(LENGTH, 4, 2, 16, torch.float32, CPU)
    rival: Any = WholeRows()
    whole, classes = attention_others.measure_minference(rival, inputs, {(30, 100): 3, (40, 110): 2}, 1)
    assert whole.holds
    for name in ("estimate", "index", "attention", "total"):
        expected = 3 * getattr(classes[30, 100], name) + 2 * getattr(classes[40, 110], name)
        assert getattr(whole, name) == pytest.approx(expected)
    rival.error = 1.05
    whole, _ = attention_others.measure_minference(rival, inputs, {(30, 100): 3}, 1)
    assert whole.error == pytest.approx(0.05, rel=1e-3)
    assert not whole.holds


def test_ratio_is_taken_to_the_rival() -> None:
    rival: Any = WholeRows()
    rows = compare(TINY, Rivals(minference=rival), [LENGTH], (), 1, CPU)
    by = {(row.case, row.metric, row.against): row for row in rows}
    theirs = by[f"MInference, {LENGTH}", attention.WHOLE, None].value
    ours = by[f"longbatch, one selection per head, {LENGTH}", attention.WHOLE, f"MInference, {LENGTH}"]
    assert ours.ratio == pytest.approx(theirs / ours.value)
    assert (f"MInference, {LENGTH}", "one head (40, 110)", None) in by


class WholeBlocks:
    """A rival that runs lists of blocks of 128, as FlexPrefill does; its own choice is the diagonal."""

    def blocks(self, columns: np.ndarray, distances: np.ndarray, num_keys: int, device: torch.device) -> torch.Tensor:
        rows = torch.arange(num_keys // 128)
        return torch.cat([rows * (num_keys // 128), rows[1:] * (num_keys // 128 + 1)])

    def estimate(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[list[torch.Tensor]]:
        num_blocks = q.shape[1] // 128
        return [[torch.arange(num_blocks) * (num_blocks + 1)] * q.shape[2]]

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: list[list[torch.Tensor]]
    ) -> torch.Tensor:
        num_blocks, out = q.shape[1] // 128, torch.empty_like(q)
        for head, own in enumerate(blocks[0]):
            mask = torch.zeros(num_blocks**2, dtype=torch.bool).index_fill_(0, own, True)
            mask = mask.view(num_blocks, num_blocks).repeat_interleave(128, 0).repeat_interleave(128, 1).tril()
            scores = (q[0, :, head] @ k[0, :, 0].T) * q.shape[-1] ** -0.5
            out[0, :, head] = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v[0, :, 0]
        return out


def test_a_rival_of_blocks() -> None:
    rival: Any = WholeBlocks()
    rows = compare(TINY, Rivals(flex=rival), [512], (), 1, CPU)
    by = {(row.case, row.metric, row.against): row for row in rows}
    kernel, whole = "FlexPrefill's kernel, 512", "FlexPrefill, its own choice, 512"
    # Of ten causal blocks the first column and the diagonal are seven.
    assert by[kernel, "density", None].value == pytest.approx(0.7)
    assert by[whole, "density", None].value == pytest.approx(0.4)
    assert (kernel, "estimate", None) not in by
    assert by[whole, "estimate", None].value > 0
    assert by[kernel, "error", attention.EXACT].value < 1e-5
    assert by[whole, "error", attention.EXACT].checked
    ours = by["longbatch, one selection per head, 512", attention.WHOLE, whole]
    assert ours.ratio == pytest.approx(by[whole, attention.WHOLE, None].value / ours.value)


def test_a_rival_that_does_not_run_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    broken: Any = object()
    rows = list(compare(TINY, Rivals(minference=broken, flex=broken), [128], (), 1, CPU))
    assert {row.case.partition(",")[0] for row in rows} == {"torch SDPA", "longbatch"}
    assert all(row.checked for row in rows)
    assert "MInference, 128 does not run: AttributeError" in capsys.readouterr().err
