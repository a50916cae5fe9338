"""Tasks after RULER: several needles, a chain of variables, words to be counted.

After the description in "RULER: What's the Real Context Size of Your Long-Context Language
Models?", section 3. Other than there: prompts go through the model's chat template, no example
and no beginning of the answer are given, prose and words are those bundled here, and short lists
of words hold each word less often. `copy-many` asks for more at once than RULER does: bringing back
what an answer needs is hardest where it needs much (Text2JSON).
"""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from itertools import pairwise, product
from random import Random
from string import ascii_uppercase
from typing import Any, ClassVar

from kvlite.bench.case import Made, Puzzle, Recipe
from kvlite.bench.grid import require_known
from kvlite.bench.options import RULERS_OWN, RulerOptions
from kvlite.bench.prose import begun_elsewhere, hidden_in, names, numbers
from kvlite.bench.questions import QuestionTask
from kvlite.errors import SettingError

NEEDLES, MANY, HOPS, COMMON, TIMES, RARE_TIMES = 4, 8, 4, 10, 30, 3

LEAST_OF_RULER = 1000
"""Tokens of such a prompt at least: RULER's example and text have to fit."""

_NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)


@dataclass(kw_only=True)
class Ruler(RulerOptions, QuestionTask):
    """Tasks after RULER."""

    title: ClassVar = "Tasks after RULER"

    def __post_init__(self) -> None:
        require_known("--task", self.tasks, [*TASKS, *RULERS_OWN])
        if not set(RULERS_OWN).isdisjoint(self.tasks):
            if (shortest := min(self.tokens)) < LEAST_OF_RULER:
                raise SettingError(
                    f"--tokens {shortest} is too short for RULER's own prompts: give at least "
                    f"{LEAST_OF_RULER}"
                )
            _prompts()
        super().__post_init__()

    @property
    def takes_prose(self) -> bool:
        """Not RULER's own prompts, nor variables, which stand in noise."""
        return not {*RULERS_OWN, "variables"}.issuperset(self.tasks)

    @property
    def places(self) -> Iterable[tuple[str, float | None]]:
        return product(self.tasks, [None])

    def prompts(self, tokenizer: Any, prose: str) -> list[Recipe]:
        own, made = set(RULERS_OWN), super().prompts(tokenizer, prose)
        if own.isdisjoint(self.tasks):
            return made
        case = partial(_prompts().case, self.repeats)
        return [
            replace(each, case=partial(case, each.kind, each.length, each.seed))
            if each.kind in own
            else each
            for each in made
        ]

    def make(
        self, tokenizer: Any, prose: str, kind: str, length: int, depth: float | None, seed: int
    ) -> Made:
        return TASKS[kind](tokenizer, prose, seed, length)


def _needles(keys: int, values: int, asked: int) -> Callable[[Any, str, int, int], Made]:
    """Section 3.1: `keys` names with `values` numbers each, `asked` of the names asked for."""

    def make(tokenizer: Any, prose: str, seed: int, length: int) -> Made:
        random = Random(f"needles {keys} {values} {asked} {seed}")
        known, drawn = names(random, keys), numbers(random, keys * values)
        by_name = {name: drawn[i * values : (i + 1) * values] for i, name in enumerate(known)}
        sentences = [
            (random.random(), f"One of the special magic numbers for {name} is: {number}.")
            for name, held in by_name.items()
            for number in held
        ]
        wanted = [number for name in known[:asked] for number in by_name[name]]
        about = f"for {_listed(known[:asked])} mentioned in the provided text"
        one = len(wanted) == 1
        ids = tokenizer.encode(begun_elsewhere(prose, seed), add_special_tokens=False)[:length]

        def build(units: int) -> Puzzle:
            hay = hidden_in(tokenizer.decode(ids[:units]), sentences)
            return Puzzle(
                "Some special magic numbers are hidden within the following text. Make sure to "
                f"memorize them. I will quiz you about the numbers afterwards.\n\n{hay}",
                f"What is the special magic number {about}?"
                if one
                else f"What are all the special magic numbers {about}?",
                tuple(wanted),
                f"The special magic number{' ' if one else 's '}{about} "
                f"{'is' if one else 'are'} {_listed(wanted)}.",
            )

        return build, len(ids)

    return make


def _variables(tokenizer: Any, prose: str, seed: int, length: int) -> Made:
    """Section 3.2: a chain of variables, each assigned the one before."""
    random = Random(f"variables {seed}")
    known: list[str] = []
    while len(known) <= HOPS:
        name = "".join(random.sample(ascii_uppercase, 5))
        if name not in known:
            known.append(name)
    value = str(random.randrange(10_000, 100_000))
    chain = [f"VAR {known[0]} = {value}."]
    chain += [f"VAR {b} = VAR {a}." for a, b in pairwise(known)]
    depths = sorted(random.random() for _ in chain)

    def build(units: int) -> Puzzle:
        hay = hidden_in(_NOISE * units, list(zip(depths, chain, strict=True)))
        return Puzzle(
            "Memorize and track the chain of variable assignment hidden in the following text."
            f"\n\n{hay}",
            f"Find all variables that are assigned the value {value} in the text above.",
            tuple(known),
            f"{len(known)} variables are assigned the value {value}, they are: {' '.join(known)}",
        )

    return build, length // 10


def _common_words(tokenizer: Any, prose: str, seed: int, length: int) -> Made:
    """Section 3.3: the words that stand most often in a list."""
    random = Random(f"words {seed}")
    vocabulary = sorted({word.lower() for word in re.findall(r"\b[a-z]{4,12}\b", prose)})
    random.shuffle(vocabulary)
    common, rare = vocabulary[:COMMON], vocabulary[COMMON:]

    def build(units: int) -> Puzzle:
        times = min(TIMES, max(RARE_TIMES + 1, units // (2 * COMMON)))
        rest = max(0, units - times * COMMON)
        listed = [word for word in common for _ in range(times)]
        listed += [rare[i // RARE_TIMES % len(rare)] for i in range(rest)]
        Random(f"order {seed}").shuffle(listed)
        lines = " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))
        return Puzzle(
            "Below is a numbered list of words. In these words, some appear more often than "
            f"others. Memorize the ones that appear most often.\n\n{lines}",
            f"What are the {COMMON} most common words in the above list?",
            tuple(common),
            " ".join(f"{number}. {word}" for number, word in enumerate(common, 1)),
        )

    # Past this, rare words would stand as often as common ones.
    most = COMMON * TIMES + (RARE_TIMES * len(rare))
    return build, min(length, most)


def _prompts() -> Any:
    try:
        # It tells of data of other tasks that it looks for.
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            from kvlite.bench import ruler_prompts
    except ImportError as error:
        raise SettingError(
            f"--task {', '.join(RULERS_OWN)} need lm-evaluation-harness, which is not installed: "
            "pip install 'kvlite[eval]'"
        ) from error
    return ruler_prompts


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


TASKS: dict[str, Callable[[Any, str, int, int], Made]] = {
    "single": _needles(1, 1, 1),
    "multi-key": _needles(NEEDLES, 1, 1),
    "multi-value": _needles(1, NEEDLES, 1),
    "multi-query": _needles(NEEDLES, 1, NEEDLES),
    "copy-many": _needles(MANY, 1, MANY),
    "variables": _variables,
    "words": _common_words,
}
