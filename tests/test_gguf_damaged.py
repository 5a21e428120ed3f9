"""Damaged and unsuitable GGUF files: each is refused by name and quickly, and leaves nothing behind."""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest
import tiny_models

import longbatch.models.gguf
from longbatch.errors import DiskError, LongbatchError, UsageError
from longbatch.models.gguf import convert
from longbatch.models.gguf.reader import GgufError, GgufFile
from longbatch.models.gguf.worker import NoSpace
from longbatch.models.gguf.worker import convert as convert_here
from longbatch.sandbox import SandboxCrash, SandboxError, SandboxMemory, SandboxRaised, SandboxTimeout

Change = Callable[[gguf.GGUFWriter, dict[str, gguf_files.Array]], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    gguf_files.write(path, tiny_models.make("qwen2"))
    return path.read_bytes()


def refused(path: Path, match: str) -> None:
    folder = path.parent / "converted"
    start = time.monotonic()
    with pytest.raises(UsageError, match=match):
        convert(path, folder)
    assert time.monotonic() - start < 10
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def header(num_tensors: int, num_keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + rest


def tensor(name: str, shape: list[int], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


BYTES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "ends inside the magic number"),
    "another-format": (b"PK\x03\x04" + bytes(100), "does not start with the GGUF magic number"),
    "magic-only": (b"GGUF", "ends inside the version"),
    "version-1": (b"GGUF" + struct.pack("<I", 1) + bytes(99), "GGUF version 1 is not 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(99), "big-endian"),
    "huge-tensor-count": (header(1 << 60, 0), "announces 1152921504606846976 tensors"),
    "huge-key-count": (header(0, 1 << 63), "metadata keys, which its size rules out"),
    "huge-string": (header(0, 1, struct.pack("<Q", 1 << 62) + bytes(99)), "announces a string of"),
    "string-past-the-end": (header(0, 1, struct.pack("<Q", 1000) + bytes(99)), "ends inside a metadata key"),
    "huge-array": (
        header(0, 1, string("k") + struct.pack("<IIQ", 9, 4, 1 << 61)),
        "announces 2305843009213693952 values",
    ),
    "huge-string-array": (
        header(0, 1, string("k") + struct.pack("<IIQ", 9, 8, 1 << 40)),
        "strings in the metadata key k",
    ),
    "nested-array": (header(0, 1, string("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(99)), "unknown type 9"),
    "unknown-type": (header(0, 1, string("k") + struct.pack("<I", 77) + bytes(99)), "unknown type 77"),
    "not-utf-8": (header(0, 1, struct.pack("<Q", 1) + b"\xff" + bytes(99)), "not UTF-8 in a metadata key"),
    "duplicate-key": (header(0, 2, (string("k") + struct.pack("<IB", 0, 1)) * 2), "key k twice"),
    "odd-alignment": (
        header(0, 1, string("general.alignment") + struct.pack("<II", 4, 3)),
        r"general\.alignment is not a power of two",
    ),
    "no-dimensions": (header(1, 0, tensor("t", [], 0, 0) + bytes(99)), "has 0 dimensions"),
    "many-dimensions": (
        header(1, 0, string("t") + struct.pack("<I", 1 << 31) + bytes(99)),
        "has 2147483648 dimensions",
    ),
    "unknown-quantization": (header(1, 0, tensor("t", [32], 99, 0)), "unknown quantization type 99"),
    "removed-quantization": (header(1, 0, tensor("t", [32], 4, 0)), "unknown quantization type 4"),
    "zero-size": (header(1, 0, tensor("t", [32, 0], 0, 0)), r"shape \[0, 32\], which F32 does not allow"),
    "broken-block": (header(1, 0, tensor("t", [33], 8, 0)), r"shape \[33\], which Q8_0 does not allow"),
    "huge-tensor": (header(1, 0, tensor("t", [1 << 40, 1 << 40], 0, 0)), "ends inside the data of tensor t"),
    "offset-past-the-end": (header(1, 0, tensor("t", [1], 0, 1 << 60)), "ends inside the data of tensor t"),
    "overlap": (header(2, 0, tensor("t", [8], 0, 0) + tensor("u", [8], 0, 16) + bytes(99)), "tensor u overlaps"),
    "same-name": (header(2, 0, tensor("t", [8], 0, 0) + tensor("t", [8], 0, 32) + bytes(99)), "tensor t twice"),
    "no-metadata": (header(0, 0), r"general\.architecture is missing"),
}


@pytest.mark.parametrize("case", BYTES)
def test_damaged_header(case: str, tmp_path: Path) -> None:
    content, match = BYTES[case]
    (tmp_path / "model.gguf").write_bytes(content)
    refused(tmp_path / "model.gguf", match)


def set_key(key: str, value: Any) -> Change:
    def change(writer: gguf.GGUFWriter, tensors: dict[str, gguf_files.Array]) -> None:
        writer.kv_data[0][key].value = value

    return change


def remove_key(key: str) -> Change:
    return lambda writer, tensors: writer.kv_data[0].pop(key) and None


def add_key(key: str, value: str | int) -> Change:
    def change(writer: gguf.GGUFWriter, tensors: dict[str, gguf_files.Array]) -> None:
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)

    return change


def set_tensor(name: str, values: Any) -> Change:
    return lambda writer, tensors: tensors.update({name: np.asarray(values, dtype=np.float32)})


def remove_tensor(name: str) -> Change:
    return lambda writer, tensors: tensors.pop(name) is None or None


TOKENS = ["a"] * 200
CHANGES: dict[str, tuple[Change, str]] = {
    "architecture": (set_key("general.architecture", "mamba"), "architecture 'mamba' is not one of gemma3, gpt-oss"),
    "split": (add_key("split.count", 3), "one part of a split model"),
    "size-missing": (remove_key("qwen2.block_count"), r"qwen2\.block_count is missing"),
    "size-of-another-type": (set_key("qwen2.rope.freq_base", float("nan")), "is not a finite number"),
    "size-zero": (set_key("qwen2.attention.head_count", 0), r"head_count is 0, which is no possible size"),
    "layers": (set_key("qwen2.block_count", 2_000_000_000), "announces 2000000000 layers and holds 50 tensors"),
    "layer-missing": (set_key("qwen2.block_count", 5), r"lacks the tensors blk\.4\.attn_norm\.weight, .* and 7 more"),
    "layer-extra": (
        set_key("qwen2.block_count", 3),
        r"holds the tensors blk\.3\.attn_k\.bias, .* and 7 more, which qwen2",
    ),
    "value-size": (set_key("qwen2.attention.value_length", 8), "keys and values differ in size"),
    "rope-scaling": (add_key("qwen2.rope.scaling.type", "spiral"), "RoPE scaling 'spiral' is not one of none, linear"),
    "tensor-missing": (remove_tensor("blk.2.attn_k.bias"), r"lacks the tensor blk\.2\.attn_k\.bias"),
    "embeddings-missing": (remove_tensor("token_embd.weight"), r"lacks the tensor token_embd\.weight"),
    "tensor-extra": (
        set_tensor("vision.patch.weight", [[1.0]]),
        r"holds the tensor vision\.patch\.weight, which qwen2",
    ),
    "tensor-shape": (set_tensor("blk.0.attn_q.bias", [1.0] * 3), r"shape \[3\], its metadata say \[64\]"),
    "not-a-number": (
        set_tensor("output_norm.weight", [float("nan")] * 64),
        r"output_norm\.weight holds NaN or infinity",
    ),
    "infinity": (set_tensor("output_norm.weight", [float("inf")] * 64), r"output_norm\.weight holds NaN or infinity"),
    "tokenizer": (set_key("tokenizer.ggml.model", "rwkv"), "tokenizer 'rwkv' is not one of gpt2, llama"),
    "pre-tokenizer": (set_key("tokenizer.ggml.pre", "bloom"), "pre-tokenizer 'bloom' is not one of gpt-2, smollm"),
    "same-tokens": (set_key("tokenizer.ggml.tokens", TOKENS), "holds the same token twice"),
    "many-tokens": (
        set_key("tokenizer.ggml.tokens", ["a", "b", "ab", *(f"u{i}" for i in range(300))]),
        "200 token types for 303 tokens",
    ),
    "no-tokens": (remove_key("tokenizer.ggml.tokens"), r"tokenizer\.ggml\.tokens is missing"),
    "long-token": (set_key("tokenizer.ggml.tokens", ["x" * 100_000]), "holds a token of more than 1024 characters"),
    "merges": (set_key("tokenizer.ggml.merges", ["a z"]), "merges name tokens that its vocabulary does not hold"),
    "end-token": (set_key("tokenizer.ggml.eos_token_id", 5000), "eos_token_id names token 5000 of 200"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_unsuitable_content(case: str, tmp_path: Path) -> None:
    change, match = CHANGES[case]
    gguf_files.write(tmp_path / "model.gguf", tiny_models.make("qwen2"), change)
    refused(tmp_path / "model.gguf", match)


def test_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    refused(tmp_path / "model.gguf", "is not a file")
    with pytest.raises(GgufError, match="not a regular file"):
        GgufFile.open(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (SandboxRaised("NoSpace", "the disk filled up"), DiskError, "was not converted: the disk filled up"),
        (SandboxRaised("KeyError", "'x'"), UsageError, "cannot be converted: KeyError: 'x'"),
        (
            SandboxTimeout("stopped after its limit of 60 s"),
            UsageError,
            "its conversion stopped after its limit of 60 s",
        ),
        (SandboxMemory("needs more than its limit"), UsageError, "its conversion needs more than its limit"),
        (SandboxCrash("was ended by SIGSEGV"), UsageError, "the process reading it was ended by SIGSEGV"),
    ],
)
def test_failures_of_the_child(
    failure: SandboxError, kind: type[LongbatchError], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_limited(*args: Any, **kwargs: Any) -> None:
        raise failure

    monkeypatch.setattr(longbatch.models.gguf, "run_limited", run_limited)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(kind, match=message):
        convert(tmp_path / "model.gguf", tmp_path / "model")
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]


def test_disk_too_small(whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(whole)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=4096))
    with pytest.raises(NoSpace, match=r"takes 0\.\d GB and 0\.0 GB are free"):
        convert_here(str(tmp_path / "model.gguf"), str(tmp_path), "float32")


def test_every_truncation_is_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for cut in sorted({*range(0, len(whole), len(whole) // 60), len(whole) - 1}):
        path.write_bytes(whole[:cut])
        with pytest.raises(GgufError):
            GgufFile.open(path)


def test_flipped_bits_end_in_a_model_or_a_named_error(whole: bytes, tmp_path: Path) -> None:
    """Whatever is flipped in the directory: nothing but `GgufError`, and no case takes long."""
    randomness = random.Random(7)
    path, end = tmp_path / "model.gguf", whole.index(b"token_embd.weight") + 2000
    refusals = 0
    for index in range(400):
        damaged = bytearray(whole)
        for _ in range(randomness.choice([1, 1, 4])):
            position = randomness.randrange(end)
            damaged[position] ^= 1 << randomness.randrange(8)
        path.write_bytes(damaged)
        folder = tmp_path / str(index)
        folder.mkdir()
        start = time.monotonic()
        try:
            convert_here(str(path), str(folder), "float32")
        except GgufError:
            refusals += 1
        assert time.monotonic() - start < 3
    assert 50 < refusals < 400
