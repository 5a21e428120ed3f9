"""Rivals of `longbatch bench attention`, imported from a folder that holds copies of their repositories.

--rivals DIR holds `MInference/` (github.com/microsoft/MInference) and `FlexPrefill/`
(github.com/bytedance/FlexPrefill), or either; these files are enough:

    MInference/csrc/vertical_slash_index.cu
    MInference/minference/ops/pit_sparse_flash_attention_v2.py
    MInference/minference/modules/minference_forward.py
    FlexPrefill/flex_prefill/ops/flex_prefill_attention.py

Nothing of theirs is part of longbatch. Their packages' `__init__` files, which load whole frameworks, are not run. What
is changed on loading:

- MInference's CUDA index is compiled without its last function, which only allocates the four tables and takes torch's
  headers a minute to compile; the kernel and its launcher are as they stand, and the tables are allocated here.
- MInference's estimate is a function inside a module that needs a GPU and transformers' internals on import. Its source
  is taken out of the file and run as it stands; where it calls the attention, it hands over its selection.
- FlexPrefill chooses its settings by the GPU's name and does not know the H200: it is told that this is an H100.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import importlib
import io
import math
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longbatch.errors import UsageError
from longbatch.folders import cache_folder

MINFERENCE = "MInference"
FLEX_PREFILL = "FlexPrefill"
# FlexPrefill's settings for Llama-3.1, from its README.
GAMMA, TAU, MIN_BUDGET, BLOCK = 0.95, 0.1, 1024, 128
Index = tuple[Tensor, Tensor, Tensor, Tensor]

_LAUNCHER = "convert_vertical_slash_indexes_64x64"
_HOST_FUNCTION = "std::vector<at::Tensor> convert_vertical_slash_indexes("
_BINDING = f"""
extern "C" void convert(
    const int* seqlens, const int* columns, const int* slashes, int* block_count, int* block_offset, int* column_count,
    int* column_index, int num_rows, int num_slashes, int num_columns
) {{
    {_LAUNCHER}(
        seqlens, columns, slashes, block_count, block_offset, column_count, column_index, 1, 1, num_rows, num_columns,
        num_slashes
    );
}}
"""


class MInference:
    """Estimate, index and attention of one vertical-slash head. q, k, v [1, 1, N, D], K and V expanded to the head."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Import and compile. Raises UsageError where files are missing."""
        forward = _required(folder / "minference/modules/minference_forward.py")
        self._convert = _compiled_index(_required(folder / "csrc/vertical_slash_index.cu"))
        self.kernels = import_kernels(folder)
        self._estimate = estimate_of(forward.read_text(encoding="utf-8"), device)

    def estimate(self, q: Tensor, k: Tensor, vertical: int, slash: int) -> tuple[Tensor, Tensor]:
        """Columns [1, 1, 1, vertical] and distances [1, 1, slash] that the last 64 queries choose."""
        chosen: tuple[Tensor, Tensor] = self._estimate(q, k, vertical, slash)
        return chosen

    def index(self, columns: Tensor, distances: Tensor, num_keys: int) -> Index:
        """Sort, then block_count, block_offset, column_count and column_index, as `vertical_slash_sparse_attention`
        makes them."""
        columns = columns.to(torch.int32).reshape(1, 1, -1).sort(dim=-1, descending=False)[0]
        distances = distances.to(torch.int32).reshape(1, 1, -1).sort(dim=-1, descending=True)[0]
        lengths = torch.tensor([num_keys], dtype=torch.int32, device=columns.device)
        return self._convert(lengths, columns, distances, num_keys)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, index: Index) -> Tensor:
        """Its Triton kernel on an index, out [1, 1, N, D]. N is a multiple of 64 here, so that nothing is padded."""
        lengths = torch.tensor([q.shape[2]], dtype=torch.int32, device=q.device)
        out: Tensor = self.kernels._triton_mixed_sparse_attention(q, k, v, lengths, *index, q.shape[-1] ** -0.5, 64, 64)
        return out

    @staticmethod
    def keys_of_row(index: Index, row: int) -> Tensor:
        """int64 [n]: the keys that its kernel reads for a row, each as often as it reads it."""
        block_count, block_offset, column_count, column_index = (part[0, 0, row // 64] for part in index)
        starts = block_offset[: int(block_count)].long()
        keys = (starts[:, None] + torch.arange(64, device=starts.device)).flatten()
        return torch.cat([keys[keys <= row], column_index[: int(column_count)].long()])


class FlexPrefill:
    """FlexPrefill's kernel and its whole attention. q [1, N, H, D], k and v [1, N, Hkv, D], bfloat16."""

    def __init__(self, folder: Path) -> None:
        """Import it. Raises UsageError where the file or what it needs is missing."""
        _required(folder / "flex_prefill/ops/flex_prefill_attention.py")
        _bare_package("flex_prefill", folder / "flex_prefill")
        _bare_package("flex_prefill.ops", folder / "flex_prefill/ops")
        try:
            self.module: Any = importlib.import_module("flex_prefill.ops.flex_prefill_attention")
        except ModuleNotFoundError as error:
            raise UsageError(f"FlexPrefill needs the package {error.name}", hint=f"pip install {error.name}") from error
        self.module.__dict__["GPU_NAME"] = "nvidia h100"

    def blocks(self, columns: np.ndarray, distances: np.ndarray, num_keys: int, device: torch.device) -> Tensor:
        """int64 [n]: a selection in its blocks of 128 and by its own rule for them: as many column blocks as the
        columns fill, the first among them, spread as the columns are, and each block diagonal that holds a distance."""
        num_blocks = math.ceil(num_keys / BLOCK)
        count = min(num_blocks, math.ceil(len(columns) / BLOCK))
        chosen = np.unique(np.concatenate([[0], columns[:: max(1, len(columns) // count)][:count] // BLOCK]))
        vertical = torch.from_numpy(chosen).to(device)[None, None]
        diagonals = torch.from_numpy(np.unique(distances // BLOCK).astype(np.int64)).to(device)[None, None]
        found: Tensor = self.module.transform_veritcal_slash_idx(vertical, diagonals, num_blocks)[0][0]
        return found

    def attend(self, q: Tensor, k: Tensor, v: Tensor, blocks: list[list[Tensor]]) -> Tensor:
        """Its kernel on the blocks of each batch and head, out [1, N, H, D]."""
        out: Tensor = self.module.triton_block_wise_prefill_attention(q, k, v, blocks, BLOCK)
        return out

    def estimate(self, q: Tensor, k: Tensor, v: Tensor) -> list[list[Tensor]]:
        """The blocks that it would run, by batch and head."""
        budget = math.ceil(MIN_BUDGET / BLOCK)
        found: list[list[Tensor]] = self.module.get_active_blocks(q, k, v, BLOCK, GAMMA, budget, 2**31 - 1, TAU)
        return found


def import_kernels(folder: Path) -> Any:
    """MInference's module of Triton kernels, its CUDA extension left out; the loader says nothing of other kernels."""
    _required(folder / "minference/ops/pit_sparse_flash_attention_v2.py")
    _bare_package("minference", folder / "minference")
    _bare_package("minference.ops", folder / "minference/ops")
    cuda: Any = types.ModuleType("minference.cuda")
    cuda.convert_vertical_slash_indexes = None
    sys.modules["minference.cuda"] = cuda
    # With either of these it would run FlashAttention-2's CUDA kernel in place of its own.
    absent = {name: sys.modules.pop(name, None) for name in ("sgl_kernel", "vllm_flash_attn", "vllm")}
    try:
        sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module("minference.ops.pit_sparse_flash_attention_v2")
    finally:
        for name, module in absent.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def estimate_of(source: str, device: torch.device) -> Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]:
    """The vertical-slash estimate of `minference_forward.py` as (q, k, vertical, slash) -> (columns, distances)."""
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    try:
        outer, diagonals = functions["minference_prefill_kernel"], functions["sum_all_diagonal_matrix"]
        nested = (node for node in outer.body if isinstance(node, ast.FunctionDef))
        inner = next(node for node in nested if node.name == "vertical_and_slash_kernel")
    except (KeyError, StopIteration) as error:
        raise UsageError("this copy of MInference is not that of commit fb56c91: its estimate is missing") from error
    rows = torch.arange(64, device=device)
    names: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "LAST_Q_MASK": rows[None, None, :, None] >= rows[None, None, None, :],
        "vertical_slash_sparse_attention": lambda q, k, v, columns, distances: (columns, distances),
    }
    tree = ast.Module([diagonals, inner], type_ignores=[])
    exec(compile(tree, "minference_forward.py", "exec"), names)

    def estimate(q: Tensor, k: Tensor, vertical: int, slash: int) -> tuple[Tensor, Tensor]:
        names.update(q_len=q.shape[2], head_dim=q.shape[-1])
        chosen: tuple[Tensor, Tensor] = names["vertical_and_slash_kernel"](q, k, None, vertical, slash)
        return chosen

    return estimate


def index_source(source: str) -> str:
    """The CUDA file without what needs torch's headers, and with a C entry. Raises UsageError where it is another."""
    head, found, _ = source.partition(_HOST_FUNCTION)
    if not found or _LAUNCHER not in head:
        raise UsageError("this copy of MInference's vertical_slash_index.cu is not that of commit fb56c91")
    return re.sub(r"(?m)^#include <(pybind11|torch)/.*\n", "", head) + _BINDING


def _compiled_index(path: Path) -> Callable[[Tensor, Tensor, Tensor, int], Index]:
    """The CUDA index for one head: lengths [1], columns [1, 1, V], distances [1, 1, S] descending, keys -> tables."""
    from torch.utils import cpp_extension

    folder = cache_folder() / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    changed = folder / "vertical_slash_index.cu"
    text = index_source(path.read_text(encoding="utf-8"))
    if not changed.exists() or changed.read_text(encoding="utf-8") != text:
        changed.write_text(text, encoding="utf-8")
    name = "longbatch_minference_index"
    cpp_extension.load(name, [str(changed)], build_directory=str(folder), is_python_module=False, with_cuda=True)
    library = ctypes.CDLL(str(folder / f"{name}.so"))

    def convert(lengths: Tensor, columns: Tensor, distances: Tensor, num_keys: int) -> Index:
        num_rows, num_slashes, num_columns = (num_keys + 63) // 64, distances.shape[-1], columns.shape[-1]

        def table(*shape: int) -> Tensor:
            return torch.zeros((1, 1, *shape), dtype=torch.int32, device=columns.device)

        index = table(num_rows), table(num_rows, num_slashes), table(num_rows), table(num_rows, num_columns)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (lengths, columns, distances, *index)]
        library.convert(*pointers, num_rows, num_slashes, num_columns)
        return index

    return convert


def _bare_package(name: str, folder: Path) -> None:
    """A package object that finds its modules in `folder` and runs no `__init__`."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


def _required(path: Path) -> Path:
    if not path.is_file():
        raise UsageError(f"{path} is missing", hint="--rivals wants copies of the rivals' repositories, see the docs")
    return path
