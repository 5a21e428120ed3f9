"""Real English prose for benchmarks: the Python documentation that every interpreter carries, cut by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

SHORTEST_PARAGRAPH = 80


class Prose:
    """Paragraphs in an order that the seed decides. It never ends; the words repeat after some 400,000 characters."""

    def __init__(self, seed: int) -> None:
        from pydoc_data.topics import topics

        self.chance = random.Random(seed)
        blocks = {" ".join(block.split()) for topic in topics.values() for block in topic.split("\n\n")}
        self._paragraphs = sorted(block for block in blocks if len(block) >= SHORTEST_PARAGRAPH)
        self._endless = self._draw()

    def characters(self, count: int) -> str:
        """Paragraphs joined and cut to `count` characters."""
        parts, length = [], 0
        while length < count:
            parts.append(next(self._endless))
            length += len(parts[-1]) + 1
        return "\n".join(parts)[:count]

    def tokens(self, count: int, count_tokens: Callable[[str], int]) -> str:
        """The longest text of whole words that has at most `count` tokens, but for a few."""
        words = self.characters(count * 8).split(" ")
        low, high = 1, len(words)
        while high - low > max(1, len(words) // 1000):
            middle = (low + high) // 2
            low, high = (middle, high) if count_tokens(" ".join(words[:middle])) <= count else (low, middle)
        return " ".join(words[:low])

    def _draw(self) -> Iterator[str]:
        while True:
            yield from self.chance.sample(self._paragraphs, len(self._paragraphs))


def chat_text(tokenizer: Any, prompt: str) -> str:
    """The prompt as one user turn, by transformers' own chat template."""
    chat = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
