"""Small rows of every kind for `longbatch bench soak`, and a tiny random model on which some of them fail.

Its tokenizer has one word per token, `w0 w1 ...`, and more of them than the model: a row with such a word is refused by
the engine. The embedding of one word is not finite, so that rows with it have no logits; and a step with another word
fails, so that its rows are tried apart until the one with it fails alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longbatch.bench import llama
from longbatch.bench.texts import Prose

SHAPE = llama.LlamaShape(64, 128, 3, 4, 2, 16, vocab=1000, max_length=1024)
UNKNOWN, NONFINITE, FAULTY = SHAPE.vocab, 998, 999
# Words of ordinary rows.
_WORDS = range(3, 990)

# Makes a text of about so many tokens.
Text = Callable[[int], str]
Row = dict[str, Any]


def write_model(folder: Path, seed: int) -> None:
    """The tiny model's folder."""
    import torch
    from safetensors.torch import load_file, save_file

    llama.write_model(folder, SHAPE, "cpu", seed)
    llama.write_tokenizer(folder, SHAPE.vocab + 1)
    # An answer ends where it would go on from one of these words.
    config = SHAPE.config() | {"eos_token_id": [NONFINITE, FAULTY]}
    (folder / "config.json").write_text(json.dumps(config))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][NONFINITE] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})


def words(chance: random.Random) -> Text:
    """Texts of the tiny model's words."""
    return lambda count: llama.words(chance.choices(_WORDS, k=count))


def prose(seed: int) -> Text:
    """English, some five characters to a token."""
    text = Prose(seed)
    return lambda count: text.characters(5 * count)


def rows(num_rows: int, seed: int, text: Text, *, tiny: bool) -> list[tuple[Row, bool]]:
    """Rows, each with whether it is an error. tiny: whether they are for the tiny model, with its own errors among
    them."""
    chance = random.Random(seed)
    kinds = {_greedy: 8, _stopping: 4, _logprobs: 4, _drawn: 4, _penalized: 4, _score: 4, _embed: 4, _classify: 2}
    wrong: dict[Callable[[random.Random, Text], Row], float] = {_malformed: 1}
    if tiny:
        # A step that fails halves the wave that it is in, again and again.
        wrong |= {_too_long: 0.2, _unknown: 0.5, _nonfinite: 0.5, _faulty: 0.1}
    weights = kinds | wrong
    found = []
    for number in range(num_rows):
        (kind,) = chance.choices(list(weights), list(weights.values()))
        found.append(({"id": f"row-{number}", **kind(chance, text)}, kind in wrong))
    return found


def _prompt(chance: random.Random, text: Text) -> str:
    return text(chance.randint(4, 60))


def _greedy(chance: random.Random, text: Text) -> Row:
    return {"prompt": _prompt(chance, text), "max_tokens": chance.randint(1, 16)}


def _stopping(chance: random.Random, text: Text) -> Row:
    return {"prompt": _prompt(chance, text), "stop": [text(1)[:3], "1"], "stop_token_ids": [chance.choice(_WORDS)]}


def _logprobs(chance: random.Random, text: Text) -> Row:
    return {"prompt": _prompt(chance, text), "logprobs": chance.randint(0, 5), "max_tokens": 6}


def _drawn(chance: random.Random, text: Text) -> Row:
    return {"prompt": _prompt(chance, text), "temperature": 0.8, "top_k": 50, "top_p": 0.9, "n": chance.randint(1, 3)}


def _penalized(chance: random.Random, text: Text) -> Row:
    return {"prompt": _prompt(chance, text), "repetition_penalty": 1.3, "temperature": 1.1, "min_p": 0.01}


def _score(chance: random.Random, text: Text) -> Row:
    return {"task": "score", "prompt": _prompt(chance, text), "continuation": text(8), "logprobs": 2}


def _embed(chance: random.Random, text: Text) -> Row:
    return {"task": "embed", "prompt": _prompt(chance, text), "pooling": chance.choice(["mean", "last"])}


def _classify(chance: random.Random, text: Text) -> Row:
    labels = [f"{number} {text(number)}" for number in range(1, 4)]
    return {"task": "classify", "prompt": _prompt(chance, text), "labels": labels}


def _malformed(chance: random.Random, text: Text) -> Row:
    wrong: list[Row] = [{"prompt": ""}, {"prompt": 7}, {"prompt": text(4), "max_tokens": "many"}, {"messages": []}]
    return chance.choice(wrong)


def _too_long(chance: random.Random, text: Text) -> Row:
    return {"prompt": text(2 * SHAPE.max_length)}


def _unknown(chance: random.Random, text: Text) -> Row:
    return _with_word(UNKNOWN, chance, text)


def _nonfinite(chance: random.Random, text: Text) -> Row:
    return _with_word(NONFINITE, chance, text)


def _faulty(chance: random.Random, text: Text) -> Row:
    return _with_word(FAULTY, chance, text)


def _with_word(word: int, chance: random.Random, text: Text) -> Row:
    return {"prompt": f"{_prompt(chance, text)} {llama.words([word])} {_prompt(chance, text)}", "max_tokens": 4}
