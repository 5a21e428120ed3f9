"""Quantized checkpoints written plainly, number by number, from the descriptions of their formats.

A writer takes a float matrix [out, in] and gives the tensors that a checkpoint would keep, and the matrix that they
stand for. Written in NumPy and apart from the code that reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Matrix = np.ndarray[Any, np.dtype[Any]]
Stored = dict[str, torch.Tensor]
Writer = Callable[[Matrix], tuple[Stored, Matrix]]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_rows(values: Matrix, bits: int) -> torch.Tensor:
    """[n, m] -> int32 [n * bits / 32, m]: successive rows in a word, lowest bits first."""
    per_word = 32 // bits
    words = np.zeros((-(-values.shape[0] // per_word), values.shape[1]), dtype=np.uint32)
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            words[row // per_word, column] |= np.uint32(int(values[row, column]) << (bits * (row % per_word)))
    return torch.from_numpy(words.view(np.int32).copy())


def pack_columns(values: Matrix, bits: int) -> torch.Tensor:
    """[n, m] -> int32 [n, m * bits / 32]."""
    return pack_rows(values.T, bits).T.contiguous()


def pack_awq(values: Matrix) -> torch.Tensor:
    """[n, m] -> int32 [n, m / 8]: field f of a word is column AWQ_ORDER[f] of its eight."""
    words = np.zeros((values.shape[0], values.shape[1] // 8), dtype=np.uint32)
    for row in range(values.shape[0]):
        for word in range(words.shape[1]):
            for field, column in enumerate(AWQ_ORDER):
                words[row, word] |= np.uint32(int(values[row, 8 * word + column]) << (4 * field))
    return torch.from_numpy(words.view(np.int32).copy())


def quantize(matrix: Matrix, groups: Matrix, bits: int, symmetric: bool) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    """Values, zeros and scales of each output and group, and the matrix that they stand for. groups [in]: of inputs."""
    num_groups, top = int(groups.max()) + 1, (1 << bits) - 1
    values = np.zeros(matrix.shape, dtype=np.int64)
    zeros = np.zeros((matrix.shape[0], num_groups), dtype=np.int64)
    scales = np.zeros(zeros.shape, dtype=np.float16)
    meant = np.zeros(matrix.shape, dtype=np.float32)
    for group in range(num_groups):
        own = groups == group
        low, high = matrix[:, own].min(1), matrix[:, own].max(1)
        if symmetric:
            scales[:, group] = np.maximum(abs(low), abs(high)) * 2 / top
            zeros[:, group] = (top + 1) // 2
        else:
            scales[:, group] = np.where(high > low, high - low, 1) / top
            zeros[:, group] = np.clip(np.round(-low / scales[:, group].astype(np.float32)), 0, top)
        scale = scales[:, group].astype(np.float32)[:, None]
        steps = np.round(matrix[:, own] / scale).astype(np.int64) + zeros[:, group][:, None]
        values[:, own] = np.clip(steps, 0, top)
        meant[:, own] = (values[:, own] - zeros[:, group][:, None]).astype(np.float32) * scale
    return values, zeros, scales, meant


def groups_of(inputs: int, size: int, seed: int | None = None) -> Matrix:
    """The group of each input: in order, or shuffled."""
    groups = np.arange(inputs) // (inputs if size == -1 else size)
    return groups if seed is None else np.random.default_rng(seed).permutation(groups)


def gptq(bits: int, size: int, *, symmetric: bool, v2: bool = False, shuffled: bool = False) -> Writer:
    """As AutoGPTQ keeps it, `qzeros` one too small, or as GPTQModel does."""

    def write(matrix: Matrix) -> tuple[Stored, Matrix]:
        groups = groups_of(matrix.shape[1], size, 7 if shuffled else None)
        values, zeros, scales, meant = quantize(matrix, groups, bits, symmetric)
        kept = zeros if v2 else (zeros - 1) % (1 << bits)
        return {
            "qweight": pack_rows(values.T, bits),
            "qzeros": pack_columns(kept.T, bits),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
            "bias": torch.zeros(matrix.shape[0], dtype=torch.float16),
        }, meant

    return write


def awq(size: int) -> Writer:
    """As AutoAWQ keeps it for its gemm kernels."""

    def write(matrix: Matrix) -> tuple[Stored, Matrix]:
        values, zeros, scales, meant = quantize(matrix, groups_of(matrix.shape[1], size), 4, symmetric=False)
        packed = {"qweight": pack_awq(values.T), "qzeros": pack_awq(zeros.T)}
        return {**packed, "scales": torch.from_numpy(scales.T.copy())}, meant

    return write


def packed(bits: int, size: int, *, symmetric: bool, shuffled: bool = False) -> Writer:
    """As compressed-tensors keeps it: `pack-quantized`."""

    def write(matrix: Matrix) -> tuple[Stored, Matrix]:
        groups = groups_of(matrix.shape[1], size, 7 if shuffled else None)
        values, zeros, scales, meant = quantize(matrix, groups, bits, symmetric)
        stored = {
            "weight_packed": pack_columns(values, bits),
            "weight_scale": torch.from_numpy(scales.copy()),
            "weight_shape": torch.tensor(matrix.shape),
        }
        if not symmetric:
            stored["weight_zero_point"] = pack_rows(zeros, bits)
        if shuffled:
            stored["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return stored, meant

    return write


def scaled(
    rows: int | None, columns: int | None, *, name: str = "weight_scale", fp8: bool = True, zeros: bool = False
) -> Writer:
    """8-bit numbers, a scale for each block of rows and columns, None for all; with a scale of activations besides."""

    def write(matrix: Matrix) -> tuple[Stored, Matrix]:
        out, inputs = matrix.shape
        high, wide = rows or out, columns or inputs
        scales = np.zeros((-(-out // high), -(-inputs // wide)), dtype=np.float32)
        shifts = np.zeros(scales.shape, dtype=np.int8)
        kept = np.zeros(matrix.shape, dtype=np.float32)
        meant = np.zeros(matrix.shape, dtype=np.float32)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
                scales[i, j] = np.float32(abs(matrix[block]).max() / (448 if fp8 else 100))
                shifts[i, j] = (i + j) % 5 if zeros else 0
                numbers = matrix[block] / scales[i, j]
                if fp8:
                    numbers = torch.from_numpy(numbers).to(torch.float8_e4m3fn).float().numpy()
                else:
                    numbers = np.round(numbers) + shifts[i, j]
                kept[block] = numbers
                meant[block] = (numbers - np.float32(shifts[i, j])) * scales[i, j]
        dtype = torch.float8_e4m3fn if fp8 else torch.int8
        shape = () if scales.size == 1 and rows is None else scales.shape
        stored = {"weight": torch.from_numpy(kept).to(dtype), name: torch.from_numpy(scales.reshape(shape))}
        stored["input_scale"] = torch.ones(())
        if zeros:
            stored["weight_zero_point"] = torch.from_numpy(shifts.reshape(shape))
        return stored, meant

    return write


def quantize_folder(
    folder: Path, twin: Path, config: dict[str, Any], write: Writer, only: str = "_proj.weight"
) -> None:
    """Quantizes the matrices of a model folder whose names end in `only`, and makes the twin hold, in floats, exactly
    what the quantized folder stands for."""
    twin.mkdir()
    settings = json.loads((folder / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
    tensors, plain = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        plain[name] = tensor
        if not name.endswith(only):
            tensors[name] = tensor
            continue
        stored, meant = write(tensor.float().numpy())
        tensors |= {name.removesuffix("weight") + suffix: part.contiguous() for suffix, part in stored.items()}
        plain[name] = torch.from_numpy(meant)
    save_file(tensors, folder / "model.safetensors")
    save_file(plain, twin / "model.safetensors")
