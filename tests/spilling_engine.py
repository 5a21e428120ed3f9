"""An engine with one long row whose state is spilled; run, and killed, by test_spill.py.

python spilling_engine.py TASK FOLDER
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from capped_engine import CONFIG
from engine_rows import new_engine, random_ids, request, word_tokenizer

from longbatch.core import Prompt, Request
from longbatch.engine import Engine, Spill
from longbatch.models import describe, random_weights
from longbatch.prompt import Tokenizer

LENGTH = 6000
CHUNK = 64


def row_of(task: str, length: int = LENGTH, seed: int = 0) -> tuple[Request, Prompt]:
    """`embed` takes the mean over all positions."""
    ids = random_ids(length, seed)
    if task == "classify":
        labels = tuple(random_ids(3, number) for number in range(2))
        return request(0, task, labels=("one", "two")), Prompt(ids, branches=labels)
    fields: dict[str, Any] = {"pooling": "mean"} if task == "embed" else {"logprobs": 2}
    return request(0, task, **fields), Prompt(ids, scored=(1, length) if task == "score" else (0, 0))


def make_engine(
    tokenizer: Tokenizer,
    folder: Path | None,
    model: str = "model",
    dtype: torch.dtype = torch.float32,
    **limits: Any,
) -> Engine:
    decoder = random_weights(describe(CONFIG), dtype, torch.device("cpu"), 0)
    limits = {"tile_rows": CHUNK, "step_tokens": 4096, "chunk_tokens": CHUNK, **limits}
    engine = new_engine(decoder, tokenizer, num_pages=LENGTH // 64 + 4, **limits)
    engine.spill = None if folder is None else Spill(folder, model)
    return engine


def answer(engine: Engine, row: tuple[Request, Prompt]) -> dict[str, Any]:
    """What the row's result says, and how many tokens were prefilled for it."""
    before = engine.counters.prefill_tokens
    (result,) = engine.run([[row]])
    entries = result.logprobs or []
    return {
        "answer": {
            "status": result.status,
            "text": result.text,
            "label": result.label,
            "embedding": None if result.embedding is None else np.asarray(result.embedding).tolist(),
            "logprobs": [[entry.id, entry.logprob, [list(top) for top in entry.top]] for entry in entries],
        },
        "prefilled": engine.counters.prefill_tokens - before,
        "cached": result.usage.cached_tokens,
        "notes": result.notes,
    }


def main(task: str, folder: Path) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        tokenizer = word_tokenizer(Path(place))
    sys.stdout.write(json.dumps(answer(make_engine(tokenizer, folder), row_of(task))))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
