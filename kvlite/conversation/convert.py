"""Moves what version 0.1.0 kept into the library's folders: saved conversations and documents, a
file each, and the app's conversations."""

import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from kvlite.config.paths import SUFFIX
from kvlite.config.settings import LOADING
from kvlite.conversation.file_info import about
from kvlite.conversation.library import Library
from kvlite.conversation.message import as_typed
from kvlite.conversation.record import SERVER, Record, StoredMessage, branches_of, stored
from kvlite.documents import Document
from kvlite.errors import SnapshotError

if TYPE_CHECKING:
    from kvlite.conversation.snapshot import Snapshot


def open_library(owner: str = "", root: Path | None = None) -> Library:
    """A user's library, with what earlier versions kept. Args are those of `Library`."""
    library = Library(owner, root)
    with suppress(OSError):  # a folder that cannot be written is told of when something is
        _convert(library)
    return library


def _convert(library: Library) -> None:
    """Move all that can be opened; the rest stays where it is. It may be ended at any moment, and
    begun again."""
    files = [*library.folder.glob(f"*{SUFFIX}")]
    former = [] if library.owner else [*library.root.glob("app/everyone/*/record.json")]
    served = [] if library.owner else [*library.root.glob(f"server/*/*/*{SUFFIX}")]
    if not files and not former and not served:
        return
    library.folder.mkdir(parents=True, exist_ok=True)
    with suppress(Timeout), FileLock(library.folder / ".convert", timeout=60):
        for path in former:
            place = library.folder / path.parent.name
            if not place.exists():
                with suppress(OSError):
                    path.parent.rename(place)
        for path in files:
            with suppress(SnapshotError, OSError):
                _move(library, path, Record("", path.stem))
        for path in served:
            with suppress(SnapshotError, OSError):
                _move(library, path, Record("", "A program's conversation", made_by=SERVER))


def _move(library: Library, path: Path, record: Record) -> None:
    if not path.is_file():
        return
    light, state = about(path).light, path.stat()  # what is damaged is so without torch
    from kvlite.conversation.snapshot import Snapshot

    with Snapshot(path) as saved:
        _fill(record, saved)
    record.used = state.st_mtime
    record.id = sha256(f"{path} {state.st_mtime_ns} {state.st_size}".encode()).hexdigest()[:32]
    library.save(record)
    path.replace(library.light(record.id) if light else library.whole(record.id))
    os.utime(library.place(record.id) / "record.json", (state.st_atime, state.st_mtime))


def _fill(record: Record, saved: "Snapshot") -> None:
    """Say what a saved conversation has. Raises SnapshotError if it is damaged."""
    about, documents = saved.about, saved.documents()
    branches, current = _said(saved.history(), documents)
    began = {name: value for name, value in about.settings.items() if name not in LOADING}
    record.created, record.model, record.began = about.created, about.model, began
    record.said = branches[current]
    read = {each for branch in branches for message in branch for each in message.documents}
    record.waiting = [each.name for each in documents if each.name not in read]
    record.branches, record.elsewhere = branches_of(branches, current)
    record.is_document = bool(about.ahead) and not any(branches)


def _said(
    plain: dict[str, Any], documents: tuple[Document, ...]
) -> tuple[list[list[StoredMessage]], int]:
    found = list[list[StoredMessage]]()
    for path in plain["paths"]:
        messages = path["messages"]
        asked = [as_typed(each["content"], documents) for each in messages if _is_users(each)]
        found.append(stored(messages, asked))
    return found, int(plain["at"])


def _is_users(message: dict[str, Any]) -> bool:
    return bool(message["role"] == "user")
