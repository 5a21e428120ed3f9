"""The part of a GGUF conversion that runs in a limited child process: everything that touches the file."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from longbatch.models.gguf.architectures import architecture, config, dimensions
from longbatch.models.gguf.reader import GgufError, GgufFile
from longbatch.models.gguf.tokenizer import write_tokenizer
from longbatch.models.gguf.weights import Output, outputs, write_safetensors


class NoSpace(Exception):
    """The disk cannot hold the converted model."""


def convert(gguf: str, folder: str, dtype: str) -> dict[str, Any]:
    """Writes the model into an existing, empty folder and returns a summary. Raises `GgufError`, `NoSpace`."""
    try:
        return _convert(GgufFile.open(Path(gguf)), Path(folder), dtype)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace("the disk filled up") from error
        raise


def _convert(gguf: GgufFile, folder: Path, dtype: str) -> dict[str, Any]:
    architecture(gguf)
    sizes = dimensions(gguf)
    tensors = outputs(gguf, sizes)
    _check_space(folder, tensors, dtype)
    tokenizer_config = write_tokenizer(gguf, folder)
    vocab_size = tensors[0].shape[0]
    num_tokens = len(gguf.array("tokenizer.ggml.tokens", str))
    if num_tokens > vocab_size:
        raise GgufError(f"it has {num_tokens} tokens and embeddings for only {vocab_size}")
    tied = "output.weight" not in gguf.tensors
    model_config = config(gguf, sizes, vocab_size, tied) | {"dtype": dtype}
    _write(folder / "config.json", model_config)
    _write(folder / "tokenizer_config.json", tokenizer_config)
    _write(folder / "generation_config.json", _generation_config(gguf, model_config, tokenizer_config))
    write_safetensors(folder / "model.safetensors", tensors, dtype)
    return {
        "architecture": model_config["architectures"][0],
        "name": gguf.metadata.get("general.name"),
        "license": gguf.metadata.get("general.license"),
        "num_parameters": sum(tensor.num_bytes("float32") // 4 for tensor in tensors),
        "quantization": sorted({tensor.type.name for tensor in gguf.tensors.values()}),
        "chat_template": "chat_template" in tokenizer_config,
        "dtype": dtype,
    }


def _check_space(folder: Path, tensors: list[Output], dtype: str) -> None:
    needed = sum(tensor.num_bytes(dtype) for tensor in tensors)
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise NoSpace(f"the converted model takes {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free")


def _generation_config(gguf: GgufFile, model: dict[str, Any], tokenizer: dict[str, Any]) -> dict[str, Any]:
    """End tokens: the file's own, and those its chat template writes at the end of a turn."""
    result: dict[str, Any] = {key: model[key] for key in ("bos_token_id", "pad_token_id") if key in model}
    ends = [
        gguf.integer(f"tokenizer.ggml.{name}_token_id")
        for name in ("eos", "eot", "eom")
        if f"tokenizer.ggml.{name}_token_id" in gguf.metadata
    ]
    template = json.dumps(tokenizer.get("chat_template", ""))
    tokens = gguf.array("tokenizer.ggml.tokens", str)
    ends += [tokens.index(token) for token in architecture(gguf).turn_ends if token in template and token in tokens]
    ends = list(dict.fromkeys(ends))
    if ends:
        result["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    sampling = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    suggested = {
        name: gguf.metadata[f"general.sampling.{key}"]
        for name, key in sampling.items()
        if f"general.sampling.{key}" in gguf.metadata
    }
    return result | ({"do_sample": True, **suggested} if suggested else {})


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
