"""Thinking and answer of reasoning models."""

from __future__ import annotations

from pathlib import Path

import pytest
from prompt_folders import QWEN3, write_folder

from longbatch.core import TASKS, Location, Message, Request, Sampling
from longbatch.prompt import PromptBuilder, split_reasoning


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "answer"),
    [
        ("<think>\nhm\n</think>\n\nParis.", False, "hm", "Paris."),
        ("\n<think>hm</think>Paris.", False, "hm", "Paris."),
        ("<think>\n\n</think>\n\nParis.", False, None, "Paris."),
        ("<think>still going", False, "still going", ""),
        ("Paris.", False, None, "Paris."),
        ("  Paris. ", False, None, "  Paris. "),
        ("use </think> to end it", False, None, "use </think> to end it"),
        ("I write <think> here", False, None, "I write <think> here"),
        ("hm\n</think>\n\nParis.", True, "hm", "Paris."),
        ("still going", True, "still going", ""),
        ("<think>hm</think>Paris.", True, "hm", "Paris."),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("", False, None, ""),
        ("", True, None, ""),
    ],
)
def test_think_tags(text: str, opened: bool, reasoning: str | None, answer: str) -> None:
    assert split_reasoning(text, opened) == (reasoning, answer)


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        (
            "<|channel|>analysis<|message|>hm < 3<|end|><|start|>assistant<|channel|>final<|message|>Paris.<|return|>",
            "hm < 3",
            "Paris.",
        ),
        ("<|channel|>final<|message|>Paris.", None, "Paris."),
        ("<|channel|>analysis<|message|>still going", "still going", ""),
        (
            (
                "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
                "<|start|>assistant<|channel|>final<|message|>c"
            ),
            "a\n\nb",
            "c",
        ),
        (
            "<|channel|>commentary to=functions.x <|constrain|>json<|message|>{}<|call|>",
            None,
            "{}",
        ),
    ],
)
def test_channels(text: str, reasoning: str | None, answer: str) -> None:
    assert split_reasoning(text, False) == (reasoning, answer)


def test_a_template_that_opens_the_thinking_is_noticed(tmp_path: Path) -> None:
    messages = (Message("user", ("Hi",)),)
    row = Request(0, None, Location(0, 0, 0), TASKS["generate"], Sampling(max_tokens=8), messages)
    opening = QWEN3.replace(r"{{- '<|im_start|>assistant\n' }}", r"{{- '<|im_start|>assistant\n<think>\n' }}")
    for template, opens in ((QWEN3, False), (opening, True)):
        folder = write_folder(tmp_path / str(opens), "qwen3", template=template)
        builder = PromptBuilder(folder, 4096)
        assert builder.build(row).opens_reasoning is opens
