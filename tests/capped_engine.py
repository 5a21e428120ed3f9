"""An engine whose process may take little more memory than it has; run by test_ladder.py.

    python capped_engine.py CASE

The waves of a case run twice without a cap: in small pieces, and as they should, which is the reference. The peaks
of both tell where a cap lies under which only the small pieces fit; the kernel enforces it in the third run. The last
two are printed as JSON.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_rows import new_cache, request, word_tokenizer

from longbatch.core import Prompt, Request
from longbatch.engine import Engine, EngineLimits
from longbatch.models import describe, random_weights

MIB = 1 << 20
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 32768,
}
LIMITS = {"tile_rows": 1024, "step_tokens": 8192, "decode_rows": 64, "max_tokens": 8}
# 16,384 gates: 128 KiB for each row of a tile. 32 K/V heads of 64: 16 KiB for each token of a step.
WIDE_TILES = {"intermediate_size": 16384}
WIDE_TOKENS = {"num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 64}


@dataclass
class Case:
    """config: of the model, beyond CONFIG. fits: limits of the engine that fit under the cap; empty where the cap is
    to leave almost nothing. waves: rows as (task, tokens)."""

    config: dict[str, Any]
    fits: dict[str, int]
    waves: list[list[tuple[str, int]]]


CASES = {
    "tile": Case(WIDE_TILES, {"tile_rows": 512}, [[("generate", 2048)], [("generate", 2048)]]),
    "chunks": Case(WIDE_TOKENS, {"tile_rows": 512, "step_tokens": 4096}, [[("embed", 8192)], [("generate", 8192)]]),
    "wave": Case(WIDE_TOKENS, {"step_tokens": 4096}, [[("generate", 2048)] * 4, [("generate", 2048)] * 4]),
    "decode": Case({"vocab_size": 400_000}, {"decode_rows": 32}, [[("generate", 8)] * 64]),
    "bottom": Case(WIDE_TILES, {}, [[("generate", 2048), ("generate", 16)]]),
}


def rows_of(case: Case) -> list[list[tuple[Request, Prompt]]]:
    waves, row = [], 0
    for wave in case.waves:
        waves.append([])
        for task, length in wave:
            ids = np.random.default_rng(row).integers(3, 200, length).astype(np.int32)
            waves[-1].append((request(row, task, logprobs=0, max_tokens=4), Prompt(ids)))
            row += 1
    return waves


def main(name: str) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    case = CASES[name]
    spec = describe({**CONFIG, **case.config})
    model = random_weights(spec, torch.float32, torch.device("cpu"), 0)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = word_tokenizer(Path(folder))
    cache = new_cache(model, num_pages=140)

    def run(**smaller: int) -> list[dict[str, Any]]:
        engine = Engine(model, tokenizer, cache, EngineLimits(**{**LIMITS, **smaller}), eos_ids=frozenset())
        found = [describe_result(result) for result in engine.run(rows_of(case))]
        return sorted(found, key=lambda result: int(result["row"]))

    run(**case.fits)
    small = memory("VmPeak")
    free = run()
    large = memory("VmPeak")
    limit = memory("VmSize") + 20 * MIB
    if case.fits:
        assert large > small + 20 * MIB, (large, small)
        limit = (large + small) // 2
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sys.stdout.write(json.dumps({"free": free, "capped": run()}))


def memory(name: str) -> int:
    """Bytes of address space, now (VmSize) or at most so far (VmPeak)."""
    match = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def describe_result(result: Any) -> dict[str, Any]:
    return {
        "row": result.row,
        "error": None if result.error is None else result.error.type,
        "tokens": [entry.id for entry in result.logprobs or []],
        "numbers": [entry.logprob for entry in result.logprobs or []],
        "embedding": None if result.embedding is None else result.embedding.tolist(),
        "notes": result.notes,
    }


if __name__ == "__main__":
    main(sys.argv[1])
