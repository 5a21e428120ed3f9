"""Real weights through the engine against transformers on the same folder: answers and scores, in float32 on the CPU.

The quick half runs a few short prompts; the slow half is the full comparison over prompts of 50 to 6,000 tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_rows import new_engine, request, run_rows

from longbatch.core import Prompt, TokenLogprob
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
def pair(request: pytest.FixtureRequest) -> tuple[Engine, Path, list[int]]:
    """Our engine, the model's folder, and the tokens of the project's own texts to cut prompts from."""
    folder: Path = request.getfixturevalue(request.param)
    tokenizer = Tokenizer.load(folder)
    model = load(folder, torch.float32, torch.device("cpu"))
    engine = new_engine(model, tokenizer, num_pages=1000, step_tokens=16384, tile_rows=1024, decode_rows=64)
    return engine, folder, tokenizer.encode(project_text(), allow_special=False)


def project_text() -> str:
    """The project's own texts."""
    folders = (ROOT / "samples/documents").iterdir(), (ROOT / "longbatch").glob("*.py")
    files = [ROOT / "README.md", *(path for folder in folders for path in sorted(folder))]
    return "\n\n".join(path.read_text() for path in files)


def reference_of(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' model of the same folder."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    # What the call leaves out comes from here, and no answer may stop at an end token.
    reference.generation_config.eos_token_id = None
    return reference


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


@torch.inference_mode()
def scores_by(reference: Any, ids: torch.Tensor) -> torch.Tensor:
    """transformers' log-probability of each token but the first; logits in tiles, for those of 6,000 positions fill a
    small machine."""
    hidden = reference.model(ids[None]).last_hidden_state[0, :-1]
    tiles = zip(hidden.split(256), ids[1:, None].split(256), strict=True)
    return torch.cat([torch.log_softmax(reference.lm_head(h), -1).gather(1, wanted)[:, 0] for h, wanted in tiles])


def check_answers(pair: tuple[Engine, Path, list[int]], lengths: list[int]) -> None:
    engine, folder, tokens = pair
    reference = reference_of(folder, torch.float32)
    rows = [
        (request(i, max_tokens=NEW_TOKENS, logprobs=0), Prompt(ids)) for i, ids in enumerate(prompts(tokens, lengths))
    ]
    results = {key.id: result for key, result in run_rows(engine, rows).items()}
    for row, prompt in rows:
        logprobs = results[row.id].logprobs
        assert logprobs is not None
        assert [entry.id for entry in logprobs] == generated_by(reference, prompt.ids), f"{len(prompt.ids)} tokens"


def check_scores(pair: tuple[Engine, Path, list[int]], lengths: list[int]) -> None:
    """Every token against float64. The long half misses the tolerance on Gemma 3: see docs/benchmarks.md."""
    engine, folder, tokens = pair
    reference = reference_of(folder, torch.float64)
    rows = [(request(i, "score"), Prompt(ids, (1, len(ids)))) for i, ids in enumerate(prompts(tokens, lengths))]
    results = {key.id: result for key, result in run_rows(engine, rows).items()}
    for row, prompt in rows:
        ids = torch.from_numpy(prompt.ids.astype(np.int64))
        expected = scores_by(reference, ids).numpy()
        found = [entry.logprob for entry in results[row.id].logprobs or ()]
        assert np.abs(np.array(found) - expected).max() <= SCORE_TOLERANCE, f"{len(ids)} tokens"


def test_answers(pair: tuple[Engine, Path, list[int]]) -> None:
    check_answers(pair, QUICK)


def test_scores(pair: tuple[Engine, Path, list[int]]) -> None:
    check_scores(pair, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_answers_to_twenty_prompts(pair: tuple[Engine, Path, list[int]]) -> None:
    check_answers(pair, FULL)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_scores_of_twenty_prompts(pair: tuple[Engine, Path, list[int]]) -> None:
    check_scores(pair, FULL)


Answer = tuple[list[int], np.ndarray]  # token ids and their log-probabilities


def answers_by_company(engine: Engine, tokens: list[int]) -> list[list[Answer]]:
    """The answers of 16 rows with a shared beginning: each alone; all together, the beginning run once; all together in
    chunks; and each alone in chunks."""
    shared = np.array(tokens[:256], dtype=np.int32)
    lengths = np.geomspace(20, 600, 16).round().astype(int).tolist()
    rows = [
        (request(i, max_tokens=24, logprobs=0), Prompt(np.concatenate([shared, ids])))
        for i, ids in enumerate(prompts(tokens, lengths))
    ]
    common: dict[str, Any] = {"num_pages": 1000, "decode_rows": 64, "tile_rows": 128}
    packed = new_engine(engine.model, engine.tokenizer, step_tokens=16384, **common)
    chunked = new_engine(engine.model, engine.tokenizer, step_tokens=256, **common)
    together = run_rows(packed, rows)
    assert sum(result.usage.cached_tokens > 0 for result in together.values()) == 15, "the beginning was shared"
    found = [run_rows(packed, *[[row] for row in rows]), together, run_rows(chunked, rows)]
    found.append(run_rows(chunked, *[[row] for row in rows]))
    return [[_answer(results[row.key].logprobs) for row, _ in rows] for results in found]


def _answer(logprobs: list[TokenLogprob] | None) -> Answer:
    entries = logprobs or []
    return [entry.id for entry in entries], np.array([entry.logprob for entry in entries])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_neighbours_change_nothing(pair: tuple[Engine, Path, list[int]]) -> None:
    """The same tokens, and the same log-probabilities to the last bit."""
    engine, _, tokens = pair
    alone, *others = answers_by_company(engine, tokens)
    for other in others:
        for (ids, logprobs), (other_ids, other_logprobs) in zip(alone, other, strict=True):
            assert ids == other_ids
            assert np.array_equal(logprobs, other_logprobs)


def main(folder: Path) -> None:
    """Print how often a bfloat16 answer keeps its tokens in other company."""
    tokenizer = Tokenizer.load(folder)
    engine = new_engine(load(folder, torch.bfloat16, torch.device("cpu")), tokenizer, num_pages=1000)
    alone, *others = answers_by_company(engine, tokenizer.encode(project_text(), allow_special=False))
    for name, other in zip(("together", "together in chunks", "alone in chunks"), others, strict=True):
        same = [ids == other_ids for (ids, _), (other_ids, _) in zip(alone, other, strict=True)]
        equal = [
            a == b
            for (ids, _), (other_ids, _) in zip(alone, other, strict=True)
            for a, b in zip(ids, other_ids, strict=True)
        ]
        sys.stdout.write(f"{name}: {np.mean(equal):.1%} of tokens, {sum(same)} of {len(same)} rows equal\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
