"""Rows, a word tokenizer and an engine over a tiny random model: what the engine's tests are made of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
import torch

from longbatch.cache import KVCache
from longbatch.config.kv_formats import kv_format
from longbatch.core import TASKS, Location, Prompt, Request, Result, RowKey, Sampling
from longbatch.engine import Engine, EngineLimits
from longbatch.models import load
from longbatch.models.decoder import Decoder
from longbatch.prompt import Tokenizer

VOCABULARY = 200


def word_tokenizer(folder: Path) -> Tokenizer:
    """A tokenizer with one word per id: `w0 w1 ... w199`."""
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    content = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return Tokenizer.load(folder)


def tiny_decoder(folder: Path, case: str = "llama") -> Decoder:
    """A tiny model of a family in float32 on the CPU."""
    tiny_models.save(case, folder)
    return load(folder, torch.float32, torch.device("cpu"))


def new_cache(model: Decoder, num_pages: int = 64, kv: str = "auto", num_open: int = 0) -> KVCache:
    """A cache for the model, in its dtype unless `kv` names another format."""
    shapes = [(layer.num_kv_heads, layer.head_dim) for layer in model.spec.layers]
    stored = kv_format(kv, str(model.dtype).removeprefix("torch."))
    return KVCache(shapes, num_pages, dtype=model.dtype, device=model.device, kv=stored, num_open=num_open)


def new_engine(model: Decoder, tokenizer: Tokenizer, *, num_pages: int = 64, kv: str = "auto", **limits: Any) -> Engine:
    """An engine without end tokens unless `eos_ids` names some."""
    eos_ids = limits.pop("eos_ids", frozenset())
    values: dict[str, Any] = {"step_tokens": 4096, "tile_rows": 64, "decode_rows": 32, "max_tokens": 8, **limits}
    cache = new_cache(model, num_pages, kv, values["decode_rows"])
    return Engine(model, tokenizer, cache, EngineLimits(**values), eos_ids=eos_ids)


def random_ids(length: int, seed: int) -> np.ndarray:
    """int32 [length] tokens of the small vocabulary."""
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).astype(np.int32)


def request(row: int, task: str = "generate", **fields: Any) -> Request:
    """A request whose sampling fields may stand among the others."""
    names = set(Sampling.__dataclass_fields__)
    sampling = Sampling(**{name: fields.pop(name) for name in list(fields) if name in names})
    return Request(row, fields.pop("id", f"r{row}"), Location(0, row, 0), TASKS[task], sampling, **fields)


def run_rows(engine: Engine, *waves: Sequence[tuple[Request, Prompt]]) -> dict[RowKey, Result]:
    """All results by key; the pool must be whole again afterwards."""
    results: Iterable[Result] = engine.run([list(wave) for wave in waves])
    found = {result.key: result for result in results}
    assert engine.cache.pool.num_free == engine.cache.pool.num_pages, "pages leaked"
    assert engine.cache.pool.num_free_open == engine.cache.pool.num_open, "open blocks leaked"
    return found
