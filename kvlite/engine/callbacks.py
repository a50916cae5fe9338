"""Who follows a reading."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING

from kvlite.config.arguments import require_callable
from kvlite.errors import SettingError

if TYPE_CHECKING:  # what is told of a reading need not load what reads
    from kvlite.engine.prefill import Progress

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Callbacks:
    """Who follows a reading.

    Attributes:
        progress: as of `engine.prefill.prefill`.
        notify: told in a sentence what the user should know.
        cancel: set to end it.
    """

    progress: "Progress | None" = None
    notify: Notify | None = None
    cancel: Event | None = None

    def __post_init__(self) -> None:
        require_callable(self.progress, "progress")
        require_callable(self.notify, "notify")
        if self.cancel is not None and not callable(getattr(self.cancel, "is_set", None)):
            raise SettingError(
                f"cancel {self.cancel!r} is not a threading.Event: give one, or None"
            )

    def say(self, note: str) -> None:
        """Notify, if anyone wants to know."""
        if self.notify is not None:
            self.notify(note)


NO_CALLBACKS = Callbacks()


def require_callbacks(given: object, name: str = "callbacks") -> None:
    """Raises SettingError unless `given` is a `Callbacks`."""
    if not isinstance(given, Callbacks):
        raise SettingError(f"{name} {given!r} is not a kvlite.Callbacks: give one")
