"""What is said in a conversation that a server answers. Servers remember nothing: all that was said
goes with each message, and going back is leaving some of it out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from kvlite.config.settings import LOADING, Settings
from kvlite.conversation.message import Message, numbered
from kvlite.documents import Document, whole_characters
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import SettingError, Stopped
from kvlite.web.server_api import FIELDS, ServerAnswer, Upstream, fields_of

_USUAL = Settings()

Begin = Callable[[Callbacks], Iterator[ServerAnswer]]
"""Starts an answer."""


@dataclass(frozen=True)
class Turn:
    """A message and its answer, with what was thought before it."""

    message: Message
    answer: str
    reasoning: str = ""
    reasoning_tokens: int = 0


@dataclass
class Said:
    """All that was said, as it is kept.

    Attributes:
        branches: the oldest first.
        current: the index of the one that goes on.
        waiting: documents that the next message will be about.
    """

    branches: list[tuple[Turn, ...]] = field(default_factory=lambda: [()])
    current: int = 0
    waiting: tuple[Document, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.current < len(self.branches):
            raise ValueError(f"there is no branch {self.current}")

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Those of the current branch."""
        return self.branches[self.current]


class ServerTalk:
    """A conversation that a server answers, which goes on and back; what was `said` in it, by the
    settings that were `given`, and those that were `changed` for it."""

    def __init__(
        self, upstream: Upstream, settings: Settings, said: Said, changed: Mapping[str, Any] = {}
    ) -> None:
        self._upstream, self.given, self._settings = upstream, settings, settings
        self.said, self.changed = said, {**changed}

    @property
    def messages(self) -> list[Message]:
        """The user's messages, in order."""
        return [turn.message for turn in self.said.turns]

    @property
    def waiting(self) -> tuple[Document, ...]:
        """Documents that the next message will be about."""
        return self.said.waiting

    def message(self, number: int | None) -> tuple[int, Message]:
        """A message and its number, counted from 1; None stands for the last one."""
        return numbered(self.messages, number)

    def read(self, documents: Sequence[Document], callbacks: Callbacks) -> bool:
        """Take documents for the next message, with which the server reads them."""
        self.said.waiting += (*documents,)
        return False

    def take_back(self, names: Sequence[str], callbacks: Callbacks) -> None:
        """Forget documents that wait, by their names."""
        self.said.waiting = tuple(each for each in self.said.waiting if each.name not in names)

    def say(self, text: str) -> Begin:
        """Answer a new message."""
        return self._answered(Message(text, self.said.waiting), len(self.said.turns))

    def regenerate(self, **settings: Any) -> Begin:
        """Answer the last message again, with settings for this answer alone."""
        number, message = self.message(None)
        return self._answered(message, number - 1, settings)

    def edit(self, number: int, text: str) -> Begin:
        """Answer message `number` in other words, about the same documents."""
        _, former = self.message(number)
        return self._answered(Message(text, former.documents), number - 1)

    def continue_answer(self) -> NoReturn:
        """Servers have no way to say this."""
        raise SettingError("a server cannot go on with an answer: ask it to, in a message")

    def check(self) -> NoReturn:
        """Servers have no way to say this."""
        raise SettingError("a server cannot be asked what it made its answer from")

    def undo(self, callbacks: Callbacks) -> None:
        """Go back before the last message; its documents wait for the next one."""
        number, message = self.message(None)
        self._put(self.said.turns[: number - 1])
        self.said.waiting = (*message.documents, *self.said.waiting)

    def branch(self, number: int, callbacks: Callbacks) -> None:
        """Go back to after the answer to message `number`; the next one's documents wait again."""
        self.message(number)
        turns = self.said.turns
        after = turns[number:]
        self._fork(turns[:number])
        self.said.waiting = after[0].message.documents if after else ()

    def switch(self, number: int, callbacks: Callbacks) -> None:
        """Go to a branch, counted from 1."""
        count = len(self.said.branches)
        if not 1 <= number <= count:
            raise SettingError(f"there is no branch {number}: there are {count} of them")
        if number - 1 != self.said.current:
            self.said.current, self.said.waiting = number - 1, ()

    def change(self, **values: Any) -> None:
        """Change settings, from the next message on."""
        self._settings = self._settings.after_load(values)
        self.changed |= values

    def _fork(self, turns: tuple[Turn, ...]) -> None:
        self.said.branches.append(turns)
        self.said.current = len(self.said.branches) - 1

    def _put(self, turns: tuple[Turn, ...]) -> None:
        self.said.branches[self.said.current] = turns

    def _answered(
        self, message: Message, number: int, settings: dict[str, Any] | None = None
    ) -> Begin:
        """Answer a message after so many others, with settings for this answer alone. If that goes
        wrong, or is stopped before anything has come, nothing was said."""
        chosen = self._settings.replace(settings or {})

        def begin(callbacks: Callbacks) -> Iterator[ServerAnswer]:
            former, before = self.said, self.said.turns[:number]
            told = [*_told(chosen, before, message)]
            self.said = replace(former, branches=[*former.branches])
            if number < len(former.turns):
                self._fork(before)
            else:
                self.said.waiting = ()
            try:
                for answer in self._upstream.client.answer(self._fields(chosen), told, callbacks):
                    if callbacks.cancelled and not (answer.text or answer.reasoning):
                        raise Stopped
                    thought = answer.reasoning, answer.reasoning_tokens
                    self._put((*before, Turn(message, answer.text, *thought)))
                    yield answer
            except BaseException:
                self.said = former
                raise

        return begin

    def _fields(self, settings: Settings) -> dict[str, Any]:
        own = {name for name in FIELDS if getattr(settings, name) != getattr(_USUAL, name)} - {
            *LOADING
        }
        return fields_of(settings, own | self._upstream.given)


def _told(settings: Settings, before: Sequence[Turn], message: Message) -> Iterator[dict[str, str]]:
    if settings.system:
        yield {"role": "system", "content": whole_characters(settings.system)}
    for turn in before:
        yield {"role": "user", "content": whole_characters(turn.message.said)}
        thought = {"reasoning_content": turn.reasoning} if turn.reasoning else {}
        yield {"role": "assistant", "content": turn.answer, **thought}
    yield {"role": "user", "content": whole_characters(message.said)}
