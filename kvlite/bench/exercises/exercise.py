"""What an exercise is: messages made from a seed, and an exact rule for each answer."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, TypeVar

from kvlite.errors import SettingError
from kvlite.model.answers.form import Tool

Check = Callable[[str], float]
"""The share of an answer that is right, 0 to 1, by an exact rule."""
T = TypeVar("T")
# Questions about one text, and one more of its parts as an example.
ASKED = 4
# Parts of a text, to choose from.
LEAST = 1 + ASKED


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
    """

    random: Random
    prose: str
    tokens: int
    tokenizer: Any

    def ids(self, text: str) -> list[int]:
        """The tokens of a text."""
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found

    def count(self, text: str) -> int:
        """How many tokens a text has."""
        return len(self.ids(text))

    def parts(self, make: Callable[[int], T], text: Callable[[T], str], beside: str) -> list[T]:
        """As many parts, made from their numbers, as fit with their texts beside another one.
        Raises SettingError if fewer than `LEAST` do."""
        made, used = list[T](), self.count(beside)
        while True:
            each = make(len(made))
            used += self.count(text(each))
            if used > self.tokens:
                break
            made.append(each)
        if len(made) < LEAST:
            raise SettingError(f"--tokens {self.tokens} is too short for an exercise: give more")
        return made

    def prose_of(self, tokens: int) -> str:
        """The beginning of the prose, so many tokens of it."""
        begun: str = self.tokenizer.decode(self.ids(self.prose)[: max(0, tokens)])
        return begun


def asked_of(text: str, turns: Iterable[Turn]) -> list[Turn]:
    """The turns, the first of which comes with the text."""
    first, *others = turns
    return [replace(first, message=text + first.message), *others]
