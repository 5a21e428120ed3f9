"""A first pass over made-up rows, so that no real row waits for a library to load or a kernel to compile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from longbatch.core import TASKS, Location, Prompt, Request, Sampling
from longbatch.engine.engine import Engine
from longbatch.engine.limits import Counters

NEW_TOKENS = 3


def warm_up(engine: Engine) -> None:
    """Prefill one full tile and one short row together, decode a few tokens, and forget it all."""
    limits, pool = engine.limits, engine.cache.pool
    longest = min(limits.tile_rows, limits.step_tokens, engine.model.spec.max_length, pool.num_free * 64 // 2)
    lengths = [longest - 64, 32] if longest > 128 else [longest // 2]
    rows = []
    for row, length in enumerate(lengths):
        sampling = Sampling(max_tokens=NEW_TOKENS, temperature=1.0, top_k=20, top_p=0.9)
        request = Request(row, None, Location(0, 0, 0), TASKS["generate"], sampling)
        rows.append((request, Prompt(np.arange(length, dtype=np.int32) % engine.model.spec.vocab_size)))
    attention = engine.attention
    # The kernels of sparse rows are compiled too, however short these are.
    for way in [None] if attention is None else [None, replace(attention, min_length=1)]:
        engine.attention = way
        for _ in engine.run([rows]):
            pass
    engine.attention, engine.counters = attention, Counters()
