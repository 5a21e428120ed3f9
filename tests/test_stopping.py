"""When answers end: end tokens, stop strings, limits and exact repetition."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from engine_rows import word_tokenizer

from longbatch.engine.stopping import LOOP_TOKENS, StopRule, repeats
from longbatch.prompt import Tokenizer


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per byte; ids are the bytes, 256 is `<|channel|>` where a test asks for it."""
    return _byte_tokenizer(tmp_path_factory.mktemp("bytes"), [])


def _byte_tokenizer(folder: Path, special: list[str]) -> Tokenizer:
    # GPT-2's printable stand-ins for bytes.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}
    added = [
        {"id": 256 + i, "content": text, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, text in enumerate(special)
    ]
    content = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return word_tokenizer(tmp_path_factory.mktemp("words"))


def feed(rule: StopRule, tokens: list[int] | bytes) -> tuple[str | None, int]:
    """(reason, tokens pushed)."""
    for number, token in enumerate(tokens, 1):
        reason = rule.push(token)
        if reason is not None:
            return reason, number
    return None, len(tokens)


def test_an_end_token_is_counted_and_not_shown(words: Tokenizer) -> None:
    rule = StopRule(frozenset({2, 99}), (), 10, words)
    assert feed(rule, [5, 6, 99, 7]) == ("stop", 3)
    assert rule.num_tokens == 3
    assert rule.tokens == [5, 6]
    assert rule.text() == "w5 w6"


def test_an_end_token_at_once_gives_an_empty_answer(words: Tokenizer) -> None:
    rule = StopRule(frozenset({2}), (), 10, words)
    assert feed(rule, [2]) == ("stop", 1)
    assert rule.text() == ""


@pytest.mark.parametrize("limit", [1, 5])
def test_the_token_limit(words: Tokenizer, limit: int) -> None:
    rule = StopRule(frozenset({2}), (), limit, words)
    assert feed(rule, [5, 6, 7, 8, 9, 10]) == ("length", limit)
    assert rule.num_tokens == limit


def test_an_end_token_at_the_limit_is_a_stop(words: Tokenizer) -> None:
    assert feed(StopRule(frozenset({2}), (), 2, words), [5, 2]) == ("stop", 2)


@pytest.mark.parametrize(
    ("answer", "strings", "text"),
    [
        pytest.param("one END two", ("END",), "one ", id="across-tokens"),
        pytest.param("END", ("END",), "", id="at-the-start"),
        pytest.param("aab", ("ab",), "a", id="overlapping-begin"),
        pytest.param("xabcabd.", ("abd",), "xabc", id="false-begin"),
        pytest.param("one two three", ("three", "two"), "one ", id="first-of-several"),
        pytest.param("aabcd", ("abcd", "bcd"), "a", id="several-at-once"),
        pytest.param("ab\n\nc", ("\n\n",), "ab", id="blank-line"),
        pytest.param("Größe ß!", ("ß!",), "Größe ", id="umlauts"),
        pytest.param("ok 🎉🚀 end", ("🚀",), "ok 🎉", id="emoji"),
        pytest.param("日本語。次", ("。",), "日本語", id="japanese"),
    ],
)
def test_stop_strings(byte_tokenizer: Tokenizer, answer: str, strings: tuple[str, ...], text: str) -> None:
    """Every byte is a token, so every string crosses token borders and characters come in pieces."""
    rule = StopRule(frozenset(), strings, 1000, byte_tokenizer)
    data = answer.encode()
    reason, pushed = feed(rule, data)
    assert reason == "stop"
    assert rule.text() == text
    end = min(answer.index(string) + len(string) for string in strings if string in answer)
    assert pushed == len(answer[:end].encode()), "it stops at the token that completes the string"


def test_a_stop_string_inside_one_token(words: Tokenizer) -> None:
    rule = StopRule(frozenset(), ("12",), 10, words)
    assert feed(rule, [5, 123, 7]) == ("stop", 2)
    assert rule.text() == "w5 w"


def test_a_stop_string_that_never_comes(byte_tokenizer: Tokenizer) -> None:
    rule = StopRule(frozenset(), ("STOP",), 1000, byte_tokenizer)
    assert feed(rule, "STO P🎉".encode()) == (None, 9)
    assert rule.text() == "STO P🎉"


def test_a_character_cut_off_by_the_limit(byte_tokenizer: Tokenizer) -> None:
    rule = StopRule(frozenset(), ("x",), 4, byte_tokenizer)
    assert feed(rule, "ab🎉".encode()) == ("length", 4)
    assert rule.text().startswith("ab")
    assert set(rule.text()[2:]) == {"�"}


def test_channels_are_shown(tmp_path: Path) -> None:
    """Special tokens are left out of answers, except where they mark reasoning."""
    channels = _byte_tokenizer(tmp_path, ["<|channel|>", "<|message|>"])
    for strings in ((), ("!",)):
        rule = StopRule(frozenset(), strings, 100, channels)
        feed(rule, [256, *b"final", 257, *b"Yes!"])
        assert rule.text() == "<|channel|>final<|message|>Yes" + ("" if strings else "!")


@pytest.mark.parametrize("period", range(1, 65))
def test_loops_stop(period: int) -> None:
    generator = random.Random(period)
    loop = generator.sample(range(1000), period)
    tokens = [generator.randrange(1000, 2000) for _ in range(50)]
    tokens += [loop[i % period] for i in range(LOOP_TOKENS)]
    assert repeats(tokens)
    assert not repeats(tokens[:-1])


@pytest.mark.parametrize("period", [1, 2, 3, 7, 50, 63, 64])
@pytest.mark.parametrize("at", [0, 1, LOOP_TOKENS // 2, LOOP_TOKENS - 2, LOOP_TOKENS - 1])
def test_a_loop_with_one_other_token_goes_on(period: int, at: int) -> None:
    tokens = [i % period for i in range(LOOP_TOKENS)]
    tokens[at] = 999
    assert not repeats(tokens)


@pytest.mark.parametrize("period", [65, 100, 128, 255])
def test_longer_periods_go_on(period: int) -> None:
    assert not repeats([i % period for i in range(1000)])


def test_a_count_that_goes_up_goes_on() -> None:
    """`1. yes 2. yes 3. yes`: a list is no loop."""
    assert not repeats([token for i in range(500) for token in (i, 7, 8)])


def test_a_loop_ends_the_answer(words: Tokenizer) -> None:
    rule = StopRule(frozenset({2}), (), 1000, words)
    assert feed(rule, [5, *[6, 7] * 400]) == ("repetition", 1 + LOOP_TOKENS)
    assert rule.num_tokens == 1 + LOOP_TOKENS


def test_a_loop_at_the_limit_is_the_limit(words: Tokenizer) -> None:
    assert feed(StopRule(frozenset(), (), LOOP_TOKENS, words), [6] * 400) == ("length", LOOP_TOKENS)
