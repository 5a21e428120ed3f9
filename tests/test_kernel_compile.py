"""Every kernel compiled without a GPU, as its launcher asks for it, for each kind of chip and within its shared memory.

`python tests/test_kernel_compile.py ARCH [all]` compiles for one chip and prints a line of JSON per launch.
"""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "kernels" / "longbatch_kernels"
ARCHES = (80, 86, 89, 90, 100, 120)
# The chips that convert to e4m3 by an instruction; on the others no kernel that does is launched.
FP8_ARCHES = (89, 90, 100, 120)
HALF = (torch.bfloat16, torch.float16)
WHOLE = (torch.float32,)
NUM_KEYS = 1003
# Head dimensions, and query heads for each K/V head.
DENSE = ((64, 8), (96, 3), (128, 4), (128, 7), (256, 2))


class Case(NamedTuple):
    """A launch with made-up tensors of one type. few: among the few that every run of the tests compiles, in bfloat16
    only."""

    name: str
    launch: Callable[[torch.dtype], object]
    few: bool = False
    types: tuple[torch.dtype, ...] = HALF
    arches: tuple[int, ...] = ARCHES


def rms_norm(dtype: torch.dtype, *, size: int) -> None:
    from longbatch_kernels.rms_norm import rms_norm

    rms_norm(torch.zeros(3, size, dtype=dtype), torch.zeros(size), 1e-6)


def gated(dtype: torch.dtype, *, activation: str) -> None:
    from longbatch_kernels.gated import gated

    gated(torch.zeros(3, 2 * 2880, dtype=dtype), activation)


def row_quant(dtype: torch.dtype, *, size: int) -> None:
    from longbatch_kernels.row_quant import rms_norm_quant, row_quant

    x = torch.zeros(3, size, dtype=dtype)
    row_quant(x)
    rms_norm_quant(x, torch.zeros(size), 1e-6)


def gated_quant(dtype: torch.dtype, *, activation: str) -> None:
    from longbatch_kernels.row_quant import gated_quant

    gated_quant(torch.zeros(3, 2 * 14_336, dtype=dtype), activation)


def qk_rope(dtype: torch.dtype, *, dim: int, half: int, norm: bool) -> None:
    from longbatch_kernels.qk_rope import qk_rope

    turns, weight = torch.zeros(3, half), torch.zeros(dim, dtype=dtype) if norm else None
    qk_rope(torch.zeros(3, 48, dim, dtype=dtype), 32, 8, turns, turns, weight, weight)


def paged_decode(dtype: torch.dtype, *, dim: int, group: int, window: int | None = None, kv: str = "plain") -> None:
    from longbatch_kernels.paged_decode import OpenBlocks, paged_decode

    module = importlib.import_module(f"longbatch_kernels.kv_{kv}")
    pool = tuple(torch.zeros(shape, dtype=kind) for shape, kind in module.tensors(16, 2, dim, dtype))
    table, lengths = torch.zeros(3, 17, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    opened = torch.zeros(4 * 64, 2, dim, dtype=dtype)
    open_blocks = None if kv == "plain" else OpenBlocks(opened, opened, torch.zeros(3, dtype=torch.int32))
    sinks = None if window is None else torch.zeros(2 * group)
    q = torch.zeros(3, 2 * group, dim, dtype=dtype)
    launch = partial(paged_decode, q, pool, pool, table, lengths, NUM_KEYS, scale=0.1, window=window, sinks=sinks)
    launch(kv=module, open_blocks=open_blocks)


def kv_fp8(dtype: torch.dtype, *, dim: int) -> None:
    from longbatch_kernels.kv_fp8 import quantize, tensors

    pool = tuple(torch.zeros(shape, dtype=kind) for shape, kind in tensors(16, 2, dim, dtype))
    quantize(torch.zeros(NUM_KEYS, 2, dim, dtype=dtype), torch.arange(3) * 64, pool, torch.arange(3))


def block_attention(dtype: torch.dtype, *, dim: int, rows: int, keys: int, share: int = 1, carry: bool = False) -> None:
    from longbatch_kernels.block_attention import block_attention

    q, k = torch.zeros(101, 8, dim, dtype=dtype), torch.zeros(NUM_KEYS, 2, dim, dtype=dtype)
    indices, counts = torch.zeros(8, 16, 5, dtype=torch.int32), torch.zeros(8, 16, dtype=torch.int32)
    heads = torch.arange(8, dtype=torch.int32)
    launch = partial(block_attention, q, k, k, indices, counts, block_rows=rows, block_keys=keys, first_row=0)
    launch = partial(launch, heads=heads, selections=heads, q_offset=NUM_KEYS - 101, scale=0.1, share=share)
    if carry:
        launch(carry=launch(carry_out=True))
    else:
        launch()


def last_query(dtype: torch.dtype, *, dim: int, group: int, shared: bool) -> None:
    from longbatch_kernels.last_query import last_query

    q, k = torch.zeros(64, 2 * group, dim, dtype=dtype), torch.zeros(NUM_KEYS, 2, dim, dtype=dtype)
    last_query(q, k, scale=0.1, q_offset=NUM_KEYS - 64, shared=shared)


def key_mass(dtype: torch.dtype, *, dim: int, group: int, rows: int, step: int, shared: bool) -> None:
    from longbatch_kernels.key_mass import key_mass

    q, k = torch.zeros(301, 2 * group, dim, dtype=dtype), torch.zeros(NUM_KEYS, 2, dim, dtype=dtype)
    key_mass(q, k, scale=0.1, q_offset=NUM_KEYS - 301, rows=rows, step=step, window=100, shared=shared)


def pooled(dtype: torch.dtype, *, dim: int, block: int) -> None:
    from longbatch_kernels.block_scores import pooled, pooled_scores

    q, k = torch.zeros(301, 8, dim, dtype=dtype), torch.zeros(NUM_KEYS, 2, dim, dtype=dtype)
    pooled_scores(pooled(q, block, NUM_KEYS - 301), pooled(k, block), first_block=(NUM_KEYS - 301) // block)


def antidiagonal(dtype: torch.dtype, *, dim: int, stride: int, block: int) -> None:
    from longbatch_kernels.block_scores import antidiagonal_scores

    q, k = torch.zeros(301, 8, dim, dtype=dtype), torch.zeros(NUM_KEYS, 2, dim, dtype=dtype)
    antidiagonal_scores(q, k, stride=stride, block=block, scale=0.1, q_offset=NUM_KEYS - 301)


def range_attention(dtype: torch.dtype, *, dim: int, shared: bool = False, carry: bool = False) -> None:
    from longbatch_kernels.range_attention import prepare, range_attention
    from longbatch_kernels.range_index import PackedPrompt

    num_lists = 2 if shared else 8
    q, k = torch.zeros(NUM_KEYS, 8, dim, dtype=dtype), torch.zeros(NUM_KEYS, 2, dim, dtype=dtype)
    lists = SimpleNamespace(
        starts=torch.tensor([[0, 300]], dtype=torch.int32).expand(num_lists, -1).contiguous(),
        stops=torch.tensor([[99, 310]], dtype=torch.int32).expand(num_lists, -1).contiguous(),
        counts=torch.full((num_lists,), 2, dtype=torch.int32),
        columns=torch.arange(30, dtype=torch.int32).expand(num_lists, -1).contiguous(),
        column_counts=torch.full((num_lists,), 30, dtype=torch.int32),
        windows=torch.zeros(num_lists, dtype=torch.int32),
    )
    selections = [[head * num_lists // 8 for head in range(8)]]
    ready = prepare(lists, k, k, selections=selections, prompts=[PackedPrompt(0, NUM_KEYS, 0, 0, NUM_KEYS)])
    launch = partial(range_attention, q, k, k, ready, scale=0.1)
    if carry:
        launch(carry=launch(carry_out=True))
    else:
        launch()


def dense_attention(dtype: torch.dtype, *, dim: int, group: int) -> None:
    from longbatch_kernels.dense_attention import dense_attention, prepare_dense
    from longbatch_kernels.range_index import PackedPrompt

    q, k = torch.zeros(NUM_KEYS, 2 * group, dim, dtype=dtype), torch.zeros(NUM_KEYS, 2, dim, dtype=dtype)
    # Two launches, one of them for a prompt that is short.
    before = [PackedPrompt(0, 500, 0, 0, 503), PackedPrompt(500, 3, 0, 0, 5)]
    own = [PackedPrompt(0, 500, 0, 503, 500), PackedPrompt(500, 5, 0, 5, 5)]
    ready = prepare_dense(before, k, num_heads=2 * group, causal=False)
    carry = dense_attention(q, k, k, ready, scale=0.1, carry_out=True)
    dense_attention(q, k, k, prepare_dense(own, k, num_heads=2 * group, window=100), scale=0.1, carry=carry)


def sample(_: torch.dtype) -> None:
    from longbatch_kernels.sample import sample, uniform

    row, points = torch.zeros(3), uniform(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    sample(torch.zeros(3, 128_256), row, row.long(), row, row, points)
    sample(torch.zeros(3, 128_256), row, row.long(), row, row, points, warm=False)


def top_places(_: torch.dtype) -> None:
    from longbatch_kernels.top_places import joined, top_places

    budgets, forced = torch.full((4,), 100, dtype=torch.int32), torch.full((4,), 30, dtype=torch.int32)
    joined(top_places(torch.zeros(4, 50_001), budgets, forced, 100), 50_001, gap=64)


# Per file, what is launched: a new kernel file adds its entry here. The few launch every kernel of a file, and the
# largest tiles that it has.
CASES: dict[str, list[Case]] = {
    "rms_norm": [Case("5376", partial(rms_norm, size=5376), few=True), Case("640", partial(rms_norm, size=640))],
    "gated": [
        Case("gelu", partial(gated, activation="gelu_tanh"), few=True),
        Case("silu", partial(gated, activation="silu")),
        Case("clamped", partial(gated, activation="clamped")),
    ],
    "row_quant": [
        Case("8192", partial(row_quant, size=8192), few=True, arches=FP8_ARCHES),
        Case("gelu", partial(gated_quant, activation="gelu_tanh"), few=True, arches=FP8_ARCHES),
        *(Case(f"{size}", partial(row_quant, size=size), arches=FP8_ARCHES) for size in (640, 16_384)),
        *(Case(name, partial(gated_quant, activation=name), arches=FP8_ARCHES) for name in ("silu", "clamped")),
    ],
    "qk_rope": [
        Case("norm", partial(qk_rope, dim=256, half=64, norm=True), few=True),
        Case("whole", partial(qk_rope, dim=128, half=64, norm=False)),
        Case("odd", partial(qk_rope, dim=96, half=48, norm=True)),
    ],
    "paged_decode": [
        Case("256", partial(paged_decode, dim=256, group=4), few=True),
        Case("window", partial(paged_decode, dim=64, group=8, window=128)),
        *(Case(f"{dim}", partial(paged_decode, dim=dim, group=7)) for dim in (64, 96, 128)),
        *(Case(f"{dim} whole", partial(paged_decode, dim=dim, group=4), types=WHOLE) for dim in (64, 128, 256)),
        Case("256 fp8", partial(paged_decode, dim=256, group=4, kv="fp8"), few=True),
        Case("window fp8", partial(paged_decode, dim=64, group=8, window=128, kv="fp8")),
        *(
            Case(f"{dim} fp8", partial(paged_decode, dim=dim, group=7, kv="fp8"), types=HALF + WHOLE)
            for dim in (64, 96, 128, 256)
        ),
    ],
    "kv_fp8": [
        Case("256", partial(kv_fp8, dim=256), few=True),
        *(Case(f"{dim}", partial(kv_fp8, dim=dim), types=HALF + WHOLE) for dim in (64, 96, 128)),
    ],
    "block_attention": [
        Case("128", partial(block_attention, dim=128, rows=128, keys=128), few=True),
        Case("256", partial(block_attention, dim=256, rows=128, keys=64), few=True),
        Case("carry", partial(block_attention, dim=128, rows=64, keys=64, share=4, carry=True)),
        *(
            Case(f"{dim} {rows} {keys} {share}", partial(block_attention, dim=dim, rows=rows, keys=keys, share=share))
            for dim in (64, 96, 128, 256)
            for rows, keys, share in ((64, 32, 1), (64, 64, 4), (128, 64, 1), (128, 128, 1))
        ),
        *(Case(f"{dim} whole", partial(block_attention, dim=dim, rows=64, keys=64), types=WHOLE) for dim in (128, 256)),
    ],
    "last_query": [
        Case("shared", partial(last_query, dim=128, group=4, shared=True), few=True),
        *(
            Case(f"{dim} {group} {shared}", partial(last_query, dim=dim, group=group, shared=shared))
            for dim in (64, 96, 128, 256)
            for group, shared in ((1, False), (4, False), (7, True))
        ),
    ],
    "key_mass": [
        Case("256 shared", partial(key_mass, dim=256, group=4, rows=512, step=16, shared=True), few=True),
        *(
            Case(
                f"{dim} {group} {rows} {step} {shared}",
                partial(key_mass, dim=dim, group=group, rows=rows, step=step, shared=shared),
                types=HALF + WHOLE,
            )
            for dim in (64, 96, 128, 256)
            for group, rows, step, shared in (
                (3, 512, 16, False),
                (4, 512, 16, True),
                (7, 4096, 16, True),
                (1, 64, 256, False),
            )
        ),
    ],
    "block_scores": [
        Case("pooled", partial(pooled, dim=256, block=128), few=True),
        Case("antidiagonal", partial(antidiagonal, dim=256, stride=16, block=128), few=True),
        *(Case(f"pooled {dim}", partial(pooled, dim=dim, block=64)) for dim in (64, 96, 128)),
        *(
            Case(f"antidiagonal {dim} {stride} {block}", partial(antidiagonal, dim=dim, stride=stride, block=block))
            for dim in (64, 96, 128)
            for stride, block in ((4, 64), (8, 128), (64, 64))
        ),
    ],
    "range_columns": [Case("columns", partial(range_attention, dim=96), few=True, types=HALF[:1])],
    "range_index": [Case("columns", partial(range_attention, dim=96), few=True, types=HALF[:1])],
    "range_attention": [
        Case("256 shared", partial(range_attention, dim=256, shared=True), few=True),
        Case("96 carry", partial(range_attention, dim=96, carry=True)),
        *(Case(f"{dim} {group} dense", partial(dense_attention, dim=dim, group=group)) for dim, group in DENSE),
        *(
            Case(f"{dim} {shared}", partial(range_attention, dim=dim, shared=shared))
            for dim in (64, 96, 128, 256)
            for shared in (False, True)
        ),
    ],
    "sample": [Case("rows", sample, few=True, types=HALF[:1])],
    "top_places": [Case("sums", top_places, few=True, types=HALF[:1])],
    # Only sm_90 runs this one.
    "range_attention_hopper": [
        Case("128", partial(range_attention, dim=128), few=True, arches=(90,)),
        Case("128 dense", partial(dense_attention, dim=128, group=4), few=True, arches=(90,)),
        *(
            Case(f"{dim} {group} dense", partial(dense_attention, dim=dim, group=group), arches=(90,))
            for dim, group in DENSE
        ),
        *(
            Case(f"{dim} {shared} carry", partial(range_attention, dim=dim, shared=shared, carry=True), arches=(90,))
            for dim in (64, 128)
            for shared in (False, True)
        ),
    ],
}


def kernels_of(path: Path) -> set[str]:
    """Names of the kernels that a file launches: decorated, and called something_kernel."""
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list
    }


def compiled_kernels(environment: dict[str, str], folder: Path, arch: int, *more: str) -> Iterator[dict[str, object]]:
    """What the launches for a chip came to, compiled anew in a process of their own."""
    environment = {**environment, "TRITON_CACHE_DIR": str(folder)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, __file__, str(arch), *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return map(json.loads, done.stdout.splitlines())


def check(found: list[dict[str, object]], arch: int) -> None:
    from pretended_chip import CHIPS, TENSOR_MEMORY

    failed = [f"{row['file']} {row['case']} {row['type']}: {row['error']}" for row in found if "error" in row]
    assert not failed, "\n".join(failed)
    for row in found:
        assert row["shared"] <= CHIPS[arch].shared_memory, row
        assert row["tensor_memory"] <= TENSOR_MEMORY, row
    for file, cases in CASES.items():
        if any(arch in case.arches for case in cases):
            launched = {row["kernel"] for row in found if row["file"] == file}
            # A file may define a kernel only for the versions of Triton that can compile it.
            module = importlib.import_module(f"longbatch_kernels.{file}")
            defined = {name for name in kernels_of(KERNELS / f"{file}.py") if hasattr(module, name)}
            assert defined <= launched, f"no case of {file} launches {', '.join(defined - launched)}"


def test_every_kernel_file_has_a_case() -> None:
    assert {path.stem for path in KERNELS.glob("*.py") if kernels_of(path)} == set(CASES)


@pytest.mark.parametrize("arch", ARCHES)
def test_compiles(uninstalled_environment: dict[str, str], tmp_path: Path, arch: int) -> None:
    check(list(compiled_kernels(uninstalled_environment, tmp_path, arch)), arch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCHES)
def test_compiles_in_every_shape(uninstalled_environment: dict[str, str], tmp_path: Path, arch: int) -> None:
    check(list(compiled_kernels(uninstalled_environment, tmp_path, arch, "all")), arch)


def main(arch: int, everything: bool) -> None:
    from pretended_chip import CHIPS, pretend

    compiled = pretend(CHIPS[arch])
    for file, cases in CASES.items():
        for case in cases:
            if arch not in case.arches or not (everything or case.few):
                continue
            for dtype in case.types if everything else case.types[:1]:
                where = {"file": file, "case": case.name, "type": str(dtype).removeprefix("torch.")}
                compiled.clear()
                try:
                    case.launch(dtype)
                except Exception as error:
                    # The compiler wraps an error once per function on the way to it.
                    cause: BaseException = error
                    while cause.__cause__ is not None:
                        cause = cause.__cause__
                    text = "".join(traceback.format_exception(cause, chain=False))
                    sys.stdout.write(json.dumps({**where, "error": text}) + "\n")
                for kernel in compiled:
                    sys.stdout.write(json.dumps({**where, **kernel._asdict()}) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), "all" in sys.argv[2:])
