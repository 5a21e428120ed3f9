"""Facts planted in long prose, asked for at its end: does sparse prefill find what dense prefill finds?

Both run through the real command, the same rows with and without the profile.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from longbatch.bench.process import run_command, write_manifest
from longbatch.bench.texts import Prose

DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)
PLACES = ("Aarhus", "Bergen", "Coimbra", "Dresden", "Evora", "Freiburg", "Ghent", "Haarlem", "Innsbruck", "Jerez")
MAX_TOKENS = 8
# Tokens that are left for the answer, for what precedes the text, and where its pieces meet.
MARGIN = 32
SEED = 20


@dataclass(frozen=True, slots=True)
class Fact:
    """One row: a prompt of some length in which a number stands at a depth (0: the beginning, 1: the end)."""

    length: int
    depth: float
    number: str
    prompt: str


@dataclass(frozen=True, slots=True)
class Found:
    """What a run answered, by row, and the executed density of each row, None where it ran dense."""

    answers: tuple[str, ...]
    densities: tuple[float | None, ...]

    def correct(self, facts: Sequence[Fact]) -> int:
        """Answers that hold the number planted."""
        return sum(fact.number in answer for fact, answer in zip(facts, self.answers, strict=True))


def plant(lengths: Sequence[int], count_tokens: Callable[[str], int], per_depth: int = 2) -> list[Fact]:
    """Prompts of about these lengths in tokens, `per_depth` facts at each depth. They end so that any language model
    goes on with the number, told to or not."""
    chance, facts = random.Random(SEED), []
    for length in lengths:
        for number, depth in enumerate(depth for depth in DEPTHS for _ in range(per_depth)):
            place, code = PLACES[number % len(PLACES)], str(chance.randrange(10_000, 100_000))
            fact = f"The code of the archive in {place} is {code}."
            asked = f"the code of the archive in {place}"
            end = f"\n\nQuestion: What is {asked}?\nAnswer: T{asked[1:]} is"
            rest = length - count_tokens(fact) - count_tokens(end) - MARGIN
            # Two texts of the two sizes, so that the depth counts tokens and no paragraph is cut by the fact.
            prose = Prose(SEED + number)
            before = prose.tokens(max(1, int(rest * depth)), count_tokens)
            after = prose.tokens(max(1, int(rest * (1 - depth))), count_tokens)
            facts.append(Fact(length, depth, code, f"{before}\n{fact}\n{after}{end}"))
    return facts


def ask(facts: Sequence[Fact], folder: Path, name: str, flags: Sequence[str]) -> Found:
    """Run the rows. flags: model, device and attention. Raises LongbatchError where the run or a row fails."""
    manifest = folder / "planted.jsonl"
    write_manifest([{"prompt": fact.prompt, "max_tokens": MAX_TOKENS, "stop": ["\n", "."]} for fact in facts], manifest)
    run = run_command(manifest, folder / f"planted-{name}", [*flags, "--prompt-format", "raw"], ["text", "attention"])
    return Found(
        tuple((row["text"] or "").strip() for row in run.results),
        tuple((row["attention"] or {}).get("density") for row in run.results),
    )
