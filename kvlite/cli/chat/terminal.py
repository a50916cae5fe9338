"""What a chat asks of the terminal it runs in."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from rich.console import RenderableType

from kvlite.conversation.metrics import GenerationMetrics
from kvlite.conversation.session import Begin
from kvlite.engine.callbacks import Callbacks
from kvlite.engine.prefill import Progress

T = TypeVar("T")

# What is told where to show how far it is, and stopped by an event.
Work = Callable[[Callbacks], T]


class Quit(Exception):
    """The user leaves."""


class Terminal(Protocol):
    """A screen and a keyboard."""

    @property
    def width(self) -> int:
        """Its columns."""
        ...

    def say(self, text: str) -> None:
        """A sentence beside the conversation."""
        ...

    def show(self, drawn: RenderableType) -> None:
        """A table or a picture."""
        ...

    def answer(self, begin: Begin) -> GenerationMetrics:
        """Show an answer while it comes; Ctrl-C ends it, and the part stays.

        Raises:
            Stopped: by Ctrl-C, before there was any.
        """
        ...

    def work(self, title: str, work: Work[T]) -> T:
        """Do what takes a while under a bar; Ctrl-C stops it.

        Raises:
            Stopped: it did.
        """
        ...

    def ask(self, prefill: str) -> str:
        """What the user makes of a text; empty to leave things as they are."""
        ...

    def leaving_on_interrupt(self, title: str) -> AbstractContextManager[Progress]:
        """A bar around what cannot be stopped and gone on from: Ctrl-C in it ends the program."""
        ...

    def clear(self) -> None:
        """Nothing is on the screen."""
        ...
