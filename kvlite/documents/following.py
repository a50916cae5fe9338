"""Who follows the reading of one document: it can be stopped, and ends where it gets too long."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from kvlite.errors import ContextError, require_uncancelled

Told = Callable[[int, int], None]


@dataclass
class Following:
    """Follows the reading of one document.

    Attributes:
        label: what it is called in messages.
        limit: the most characters it may have, if there is one.
        progress: told how much is done, and of how much.
        cancel: set to end it.
        not_read: how much of what the file holds was passed over, by what it is called, as
            "picture".
    """

    label: str
    limit: int | None = None
    progress: Told | None = None
    cancel: threading.Event | None = None
    not_read: Counter[str] = field(default_factory=Counter)
    _characters: int = 0

    def check(self) -> None:
        """Raises Stopped if someone cancelled."""
        require_uncancelled(self.cancel)

    def done(self, done: int, total: int) -> None:
        """Tell how much is done.

        Raises:
            Stopped: someone cancelled.
        """
        self.check()
        if self.progress is not None:
            self.progress(done, total)

    def came_out(self, characters: int) -> None:
        """Count characters of the document's text; of a last line's end, it may be one too many.

        Raises:
            ContextError: with it there is more than could fit.
            Stopped: someone cancelled.
        """
        self.check()
        self._characters += characters
        if self.limit is not None and self._characters > self.limit + 1:
            self.refuse(f"has {self._characters - 1:,} characters or more")

    def refuse(self, size: str) -> NoReturn:
        """Raises ContextError: the document's size is more than could fit."""
        raise ContextError(
            f"{self.label} {size}, and no more than {self.limit:,} characters could fit this "
            "model's context: split it, ask about a part of it, or use a model with a longer "
            "context."
        )

    @property
    def missed(self) -> tuple[str, ...]:
        """What was passed over, in words."""
        return tuple(
            f"{count:,} {what}{'' if count == 1 else 's'}"
            for what, count in self.not_read.items()
            if count
        )
