"""The library: a folder of saved documents and conversations, which open in seconds.

There is nothing but the folder: files may be put there or taken away. A file's modification time is
when it was last used.
"""

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlite.config.atomic_file import replacing
from kvlite.config.paths import SUFFIX, data_folder
from kvlite.config.settings import Settings
from kvlite.config.units import parse_bytes, parse_number
from kvlite.conversation.file_info import About, about, digest_of
from kvlite.documents import Document
from kvlite.engine.callbacks import Progress
from kvlite.errors import SettingError, SnapshotError
from kvlite.methods import parse_method
from kvlite.model.identity import Identity

if TYPE_CHECKING:
    from kvlite.conversation.conversation import Conversation
    from kvlite.model.load import LoadedModel


# Forbidden in names: by some file system, or since they stand for undecodable bytes.
_NEVER = r"\0-\x1f/\\<>:\"|?*\ud800-\udfff"
_NAME = re.compile(rf"[^\s.{_NEVER}]([^{_NEVER}]*[^\s{_NEVER}])?")
_LONGEST = 200
# Of these bytes, for a number in brackets.
_NUMBER = 8
_READING = ("method", "budget", "kv_bits", "recall_bits")
_UNITS = (("day", 86_400), ("hour", 3_600), ("minute", 60))


@dataclass(frozen=True)
class Entry:
    """A file in the library.

    Attributes:
        used: when it was last saved or opened, in seconds since 1970.
        about: None if it cannot be opened; then `flaw` says why.
    """

    name: str
    path: Path
    nbytes: int
    used: float
    about: About | None
    flaw: str = ""


@dataclass(frozen=True)
class Added:
    """A new entry, and the names of those removed to keep to the limit."""

    name: str
    path: Path
    nbytes: int
    removed: list[str]


def library_folder() -> Path:
    """The folder of the library."""
    return data_folder() / "library"


def entries() -> list[Entry]:
    """All entries, the last used first."""
    found = []
    for path in library_folder().glob(f"*{SUFFIX}"):
        said, flaw = None, ""
        try:
            state = path.stat()
        except OSError:
            continue  # someone removed it meanwhile, or it leads nowhere
        try:
            said = about(path)
        except (SnapshotError, OSError) as error:
            if not path.exists():
                continue  # someone removed it meanwhile
            flaw = str(error)
        found.append(Entry(path.stem, path, state.st_size, state.st_mtime, said, flaw))
    return sorted(found, key=lambda each: -each.used)


def path_of(name: str) -> Path:
    """The path of an entry that may not exist. Raises SettingError if the name cannot be a
    file's."""
    if not _NAME.fullmatch(name) or len(name.encode()) > _LONGEST:
        raise SettingError(
            f'{name!r} is not a valid name: leave out / \\ < > : " | ? *, do not begin with a dot, '
            f"neither begin nor end with a space, and be shorter than {_LONGEST} bytes"
        )
    return library_folder() / f"{name}{SUFFIX}"


def entry_path(name: str) -> Path:
    """The path of an entry. Raises SettingError if there is none of this name."""
    path = path_of(name)
    if not path.is_file():
        names = [each.name for each in entries()]
        more = ", …" if len(names) > 9 else ""
        there = f"there is {', '.join(names[:9])}{more}"
        if not names:
            there = "it is empty; `kvlite read FILE` puts a document there"
        raise SettingError(f"the library has no {name!r}: {there}")
    return path


def add(talk: "Conversation", name: str = "", progress: Progress | None = None) -> Added:
    """Save a conversation in the library.

    Args:
        name: an entry of that name is replaced. By default it is named after its documents, or
            "conversation", and replaces only the same documents read by the same model.
        progress: called with (bytes done, bytes in all).

    Raises:
        SettingError: the name cannot be a file's.
        SnapshotError: it cannot be saved, or is larger than the limit.
    """
    path = path_of(name) if name else _free_path(talk)
    path.parent.mkdir(parents=True, exist_ok=True)
    nbytes = talk.save(path, progress=progress, most=limit())
    return Added(path.stem, path, nbytes, _keep_to_limit(path))


def remove(name: str) -> int:
    """Remove an entry; returns the bytes freed. Raises SettingError if there is none of this
    name."""
    path = entry_path(name)
    nbytes = path.stat().st_size
    path.unlink()
    return nbytes


def limit() -> int | None:
    """Bytes that all entries may take; None for no limit. Raises SettingError if the file of the
    limit is damaged."""
    path = library_folder() / "limit"
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    size = parse_number(text, whole=True)
    if size is None or size < 0:
        raise SettingError(f"{path} does not hold a size: set it with `kvlite library limit SIZE`")
    return int(size)


def set_limit(size: str) -> list[str]:
    """Limit all entries to a size such as 50GiB, or "none". Returns the names of the documents that
    were removed for it; conversations stay. Raises SettingError if it is not a size."""
    wanted = None if size == "none" else parse_bytes(size)
    if wanted is None and size != "none":
        raise SettingError(f"{size!r} is not a size: give 50GiB, 800MB or none")
    path = library_folder() / "limit"
    path.parent.mkdir(parents=True, exist_ok=True)
    if wanted is None:
        path.unlink(missing_ok=True)
        return []
    text = f"{wanted}\n".encode()
    with replacing(path, len(text)) as file:
        file.write(text)
    return _keep_to_limit(None)


def matching(
    model: "LoadedModel",
    documents: Sequence[Document],
    settings: Settings,
    notify: Callable[[str], None] | None = None,
) -> Entry | None:
    """The entry that answers questions about `documents` as if they were read now: with the same
    texts, model and way of reading. The budget may differ, since the host store has everything.
    `notify` is told of each entry that cannot be opened."""
    if settings.recall == "off":
        return None
    wanted = digest_of(documents)
    identity: Identity | None = None
    for each in entries():
        said = each.about
        if said is None and notify is not None:
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


def used(path: Path) -> None:
    """Mark an entry as used now."""
    os.utime(path)


def ago(then: float) -> str:
    """How long ago a time was, in words."""
    seconds = time.time() - then
    for unit, length in _UNITS:
        if (count := int(seconds // length)) > 0:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def _reading(settings: Settings) -> tuple[str, ...]:
    # All settings if the method skips some of the reading; the method only if it caches scores.
    method = parse_method(settings.method)
    if not method.prefilling.exact:
        return tuple(getattr(settings, name) for name in _READING)
    return method.spec if method.caches_scores else "", settings.recall_bits


def _free_path(talk: "Conversation") -> Path:
    names = [each.name for each in talk.documents]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    base = re.sub(f"[{_NEVER}]", "_", f"{names[0]}{more}" if names else "conversation")
    short = re.sub(r"^[\s.]+", "", base)[: _LONGEST // 4].encode()[: _LONGEST - _NUMBER]
    base = short.decode(errors="ignore").strip() or "conversation"
    wanted, identity, number = digest_of(talk.documents), Identity.of(talk.model), 1
    while True:
        path = path_of(base if number == 1 else f"{base} ({number})")
        if not path.exists() or (names and _is_of(path, wanted, identity)):
            return path
        number += 1


def _is_of(path: Path, wanted: str, identity: Identity) -> bool:
    # One that cannot be opened may be replaced, too.
    try:
        said = about(path)
    except SnapshotError:
        return True
    return said.ahead == wanted and said.identity == identity and not said.messages


def _keep_to_limit(kept: Path | None) -> list[str]:
    # Conversations stay, since they exist nowhere else.
    most, found = limit(), entries()
    total, removed = sum(each.nbytes for each in found), []
    for each in reversed(found):
        if most is None or total <= most:
            break
        said = each.about is not None and each.about.messages > 0
        if not said and each.path != kept:
            each.path.unlink(missing_ok=True)
            total -= each.nbytes
            removed.append(each.name)
    return removed
