"""Reasoning at a terminal: a line that counts it while it comes, then one that stands for it."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

from kvlite.conversation.message import counted_tokens, thought_for


class ThinkingLine:
    """Says how long a model thinks while nothing of its answer has come, and how long it did."""

    def __init__(self, screen: Console, *, folds: bool) -> None:
        """`folds` is whether a line stays once it has thought; the other one is for terminals."""
        self._screen, self._folds = screen, folds
        self._shown = screen.is_terminal and not screen.quiet
        self._status: Status | None = None
        self._tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._end()

    def hear(self, reasoning: str, text: str, tokens: int) -> None:
        """Some more has come: reasoning, of which there are so many `tokens` now, or text."""
        if reasoning and not text:
            self._tokens = tokens
            if self._shown:
                self._count()
        elif text:
            self._tokens = self._tokens and tokens
            self._end()

    def _count(self) -> None:
        title = Text(f"Thinking, {counted_tokens(self._tokens)}", "dim")
        if self._status is None:
            self._status = self._screen.status(title)
            self._status.start()
        self._status.update(title)

    def _end(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._tokens and self._folds:
            self._screen.print(Text(thought_for(self._tokens), "dim"))
        self._tokens = 0
