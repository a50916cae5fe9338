"""What a user's conversations take on disk."""

import shutil
import time
from pathlib import Path
from typing import NamedTuple

from kvlite.conversation.library import Library
from kvlite.model.local_models import bytes_of

# Seconds for which what was counted holds.
_HOLDS = 10.0


class DiskUse(NamedTuple):
    """Conversations, bytes of their files, and bytes that are free there."""

    talks: int
    nbytes: int
    free: int


NOTHING = DiskUse(0, 0, 0)


class Disk:
    """Counts at most every ten seconds for each user, however many look."""

    def __init__(self) -> None:
        self._counted: dict[Path, tuple[float, DiskUse]] = {}

    def of(self, store: Library) -> DiskUse:
        """What a user's conversations take."""
        now, (at, use) = time.monotonic(), self._counted.get(store.folder, (0.0, None))
        if use is None or now - at > _HOLDS:
            use = _counted(store.folder)
            self._counted[store.folder] = now, use
        return use


def _counted(folder: Path) -> DiskUse:
    try:
        talks = sum(1 for _ in folder.glob("*/record.json"))
        return DiskUse(talks, bytes_of(folder), shutil.disk_usage(folder).free)
    except OSError:  # there is none yet, or one is being deleted
        return NOTHING
