"""A message as its user typed it."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvlite.documents import Document
from kvlite.errors import SettingError
from kvlite.model.chat_template import BETWEEN, all_of, asked_of, question_about


@dataclass(frozen=True)
class Message:
    """A message as typed, and the documents it is about."""

    text: str
    documents: tuple[Document, ...] = ()

    @property
    def said(self) -> str:
        """As the model reads it."""
        return question_about(self.documents, self.text) if self.documents else self.text


def as_typed(said: str, documents: Sequence[Document]) -> Message:
    """A message of which the model read this, if these are the conversation's documents."""
    longest, found, rest = sorted(documents, key=lambda each: -len(each.text)), [], said
    while now := next((each for each in longest if rest.startswith(_before(each))), None):
        found.append(now)
        rest = rest.removeprefix(_before(now))
    asked = asked_of(found, "")
    if not found or not rest.startswith(asked):
        return Message(said)
    return Message(rest.removeprefix(asked), tuple(found))


def _before(document: Document) -> str:
    return f"{all_of([document])}{BETWEEN}"


def numbered(messages: Sequence[Message], number: int | None) -> tuple[int, Message]:
    """A message and its number, counted from 1; None stands for the last one. Raises SettingError
    if there is no such message."""
    number = len(messages) if number is None else number
    if not messages:
        raise SettingError("nothing has been said yet")
    if not 1 <= number <= len(messages):
        raise SettingError(f"there is no message {number}: give 1 to {len(messages)}")
    return number, messages[number - 1]


def counted_tokens(count: int) -> str:
    """So many tokens, in words."""
    return f"{count:,} token{'s' * (count != 1)}"


def thought_for(tokens: int) -> str:
    """What stands for the reasoning before an answer."""
    return f"Thought for {counted_tokens(tokens)}"
