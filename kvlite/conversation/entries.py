"""The library's entries by name: list, find, add and remove them, within a limit."""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlite.config.atomic_file import replacing
from kvlite.config.paths import SUFFIX
from kvlite.config.settings import Settings
from kvlite.config.units import parse_bytes, parse_number
from kvlite.conversation.file_info import About, about, digest_of
from kvlite.conversation.library import Library, a_name
from kvlite.conversation.message import Message
from kvlite.conversation.record import SERVER, Record, stored
from kvlite.documents import Document
from kvlite.engine.callbacks import Progress
from kvlite.errors import SettingError, SnapshotError
from kvlite.methods import parse_method
from kvlite.model.identity import Identity

if TYPE_CHECKING:
    from kvlite.conversation.conversation import Conversation
    from kvlite.model.load import LoadedModel

_READING = ("method", "budget", "kv_bits", "recall_bits")
_UNITS = (("day", 86_400), ("hour", 3_600), ("minute", 60))
# Digits of an entry's id that name it where its name does not.
ID_DIGITS = 8


@dataclass(frozen=True)
class Entry:
    """A document or a conversation of the library.

    Attributes:
        path: its folder, or a file of an earlier version that cannot be opened.
        used: when it was last saved or opened, in seconds since 1970.
        record: None if that is damaged.
        about: of its file; None if it has none, as a server goes on with it, or cannot be opened.
        flaw: why it cannot be opened.
    """

    id: str
    name: str
    path: Path
    nbytes: int
    used: float
    record: Record | None = None
    about: About | None = None
    flaw: str = ""

    @property
    def kind(self) -> str:
        """A document, a conversation, or what a program said to the server; "" if nobody knows."""
        if self.record is None:
            return ""
        said = "program" if self.record.made_by == SERVER else "conversation"
        return "document" if self.record.is_document else said

    @property
    def is_conversation(self) -> bool:
        """Whether something was said, which exists nowhere else."""
        return self.record is not None and not self.record.is_document


@dataclass(frozen=True)
class Added:
    """A new entry, its file, and the names of those removed to keep to the limit."""

    name: str
    path: Path
    nbytes: int
    removed: list[str]


def entries(library: Library) -> list[Entry]:
    """All entries, the last used first; none whose first message has no answer yet."""
    found = [_damaged(path) for path in library.folder.glob(f"*{SUFFIX}")]
    for path in library.folder.glob("*/record.json"):
        if library.may_be(path.parent.name):
            with suppress(FileNotFoundError):  # someone removed it meanwhile
                found.append(_entry(library, path.parent))
    return sorted((each for each in found if each is not None), key=lambda each: -each.used)


def _entry(library: Library, place: Path) -> Entry:
    id, record, said, flaw = place.name, None, None, ""
    used = (place / "record.json").stat().st_mtime
    try:
        record = library.record(id)
        said = _about(library, id)
    except (SettingError, SnapshotError) as error:
        if record is not None and record.draft and not (record.said or record.waiting):
            raise FileNotFoundError from None
        if not (place / "record.json").exists():
            raise FileNotFoundError from None
        flaw = str(error)
    name = id if record is None else record.title
    return Entry(id, name, place, _bytes_in(place), used, record, said, flaw)


def _about(library: Library, id: str) -> About | None:
    files = library.whole(id), library.light(id)
    there = next((each for each in files if each.is_file()), None)
    if there is None and not library.served(id).is_file():
        raise SnapshotError(f"{files[-1]} is gone: what was said can be read, and not gone on with")
    return None if there is None else about(there)


def _damaged(path: Path) -> Entry | None:
    """A file of an earlier version that could not be converted."""
    try:
        state = path.stat()
        about(path)
        flaw = f"{path} could not be moved into the library: make room there"
    except OSError:
        return None  # someone removed it meanwhile, or it leads nowhere
    except SnapshotError as error:
        flaw = str(error)
    return Entry("", path.stem, path, state.st_size, state.st_mtime, flaw=flaw)


def _bytes_in(place: Path) -> int:
    total = 0
    for path in place.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def entry_named(library: Library, name: str) -> Entry:
    """The entry of a name, or of an id that begins so. Raises SettingError if there is none, or
    several."""
    found = entries(library)
    if alike := [each for each in found if each.name == name]:
        if len(alike) == 1:
            return alike[0]
        ids = ", ".join(f"{each.id[:ID_DIGITS]} ({ago(each.used)})" for each in alike)
        raise SettingError(f"the library has {len(alike)} of the name {name!r}: say which, {ids}")
    if len(name) >= ID_DIGITS:
        by_id = [each for each in found if each.id.startswith(name)]
        if len(by_id) == 1:
            return by_id[0]
    names = [each.name for each in found]
    more = ", …" if len(names) > 9 else ""
    there = f"there is {', '.join(names[:9])}{more}"
    if not names:
        there = "it is empty; `kvlite read FILE` puts a document there"
    raise SettingError(f"the library has no {name!r}: {there}")


def add_document(
    library: Library, talk: "Conversation", name: str = "", progress: Progress | None = None
) -> Added:
    """Keep documents that were read, and nothing said.

    Args:
        name: a document of that name is replaced. By default it is named after its files, and
            replaces only the same texts read by the same model.
        progress: called with (bytes done, bytes in all).

    Raises:
        SettingError: the name is none, or a conversation's.
        SnapshotError: it cannot be saved, or is larger than the limit.
    """
    record = document_named(library, name) if name else _same_or_new(library, talk)
    names = [each.name for each in talk.documents]
    record.is_document = True
    record.update([[]], 0, talk.settings, names)
    return _add(library, record, talk, progress)


def add_conversation(
    library: Library,
    record: Record,
    talk: "Conversation",
    typed: Callable[[Sequence[dict[str, str]]], list[Message]],
    waiting: Sequence[Document],
    progress: Progress | None = None,
) -> Added:
    """Keep a conversation as the entry of a `record`; `typed` tells what its user typed. Args and
    errors are otherwise those of `add_document`."""
    said = [stored(each.messages, typed(each.messages)) for each in talk.branches]
    names = [each.name for each in waiting]
    record.made_by = ""
    record.update(said, talk.history.current, talk.settings, names)
    return _add(library, record, talk, progress)


def _add(
    library: Library, record: Record, talk: "Conversation", progress: Progress | None
) -> Added:
    id = record.id
    with library.hold(id, record.title):
        library.place(id).mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            talk.save(library.whole(id), progress=progress, most=limit(library))
            if record.is_document or talk.history.branch.compacted:
                library.light(id).unlink(missing_ok=True)
            else:
                talk.save(library.light(id), light=True)
            library.save(record)
            library.served(id).unlink(missing_ok=True)
        finally:
            if not library.has(id):
                shutil.rmtree(library.place(id), ignore_errors=True)
    nbytes = _bytes_in(library.place(id))
    return Added(record.title, library.whole(id), nbytes, _keep_to_limit(library, id))


def document_named(library: Library, name: str) -> Record:
    """The record of the document of this name, a new one if there is none. Raises SettingError if
    the name is none, or a conversation's."""
    name = a_name(name)
    alike = [each for each in entries(library) if each.name == name]
    for each in alike:
        if each.is_conversation:
            raise SettingError(f"{name} is a conversation: give another name, or remove it first")
    if len(alike) == 1 and alike[0].record is not None:
        return alike[0].record
    return library.new(name)


def _same_or_new(library: Library, talk: "Conversation") -> Record:
    """The entry of these documents, read by this model, or one with a name of its own."""
    names = [each.name for each in talk.documents]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    base = a_name(f"{names[0]}{more}")
    wanted, identity = digest_of(talk.documents), Identity.of(talk.model)
    taken = dict[str, list[Entry]]()
    for each in entries(library):
        taken.setdefault(each.name, []).append(each)
    name, number = base, 1
    while name in taken:
        for each in taken[name]:
            is_same = each.about is not None and (each.about.ahead, each.about.identity) == (
                wanted,
                identity,
            )
            if each.record is not None and each.record.is_document and (is_same or each.flaw):
                return each.record
        number += 1
        name = f"{base} ({number})"
    return library.new(name)


def remove(library: Library, name: str) -> int:
    """Remove an entry for good; returns the bytes freed. Raises SettingError if there is none of
    this name, or another program writes it."""
    entry = entry_named(library, name)
    if entry.id:
        library.remove(entry.id)
    else:
        entry.path.unlink(missing_ok=True)
    return entry.nbytes


def limit(library: Library) -> int | None:
    """Bytes that all entries may take; None for no limit. Raises SettingError if the file of the
    limit is damaged."""
    path = library.folder / "limit"
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    size = parse_number(text, whole=True)
    if size is None or size < 0:
        raise SettingError(f"{path} does not hold a size: set it with `kvlite library limit SIZE`")
    return int(size)


def set_limit(library: Library, size: str) -> list[str]:
    """Limit all entries to a size such as 50GiB, or "none". Returns the names of the documents that
    were removed for it; conversations stay. Raises SettingError if it is not a size."""
    wanted = None if size == "none" else parse_bytes(size)
    if wanted is None and size != "none":
        raise SettingError(f"{size!r} is not a size: give 50GiB, 800MB or none")
    path = library.folder / "limit"
    path.parent.mkdir(parents=True, exist_ok=True)
    if wanted is None:
        path.unlink(missing_ok=True)
        return []
    text = f"{wanted}\n".encode()
    with replacing(path, len(text)) as file:
        file.write(text)
    return _keep_to_limit(library, "")


def _keep_to_limit(library: Library, kept: str) -> list[str]:
    """Remove what was not used for longest: documents, and caches of conversations, which are read
    again from what was said. What another program writes stays."""
    if (most := limit(library)) is None:
        return []
    found, removed = entries(library), list[str]()
    total = sum(each.nbytes for each in found)
    for each in reversed(found):
        if total <= most:
            break
        if each.id == kept or each.record is None:  # nobody knows what that would be
            continue
        if not each.is_conversation:
            with suppress(OSError, SettingError):
                library.remove(each.id)
                total -= each.nbytes
                removed.append(each.name)
        elif library.light(each.id).is_file():
            with suppress(OSError, SettingError), library.hold(each.id):
                total -= library.whole(each.id).stat().st_size
                library.whole(each.id).unlink()
    return removed


def matching(
    library: Library,
    model: "LoadedModel",
    documents: Sequence[Document],
    settings: Settings,
    notify: Callable[[str], None] | None = None,
) -> Entry | None:
    """The document that answers questions about `documents` as if they were read now: with the same
    texts, model and way of reading. The budget may differ, since the host store has everything.
    `notify` is told of each entry that cannot be opened."""
    if settings.recall == "off":
        return None
    wanted = digest_of(documents)
    identity: Identity | None = None
    for each in entries(library):
        said = each.about
        if each.flaw and not each.is_conversation and notify is not None:
            notify(f"{each.flaw}; it is passed over")
        if said is None or said.ahead != wanted or said.messages or said.light:
            continue
        identity = identity or Identity.of(model)  # which takes a while
        if said.identity != identity:
            continue
        with suppress(SettingError):  # another version's values
            read_by = Settings().replace({name: said.settings.get(name) for name in _READING})
            if _reading(read_by) == _reading(settings):
                return each
    return None


def _reading(settings: Settings) -> tuple[str, ...]:
    # All settings if the method skips some of the reading; the method only if it caches scores.
    method = parse_method(settings.method)
    if not method.prefilling.exact:
        return tuple(getattr(settings, name) for name in _READING)
    return method.spec if method.caches_scores else "", settings.recall_bits


def used(entry: Entry) -> None:
    """Mark an entry as used now."""
    os.utime(entry.path / "record.json")


def ago(then: float) -> str:
    """How long ago a time was, in words."""
    seconds = time.time() - then
    for unit, length in _UNITS:
        if (count := int(seconds // length)) > 0:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
