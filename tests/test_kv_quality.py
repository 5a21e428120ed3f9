"""What stored K/V cost in quality, on real weights: log-probabilities of a text's tokens, K/V read as they are stored
at every position that counts.

`python tests/test_kv_quality.py MODEL [NUMBER [LENGTH]]` prints the figures for a folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_rows import new_cache, new_engine, request, run_rows
from test_real_weights import project_text, prompts

from longbatch.cache.pages import pages_for
from longbatch.core import Prompt, Result
from longbatch.engine.decode import DecodeBatch
from longbatch.engine.ladder import Shape
from longbatch.engine.sequence import Sequence
from longbatch.engine.stopping import StopRule
from longbatch.models import load
from longbatch.models.decoder import Decoder
from longbatch.prompt import Tokenizer

# Nats per token. Found: bf16 0.003 to 0.006, fp8 0.05 (SmolLM2) and 0.07 (Gemma 3); of the former, values alone cost
# 0.013 and keys alone 0.048. Three bits of mantissa are few for models this small.
MOST = {"bf16": 0.01, "fp8": 0.1}
CHUNK = 64


def chunked(model: Decoder, tokenizer: Tokenizer, texts: list[np.ndarray], kv: str) -> np.ndarray:
    """Log-probabilities of every token after the first chunk, prefilled in chunks of one page: each token reads all but
    the last 1 to 64 tokens before it from pages."""
    engine = new_engine(model, tokenizer, num_pages=100, kv=kv, step_tokens=CHUNK, tile_rows=CHUNK)
    rows = [(request(i, "score"), Prompt(ids, scored=(CHUNK + 1, len(ids)))) for i, ids in enumerate(texts)]
    found = sorted(run_rows(engine, rows).values(), key=lambda result: result.row)
    return np.array([entry.logprob for result in found for entry in result.logprobs or ()])


def decoded(model: Decoder, tokenizer: Tokenizer, texts: list[np.ndarray], kv: str) -> np.ndarray:
    """Log-probabilities of every token after the first two pages, decoded one by one as if each had been sampled."""
    cache = new_cache(model, num_pages=100, kv=kv, num_open=len(texts))
    batch, length = DecodeBatch(model, cache, len(texts)), min(map(len, texts))
    sequences = []
    for i, ids in enumerate(texts):
        asked = request(i)
        # Nothing is prefilled: the first token is as if it had been sampled.
        sequence = Sequence(asked, Prompt(ids[:0]), Result(asked.key, i), 0, Shape(1, 1), max_tokens=length)
        sequence.stop = StopRule(frozenset(), (), length, tokenizer)
        sequence.stop.push(int(ids[0]))
        sequence.num_pages = pages_for(length)
        sequence.take(cache.pool)
        sequences.append(sequence)
    tokens = torch.from_numpy(np.stack([ids[:length] for ids in texts]).astype(np.int64))
    batch.join(sequences, tokens[:, 0].tolist())
    found = []
    for position in range(length - 1):
        logits = torch.log_softmax(batch.forward(), -1)
        following = tokens[:, position + 1]
        if position >= 2 * CHUNK - 1:
            found.append(logits.gather(1, following[:, None])[:, 0])
        for sequence, token in zip(sequences, following.tolist(), strict=True):
            assert sequence.stop is not None
            sequence.stop.push(token)
        batch.feed(following)
    return torch.stack(found, 1).numpy().ravel()


def gaps(folder: Path, number: int, length: int, formats: list[str]) -> dict[tuple[str, str], np.ndarray]:
    """|log-probability - the one with K/V as they are| by way and format."""
    tokenizer, model = Tokenizer.load(folder), load(folder, torch.float32, torch.device("cpu"))
    texts = prompts(tokenizer.encode(project_text(), allow_special=False), [length] * number)
    found = {}
    for way in (chunked, decoded):
        exact = way(model, tokenizer, texts, "auto")
        for kv in formats:
            found[way.__name__, kv] = np.abs(way(model, tokenizer, texts, kv) - exact)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", ["smollm2_dir", "gemma3_dir"])
def test_stored_keys_cost_little(model: str, request: pytest.FixtureRequest) -> None:
    for (way, kv), gap in gaps(request.getfixturevalue(model), 2, 400, list(MOST)).items():
        assert 0 < gap.mean() <= MOST[kv], (way, kv, gap.mean())


def main(folder: str, number: str = "4", length: str = "1000") -> None:
    for (way, kv), gap in gaps(Path(folder), int(number), int(length), list(MOST)).items():
        sys.stdout.write(f"{way:8} {kv:5} {gap.size:6} tokens: mean {gap.mean():.5f}, largest {gap.max():.4f} nats\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
