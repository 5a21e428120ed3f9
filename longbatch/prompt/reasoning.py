"""Splitting a reasoning model's output into its thinking and its answer.

Two conventions are known: `<think> ... </think>` (Qwen3, DeepSeek, and others), and the channels of gpt-oss
(`<|channel|>analysis<|message|> ... <|end|><|start|>assistant<|channel|>final<|message|> ...`). The control tokens
of the latter are special tokens: decode with them shown.
"""

from __future__ import annotations

import re

THINK_START = "<think>"
THINK_END = "</think>"

# One message: an optional header `<|start|>assistant`, channels perhaps with a recipient, then the text.
_MESSAGE = re.compile(
    r"(?:<\|start\|>[^<]*)?<\|channel\|>(?P<channel>\w+)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
    r"(?P<text>.*?)(?=<\|end\|>|<\|return\|>|<\|call\|>|<\|start\|>|<\|channel\|>|\Z)",
    re.DOTALL,
)


def split_reasoning(text: str, template_opens_think: bool) -> tuple[str | None, str]:
    """(reasoning, answer) of an output; reasoning is None where the model did not think.

    template_opens_think: the prompt ended with `<think>`, so the output starts inside the thinking. Thinking that
    was cut off before its end leaves an empty answer. Surrounding white space is stripped off both.
    """
    if text.lstrip().startswith(("<|channel|>", "<|start|>")):
        return _split_channels(text)
    stripped = text.lstrip()
    if stripped.startswith(THINK_START):
        stripped = stripped.removeprefix(THINK_START)
    elif not template_opens_think:
        return None, text
    reasoning, end, answer = stripped.partition(THINK_END)
    return reasoning.strip() or None, answer.strip() if end else ""


def _split_channels(text: str) -> tuple[str | None, str]:
    messages = [(match["channel"], match["text"].strip()) for match in _MESSAGE.finditer(text)]
    reasoning = "\n\n".join(words for channel, words in messages if channel == "analysis" and words)
    answer = "\n\n".join(words for channel, words in messages if channel != "analysis" and words)
    return reasoning or None, answer
