"""What an exercise is: messages made from a seed, and an exact rule for each answer."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from kvlite.errors import SettingError
from kvlite.model.answers.form import Tool

Check = Callable[[str], float]
"""The share of an answer that is right, 0 to 1, by an exact rule."""
Count = Callable[[str], int]
"""Tokens of a text."""


@dataclass(frozen=True)
class Turn:
    """A message, and what is right to answer.

    Attributes:
        check: of the answer's text; where there are tools, of its call as JSON: a list of the
            tool's name and its arguments.
        right: a right answer.
        schema: a JSON schema that the answer is held to; "" for any text.
        new_tokens: of the longest answer; 0 for a little more than the right one has.
    """

    message: str
    check: Check
    right: str
    schema: str = ""
    new_tokens: int = 0


@dataclass(frozen=True)
class Exercise:
    """A conversation to have.

    Attributes:
        before: messages that were exchanged before the first turn.
        tools: one of which the model must call.
    """

    turns: Sequence[Turn]
    before: Sequence[dict[str, Any]] = ()
    tools: Sequence[Tool] = ()


@dataclass(frozen=True)
class Material:
    """What an exercise is made of.

    Attributes:
        random: of the exercise's seed.
        prose: real text, at least `tokens` tokens of it.
        tokens: that its texts have together, about.
        count: tokens of a text.
    """

    random: Random
    prose: str
    tokens: int
    count: Count

    def parts(self, part: Callable[[int], str], least: int, beside: str = "") -> list[str]:
        """As many parts, made from their numbers, as fit beside a text. Raises SettingError if
        fewer than `least` do."""
        made, used = list[str](), self.count(beside)
        while True:
            each = part(len(made))
            used += self.count(each)
            if used > self.tokens:
                break
            made.append(each)
        if len(made) < least:
            raise SettingError(f"--tokens {self.tokens} is too short for an exercise: give more")
        return made

    def prose_of(self, tokens: int) -> str:
        """The beginning of the prose, some so many tokens of it; "" of none."""
        low, high = 0, len(self.prose)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.count(self.prose[:middle]) <= tokens
            low, high = (middle, high) if fits else (low, middle - 1)
        return self.prose[:low]


def share(found: Iterable[bool]) -> float:
    """The share of what is true."""
    every = [*found]
    return sum(every) / len(every)
