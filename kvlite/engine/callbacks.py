"""Who follows a reading."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Event

from kvlite.config.arguments import require_callable
from kvlite.errors import SettingError

Progress = Callable[[int, int], None]
Notify = Callable[[str], None]


@dataclass(frozen=True)
class ReadingBytes:
    """What a reading holds, besides the weights and what the cache held before.

    Attributes:
        tokens: that are read.
        hidden: bytes of their hidden states.
        layer: of all keys and values of the layer that is being read.
        kept: of what layers before it keep.
        within: of both, what the cache holds already: layers that are read where they are.
    """

    tokens: int
    hidden: int
    layer: int
    kept: int
    within: int


@dataclass(frozen=True)
class Callbacks:
    """Who follows a reading.

    Attributes:
        progress: told (layer-tokens done, of how many) after every chunk.
        notify: told in a sentence what the user should know.
        cancel: set to end it; checked before every chunk.
        reading: told after every chunk how many bytes are held.
        planned: told, before anything is read, how many bytes of the device that and the answer are
            planned to take beside what there is; it may free them, or raise OutOfMemory.
    """

    progress: Progress | None = None
    notify: Notify | None = None
    cancel: Event | None = None
    reading: Callable[[ReadingBytes], None] | None = None
    planned: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        require_callable(self.progress, "progress")
        require_callable(self.notify, "notify")
        require_callable(self.reading, "reading")
        require_callable(self.planned, "planned")
        if self.cancel is not None and not callable(getattr(self.cancel, "is_set", None)):
            raise SettingError(
                f"cancel {self.cancel!r} is not a threading.Event: give one, or None"
            )

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was set."""
        return self.cancel is not None and self.cancel.is_set()

    def say(self, note: str) -> None:
        """Notify, if anyone wants to know."""
        if self.notify is not None:
            self.notify(note)


NO_CALLBACKS = Callbacks()


def require_callbacks(given: object, name: str = "callbacks") -> None:
    """Raises SettingError unless `given` is a `Callbacks`."""
    if not isinstance(given, Callbacks):
        raise SettingError(f"{name} {given!r} is not a kvlite.Callbacks: give one")
