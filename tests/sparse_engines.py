"""Engines that prefill sparse over tiny models, with patterns and rows for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_rows import new_engine, random_ids, request, tiny_decoder, word_tokenizer

from longbatch.core import Prompt, Request, Result
from longbatch.engine import Engine, EngineAttention
from longbatch.models.decoder import Decoder
from longbatch.prompt import Tokenizer
from longbatch.sparsity import LayerPatterns, PatternSpec

Row = tuple[Request, Prompt]
EVERYTHING = [
    "a_shape:sinks=0,window=4096",
    "tri_shape:sinks=4,window=4096,last=10",
    "vertical_slash:vertical=4096,slash=4096",
    "block_sparse:top_k=1000",
    "stripes:mass=1,rows=64,step=1",
]
SOME = [
    "a_shape:sinks=3,window=40",
    "tri_shape:sinks=3,window=40,last=20",
    "vertical_slash:vertical=40,slash=110",
    "block_sparse:top_k=2",
    "antidiagonal:stride=8,threshold=0.6,block=64",
    "stripes:mass=0,window=8,rows=64,step=8",
]
MIXED = ["a_shape:sinks=3,window=40", "dense", "vertical_slash:vertical=35,slash=120", "block_sparse:top_k=2"]
# A layer of all three kinds.
KINDS = ["a_shape:sinks=3,window=40", "block_sparse:top_k=2", "stripes:mass=0,window=8,rows=64,step=8"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return word_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Decoder]:
    made: dict[str, Decoder] = {}

    def get(case: str) -> Decoder:
        if case not in made:
            made[case] = tiny_decoder(tmp_path_factory.mktemp(case), case)
        return made[case]

    return get


@pytest.fixture
def model(models: Callable[[str], Decoder]) -> Decoder:
    return models("llama")


def patterns_of(model: Decoder, *texts: str, shared: bool = False) -> list[LayerPatterns]:
    """The same patterns in every layer, one text for each selection, repeated where there are too few."""
    found = []
    for layer in model.spec.layers:
        number = layer.num_kv_heads if shared else layer.num_heads
        found.append(LayerPatterns(tuple(PatternSpec.parse(texts[i % len(texts)]) for i in range(number)), shared))
    return found


def sparse_engine(
    model: Decoder, tokenizer: Tokenizer, *texts: str, min_length: int = 0, shared: bool = False, **limits: Any
) -> Engine:
    engine = new_engine(model, tokenizer, **limits)
    engine.attention = EngineAttention.of(model.spec, patterns_of(model, *texts, shared=shared), min_length)
    return engine


def score(row: int, length: int) -> Row:
    ids = random_ids(length, row)
    return request(row, "score"), Prompt(ids, scored=(1, length))


def logprobs(result: Result) -> np.ndarray:
    assert result.error is None
    return np.array([entry.logprob for entry in result.logprobs or ()])


def only(results: dict[Any, Result]) -> Result:
    (result,) = results.values()
    return result
