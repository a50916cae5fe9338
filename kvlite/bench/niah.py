"""Needle in a haystack: a fact hidden in real prose, asked for at the end of the prompt.

As in "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
section 5.3, and KV-X, section 4: depth x length x method x budget.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Any, ClassVar

from kvlite.bench.case import Made, Puzzle
from kvlite.bench.grid import require_known
from kvlite.bench.options import KINDS, NiahOptions
from kvlite.bench.prose import begun_elsewhere, hidden_in, names, numbers
from kvlite.bench.questions import QuestionTask

TOKENS_A_PAIR, MOST_PAIRS = 100, 1000

_SIGHTS = "eat a sandwich and sit in Dolores Park on a sunny day"


@dataclass(kw_only=True)
class Niah(NiahOptions, QuestionTask):
    """Needles in a haystack."""

    title: ClassVar = "Needles in a haystack"

    def __post_init__(self) -> None:
        require_known("--kind", self.kinds, KINDS)
        super().__post_init__()

    @property
    def places(self) -> Iterable[tuple[str, float | None]]:
        depths = [index / max(1, self.depths - 1) for index in range(self.depths)]
        return product(self.kinds, depths)

    def make(
        self, tokenizer: Any, prose: str, kind: str, length: int, depth: float | None, seed: int
    ) -> Made:
        assert depth is not None
        needle, others = _needles(kind, depth, seed, length)
        return hidden(tokenizer, prose, length, seed, needle, [(depth, needle.context), *others])


def hidden(
    tokenizer: Any,
    prose: str,
    length: int,
    seed: int,
    needle: Puzzle,
    sentences: Sequence[tuple[float, str]],
) -> Made:
    """A needle among sentences that stand at depths of the prose; each seed begins that at another
    place."""
    ids = tokenizer.encode(begun_elsewhere(prose, seed), add_special_tokens=False)[:length]

    def build(units: int) -> Puzzle:
        return replace(needle, context=hidden_in(tokenizer.decode(ids[:units]), sentences))

    return build, len(ids)


def _needles(
    kind: str, depth: float, seed: int, length: int
) -> tuple[Puzzle, list[tuple[float, str]]]:
    """A needle, alone its own context, and sentences like it at other places."""
    random = Random(f"{kind} {depth} {seed}")
    if kind == "sentence":
        text = f"The best thing to do in San Francisco is {_SIGHTS}."
        asked = "What is the best thing to do in San Francisco?"
        return Puzzle(text, asked, (_SIGHTS,), text), []
    if kind == "number":
        (key,) = numbers(random, 1)
        text = f"The secret passcode of the harbour office is {key}."
        return Puzzle(text, "What is the secret passcode of the harbour office?", (key,), text), []
    count = 1 + min(MOST_PAIRS, length // TOKENS_A_PAIR)
    needle, *rest = codes(random, count)
    return needle, [(random.random(), each.context) for each in rest]


def codes(random: Random, count: int) -> list[Puzzle]:
    """Facts alike except for a name and a number, each alone its own context."""
    facts = []
    for name, number in zip(names(random, count), numbers(random, count), strict=True):
        text = f"The code of the {name} is {number}."
        facts.append(Puzzle(text, f"What is the code of the {name}?", (number,), text))
    return facts
