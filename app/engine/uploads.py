"""Uploaded documents: nothing else on this machine is read for anyone."""

import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvlite.config.settings import Settings
from kvlite.conversation.library import folder_of
from kvlite.documents import Document, read_document
from kvlite.errors import ContextError, DocumentError, KvliteError, Stopped, require_uncancelled
from kvlite.web.work import Work

from .model_host import ModelHost

# Bytes of all files together, of one user's, and the least that one counts as, so that there cannot
# be too many.
MOST, MOST_EACH, LEAST = 2 << 30, 1 << 30, 1 << 20
# Seconds after which a file that was not sent is removed.
KEPT = 3600.0
# How many documents are read at once, and how many of one user.
_AT_ONCE, _AT_ONCE_EACH = 4, 2
# Seconds between two looks at whether a document's turn has come.
_BEAT = 0.05


class Uploads:
    """Uploaded files, each in a folder whose name nobody can guess. They are removed when they were
    read, with their conversation, when another comes an hour later, and when the app ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._turns = threading.BoundedSemaphore(_AT_ONCE)
        self._turns_of: dict[str, threading.BoundedSemaphore] = {}

    def clear(self) -> None:
        """Remove all files, also those that an app which was killed left behind."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def new(self, owner: str) -> Path:
        """A folder for a new file."""
        for old in self.folder.glob("*/*"):
            if _used(old) < time.time() - KEPT:
                shutil.rmtree(old, ignore_errors=True)
        place = self.folder / folder_of(owner) / secrets.token_urlsafe(16)
        place.mkdir(parents=True, mode=0o700)
        return place

    def room(self, owner: str) -> int:
        """How many bytes a user may still upload; 0 or less if there is no room."""
        own = _taken(self.folder / folder_of(owner))
        return min(MOST_EACH - own, MOST - _taken(self.folder))

    def own(self, owner: str, path: Any) -> str:
        """The path of a user's file; raises DocumentError if this user did not upload it."""
        if isinstance(path, str) and "\0" not in path:
            place = Path(path).resolve()
            if place.is_relative_to(self.folder / folder_of(owner)) and place.is_file():
                return str(place)
        raise DocumentError(
            "this is no file that was uploaded, or it was removed since: upload it, with "
            "handle_file(PATH) in a program"
        )

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files and their folders."""
        for path in paths:
            if Path(path).is_relative_to(self.folder):
                shutil.rmtree(Path(path).parent, ignore_errors=True)

    def read(
        self,
        path: str,
        work: Work,
        model_host: ModelHost,
        settings: Settings,
        *,
        whole: bool = True,
    ) -> Document:
        """The document in an uploaded file, read in a process of its own: so it neither slows down
        answers nor takes all memory, and can be stopped at once. It is read by `settings`.

        Raises a KvliteError if it cannot be read, does not fit the model as a `whole`, or `work`
        was cancelled. A file that cannot be read is removed then."""
        name = Path(path).name
        try:
            own = threading.BoundedSemaphore(_AT_ONCE_EACH)
            own = self._turns_of.setdefault(Path(path).parent.parent.name, own)
            with _turn(own, work), _turn(self._turns, work):
                os.utime(path)  # so that it is not removed as an old one
                work.begin(f"Opening {name}")
                document = read_document(
                    path,
                    limit=model_host.text_limit if whole else None,
                    progress=work.progress,
                    cancel=work.cancel,
                    **settings.reading,
                )
            if whole:
                model_host.require_fits(document.text, work.cancel)
            return document
        except Stopped:
            raise
        except ContextError as error:  # parts of it may be read yet, so it stays
            raise ContextError(str(error).replace(path, name), error.tokens) from None
        except (KvliteError, OSError) as error:
            self.remove([path])
            kind = type(error) if isinstance(error, KvliteError) else DocumentError
            raise kind(str(error).replace(path, name)) from None


@contextmanager
def _turn(turns: threading.BoundedSemaphore, work: Work) -> Iterator[None]:
    while not turns.acquire(timeout=_BEAT):
        require_uncancelled(work.cancel)
    try:
        yield
    finally:
        turns.release()


def _taken(folder: Path) -> int:
    """Bytes that the files below a folder count as."""
    return sum(max(LEAST, _size(each)) for each in folder.rglob("*") if not each.is_dir())


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # it has just gone
        return 0


def _used(place: Path) -> float:
    try:
        return max(each.stat().st_mtime for each in (place, *place.iterdir()))
    except OSError:
        return time.time()
