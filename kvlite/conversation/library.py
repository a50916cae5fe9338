"""A user's library: conversations and documents on disk, which every front end lists and goes on
with.

Each is a folder with its record, what the engine reads it again from, what it opens in a second,
and accounts of its answers. One program at a time writes an entry; others may read it.
"""

import json
import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from kvlite.config.atomic_file import replaced
from kvlite.config.checked_file import Damaged, PassedOver, from_json
from kvlite.config.paths import data_folder
from kvlite.conversation.record import Record
from kvlite.errors import SettingError, SnapshotError

_LOG = logging.getLogger("kvlite.library")
_DELETED = "this conversation was deleted: begin a new one"
_ID = re.compile(r"[0-9a-f]{32}")
# Characters of a query that count.
_QUERY = 1_000
_LONGEST_NAME = 200
# The part of the disk's free space that caches of conversations may take.
_SHARE = 0.1
# Seconds for which what was deleted can be restored, and where it is meanwhile.
_RESTORED, _ASIDE = 60, "deleted"
# What tells a file from what was there before.
_Written = tuple[int, int, int]


@dataclass(frozen=True)
class Deleted:
    """A conversation that can be restored until `end`, by `time.monotonic`."""

    id: str
    title: str
    end: float


class Writer:
    """The right to write an entry, which one program has until it is released."""

    def __init__(self, release: Callable[[], None]) -> None:
        self.release = release

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Library:
    """What one user keeps; `owner` is "" where nobody logs in. For several threads."""

    def __init__(self, owner: str = "", root: Path | None = None) -> None:
        """`root` is kvlite's data folder, if not the usual one."""
        self.owner, self.root = owner, root or data_folder()
        self.folder = self.root / "app" / folder_of(owner) if owner else self.root / "library"
        self._passed_over = PassedOver(_LOG)
        self._lock = threading.Lock()
        self._locking = threading.Lock()
        self._locks: dict[str, tuple[FileLock, int]] = {}  # and by how many they are held
        self._listed: dict[Path, tuple[_Written, Record]] = {}
        self._gone: set[str] = set()
        self._deleted: Deleted | None = None

    def records(self, query: str = "") -> list[Record]:
        """Entries that match a query, the one used last first. Do not change them."""
        listed, query = {}, query[:_QUERY]
        for path in self.folder.glob("*/record.json"):
            if self.is_gone(path.parent.name):
                continue
            try:
                written, known = _written(path), self._listed.get(path)
                if known is None or known[0] != written:
                    known = written, self._read(path)
                listed[path] = known
            except (OSError, SettingError, Damaged) as error:
                self._passed_over(path, error)  # it may be of a later version: it stays there
        self._listed = listed
        found = [record for _, record in listed.values() if record.matches(query)]
        return sorted(found, key=lambda each: -each.used)

    def changed(self) -> str:
        """What changes when an entry is added or removed, by whatever program."""
        try:
            return str(self.folder.stat().st_mtime_ns)
        except OSError:
            return ""

    def new(self, name: str = "") -> Record:
        """An empty record, which is on disk once it is saved."""
        return Record(uuid.uuid4().hex, name)

    def record(self, id: str) -> Record:
        """An entry's record; raises SettingError if there is none that can be read."""
        path = self.place(id) / "record.json"
        try:
            return self._read(path)
        except FileNotFoundError:
            raise SettingError(_DELETED) from None
        except (OSError, SettingError, Damaged):
            raise SettingError(f"{path} cannot be read: delete it, or mend it") from None

    def record_or_new(self, id: str) -> Record:
        """The record of an entry, or an empty one if there is none yet."""
        return self.record(id) if self.has(id) else Record(id)

    def has(self, id: str) -> bool:
        """Whether an entry is on disk."""
        return bool(_ID.fullmatch(id)) and (self.place(id) / "record.json").is_file()

    def may_be(self, id: str) -> bool:
        """Whether there is, or may one day be, an entry of this id."""
        return bool(_ID.fullmatch(id)) and not self.is_gone(id)

    def save(self, record: Record) -> None:
        """Write a record, whole or not at all."""
        folder = self.place(record.id)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replaced(folder / "record.json", private=True) as file:
            file.write(record.to_json().encode("utf-8", "replace"))

    def hold(self, id: str, title: str = "") -> Writer:
        """Be the one program that writes an entry. Raises SettingError if another one is, or its
        folder cannot be locked."""
        path = self.place(id).parent / "locks" / id
        try:
            with self._locking:
                if id not in self._locks:
                    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    lock = FileLock(path, timeout=0, thread_local=False)
                    lock.acquire()
                    self._locks[id] = lock, 0
                lock, holders = self._locks[id]
                self._locks[id] = lock, holders + 1
            return Writer(partial(self._release, id))
        except Timeout:
            called = f'"{title or self._title(id)}"'
            raise SettingError(
                f"{called} is open in another kvlite, which writes it: go on with it there, or "
                "close it there first"
            ) from None
        except OSError as error:
            raise SettingError(
                f"{path.parent} cannot be locked ({error.strerror or error}), so that two programs "
                "could write to it at once: set KVLITE_DATA to a folder on a disk of this machine"
            ) from None

    def _release(self, id: str) -> None:
        with self._locking:
            lock, holders = self._locks.pop(id)
            if holders > 1:
                self._locks[id] = lock, holders - 1
            else:
                lock.release()
                if not self.place(id).exists():  # nobody will write it any more
                    with suppress(OSError):
                        Path(lock.lock_file).unlink(missing_ok=True)

    def _title(self, id: str) -> str:
        try:
            return self.record(id).title
        except SettingError:
            return id

    @contextmanager
    def changing(self, id: str, failed: str = "") -> Iterator[Record]:
        """A record to change, a new one if there is none; saved when the block ends. Nobody else
        changes one meanwhile. Raises SettingError if another program writes the entry. If it cannot
        be written, raises SnapshotError if there is a sentence for that (`failed`), else
        OSError."""
        with self._lock, self.hold(id):
            self.require_there(id)
            record = self.record_or_new(id)
            yield record
            try:
                self.save(record)
            except OSError as error:
                if not failed:
                    raise
                raise SnapshotError(f"{failed}: {error}; make room there") from None

    def keep_draft(self, id: str, text: str) -> None:
        """Keep a message until it is answered; raises SnapshotError if it cannot be written."""
        with self.changing(id, "the message cannot be written to disk, and is not sent") as record:
            record.draft = text
            record.name_after(text)

    def begin_beside(self, record: Record, name: str) -> None:
        """Let a document stay an entry of its own, as a conversation takes the place that it has;
        the `record` becomes the conversation's, of this name. Raises OSError."""
        document = replace(record, id=self.new().id, draft="", changed={})
        self.save(document)  # first: where there is no room, nothing was moved
        for file in (self.whole, self.light):
            if file(record.id).is_file():
                try:
                    os.link(file(record.id), file(document.id))
                except OSError:  # the disk has no links
                    file(record.id).replace(file(document.id))
        record.is_document, record.name = False, name
        self.save(record)  # now: it stays once, whatever becomes of the conversation

    def rename(self, id: str, name: str) -> Record:
        """Name an entry; raises SettingError if the name is empty, or SnapshotError if it cannot be
        written."""
        self.record(id)
        name = a_name(name)
        with self.changing(id, "the name cannot be written to disk") as record:
            record.name = name
        return record

    def delete(self, id: str) -> None:
        """Remove an entry: nothing is written to it any more, and until another is removed it can
        be restored for a minute. Raises SettingError if another program writes it, or part of it
        could not be removed."""
        place, title = self.place(id), ""
        with suppress(SettingError):
            title = self.record(id).title
        with self._lock, self.hold(id, title):
            self._gone.add(id)
            if title:
                self._drop_deleted()
                with suppress(OSError):
                    self._set_aside(id)
                    self._deleted = Deleted(id, title, time.monotonic() + _RESTORED)
            shutil.rmtree(place, ignore_errors=True)
        if place.exists():
            raise SettingError(f"{place} cannot be removed whole: remove it by hand")

    def remove(self, id: str) -> None:
        """Remove an entry for good. Errors are those of `delete`, and OSError."""
        with self._lock, self.hold(id):
            if self.place(id).exists():
                self._set_aside(id)  # at once, for those who list
                shutil.rmtree(self._aside(id))

    def deleted(self) -> Deleted | None:
        """What can be restored; what no longer can is removed for good."""
        with self._lock:
            if self._deleted is not None and time.monotonic() > self._deleted.end:
                self._drop_deleted()
            return self._deleted

    def restore(self, id: str) -> None:
        """Bring back what was deleted last; raises SettingError if that is too late."""
        with self._lock:
            if self._deleted is None or self._deleted.id != id:
                raise SettingError(_DELETED)
            shutil.rmtree(self.place(id), ignore_errors=True)  # what was written meanwhile
            self._aside(id).replace(self.place(id))
            self._gone.discard(id)
            self._deleted = None

    def discard(self, id: str) -> None:
        """Remove an entry in which nothing was said or read, as if it had never been."""
        with self._lock, suppress(SettingError), self.hold(id):  # what cannot be read stays
            now = self.record(id)
            if not now.said and not now.waiting:
                shutil.rmtree(self.place(id), ignore_errors=True)

    def sweep(self) -> None:
        """Remove what was written to entries while they were deleted."""
        with self._lock:
            for id in self._gone:
                shutil.rmtree(self.place(id), ignore_errors=True)

    def close(self) -> None:
        """Remove for good what was deleted."""
        self.sweep()
        with self._lock:
            self._drop_deleted()

    def _drop_deleted(self) -> None:
        self._deleted = None
        shutil.rmtree(self.folder / _ASIDE, ignore_errors=True)

    def _set_aside(self, id: str) -> None:
        aside = self._aside(id)
        aside.parent.mkdir(exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        self.place(id).replace(aside)

    def _aside(self, id: str) -> Path:
        return self.folder / _ASIDE / id

    def require_there(self, id: str) -> None:
        """Raises SettingError if an entry was deleted."""
        if self.is_gone(id):
            raise SettingError(_DELETED)

    def is_gone(self, id: str) -> bool:
        """Whether an entry was deleted, even if some of it is still there."""
        return id in self._gone

    def place(self, id: str) -> Path:
        """The folder of an entry; raises SettingError if this is no id."""
        if not _ID.fullmatch(id):
            raise SettingError(f"{id!r} is no conversation: choose one from the list")
        return self.folder / id

    def light(self, id: str) -> Path:
        """The file that the engine reads an entry again from; up to date whenever it is there."""
        return self.place(id) / "talk.kv"

    def whole(self, id: str) -> Path:
        """The file with its cache, opened in a second; gone once something else was said."""
        return self.place(id) / "whole.kv"

    def served(self, id: str) -> Path:
        """What was said with a server, which is asked all of it again."""
        return self.place(id) / "served.json"

    def keep_account(self, id: str, key: str, account: dict[str, Any]) -> None:
        """Keep what an answer was made from, unless its conversation was deleted."""
        folder = self.place(id) / "answers"
        with self._lock:
            if self.is_gone(id):
                return
            folder.mkdir(parents=True, exist_ok=True)
            with replaced(folder / f"{key}.json", private=True) as file:
                file.write(json.dumps(account).encode())

    def account(self, id: str, key: str) -> dict[str, Any]:
        """What an answer was made from; empty if that is not known."""
        try:
            plain = from_json((self.place(id) / "answers" / f"{key}.json").read_bytes())
        except (OSError, Damaged):
            return {}
        whole = isinstance(plain, dict) and {"brief", "told"} <= plain.keys()
        return plain if whole else {}

    def room_for_whole(self) -> int:
        """Bytes that one more cache of a conversation may take on disk; older ones give way to
        it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return int(_SHARE * shutil.disk_usage(self.folder).free)

    def make_room(self) -> None:
        """Remove the oldest caches of conversations, of all users, that exceed their share of the
        disk. Those of documents stay, whose reading is all that they are."""
        room = self.room_for_whole()
        for path in sorted(wholes(self.root), key=lambda each: -each.stat().st_mtime):
            if path.with_name("talk.kv").is_file():
                room -= path.stat().st_size
                if room < 0:
                    path.unlink(missing_ok=True)

    def _read(self, path: Path) -> Record:
        record = Record.from_json(path.read_bytes())
        record.id = path.parent.name  # a copy of a folder is another entry
        self.place(record.id)
        return record


def wholes(root: Path) -> list[Path]:
    """The files with caches of all users."""
    return [*root.glob("library/*/whole.kv"), *root.glob("app/*/*/whole.kv")]


def a_name(text: str) -> str:
    """A name for an entry, in one line; raises SettingError if it is empty."""
    name = " ".join(text.split())[:_LONGEST_NAME]
    if not name:
        raise SettingError("a conversation needs a name: type one")
    return name


def drop_deleted(root: Path) -> None:
    """Remove what an app that was killed could have restored, of all users."""
    for folder in (root / "library" / _ASIDE, *(root / "app").glob(f"*/{_ASIDE}")):
        shutil.rmtree(folder, ignore_errors=True)


def folder_of(owner: str) -> str:
    """The name of a user's folder: a user's name may have characters that a folder's may not."""
    return f"user-{sha256(owner.encode()).hexdigest()[:32]}" if owner else "everyone"


def _written(path: Path) -> _Written:
    about = path.stat()
    return about.st_mtime_ns, about.st_ino, about.st_size
