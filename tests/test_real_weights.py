"""Real weights through the engine against transformers on the same folder: answers and scores, in float32 on the CPU.

The quick half runs a few short prompts; the slow half is the full comparison over prompts of 50 to 6,000 tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_rows import new_engine, request, run_rows

from longbatch.core import Prompt
from longbatch.engine import Engine
from longbatch.models import load
from longbatch.prompt import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
NEW_TOKENS = 64
SCORE_TOLERANCE = 1e-4
QUICK = [50, 130]
FULL = np.geomspace(50, 6000, 20).round().astype(int).tolist()
MODELS = ["smollm2_dir", "gemma3_dir"]


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> tuple[Engine, Any, list[int]]:
    """Our engine, transformers' model, and the tokens of the project's own texts to cut prompts from."""
    folder: Path = request.getfixturevalue(request.param)
    tokenizer = Tokenizer.load(folder)
    model = load(folder, torch.float32, torch.device("cpu"))
    engine = new_engine(model, tokenizer, num_pages=1000, step_tokens=16384, tile_rows=1024, decode_rows=64)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    files = [
        ROOT / "README.md",
        *sorted((ROOT / "samples/documents").iterdir()),
        *sorted((ROOT / "longbatch").glob("*.py")),
    ]
    text = "\n\n".join(path.read_text() for path in files)
    return engine, reference, tokenizer.encode(text, allow_special=False)


def prompts(tokens: list[int], lengths: list[int]) -> list[np.ndarray]:
    """Stretches of the text, each from another place."""
    starts = np.random.default_rng(1).integers(0, len(tokens) - max(lengths), len(lengths)).tolist()
    return [np.array(tokens[start : start + n], dtype=np.int32) for start, n in zip(starts, lengths, strict=True)]


def generated_by(reference: Any, ids: np.ndarray) -> list[int]:
    """transformers' greedy continuation, never stopped by an end token."""
    batch = torch.from_numpy(ids.astype(np.int64))[None]
    config = transformers.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    output = reference.generate(batch, attention_mask=torch.ones_like(batch), generation_config=config)
    return [int(token) for token in output[0, len(ids) :]]


def check_answers(pair: tuple[Engine, Any, list[int]], lengths: list[int]) -> None:
    engine, reference, tokens = pair
    rows = [
        (request(i, max_tokens=NEW_TOKENS, logprobs=0), Prompt(ids)) for i, ids in enumerate(prompts(tokens, lengths))
    ]
    results = {key.id: result for key, result in run_rows(engine, rows).items()}
    for row, prompt in rows:
        logprobs = results[row.id].logprobs
        assert logprobs is not None
        assert [entry.id for entry in logprobs] == generated_by(reference, prompt.ids), f"{len(prompt.ids)} tokens"


def check_scores(pair: tuple[Engine, Any, list[int]], lengths: list[int]) -> None:
    engine, reference, tokens = pair
    rows = [(request(i, "score"), Prompt(ids, (1, len(ids)))) for i, ids in enumerate(prompts(tokens, lengths))]
    results = {key.id: result for key, result in run_rows(engine, rows).items()}
    for row, prompt in rows:
        ids = torch.from_numpy(prompt.ids.astype(np.int64))
        with torch.inference_mode():
            logits = reference(ids[None]).logits[0, :-1]
        expected = torch.log_softmax(logits.float(), -1).gather(1, ids[1:, None])[:, 0].numpy()
        found = [entry.logprob for entry in results[row.id].logprobs or ()]
        assert np.abs(np.array(found) - expected).max() <= SCORE_TOLERANCE, f"{len(ids)} tokens"


def test_answers(pair: tuple[Engine, Any, list[int]]) -> None:
    check_answers(pair, QUICK)


def test_scores(pair: tuple[Engine, Any, list[int]]) -> None:
    check_scores(pair, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_answers_to_twenty_prompts(pair: tuple[Engine, Any, list[int]]) -> None:
    check_answers(pair, FULL)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_scores_of_twenty_prompts(pair: tuple[Engine, Any, list[int]]) -> None:
    check_scores(pair, FULL)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_neighbours_change_nothing(pair: tuple[Engine, Any, list[int]]) -> None:
    """16 rows alone, packed, chunked, and with a shared beginning: the same tokens, log-probabilities within 1e-5."""
    engine, _, tokens = pair
    shared = np.array(tokens[:256], dtype=np.int32)
    lengths = np.geomspace(20, 600, 16).round().astype(int).tolist()
    rows = [
        (request(i, max_tokens=24, logprobs=0), Prompt(np.concatenate([shared, ids])))
        for i, ids in enumerate(prompts(tokens, lengths))
    ]

    def answers(found: dict[Any, Any]) -> list[tuple[list[int], np.ndarray]]:
        ordered = [found[row.key].logprobs for row, _ in rows]
        return [([e.id for e in entries], np.array([e.logprob for e in entries])) for entries in ordered]

    model, tokenizer = engine.model, engine.tokenizer
    small = {"num_pages": 1000, "decode_rows": 64, "tile_rows": 128}
    chunked = new_engine(model, tokenizer, step_tokens=256, **small)
    packed = new_engine(model, tokenizer, step_tokens=16384, **small)
    alone: dict[Any, Any] = {}
    for row in rows:
        alone |= run_rows(packed, [row])
    together = run_rows(packed, rows)
    assert sum(result.usage.cached_tokens > 0 for result in together.values()) == 15, "the beginning was shared"
    largest = 0.0
    for other in (together, run_rows(chunked, rows), run_rows(chunked, *[[row] for row in rows])):
        for (ids, logprobs), (other_ids, other_logprobs) in zip(answers(alone), answers(other), strict=True):
            assert ids == other_ids
            largest = max(largest, float(np.abs(logprobs - other_logprobs).max()))
    assert largest <= 1e-5
