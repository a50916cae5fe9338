"""Who follows a reading."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what is told of a reading need not load what reads
    from kvlite.engine.reading import Progress

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Audience:
    """Who follows a reading.

    Attributes:
        progress: as of `engine.prefill.prefill`.
        notify: told in a sentence what the user should know.
        cancel: set to end it.
    """

    progress: "Progress | None" = None
    notify: Notify | None = None
    cancel: Event | None = None


NOBODY = Audience()
