"""What was read or said once, kept in a folder to be opened in seconds: names, sizes, a limit.

Every entry is a file of `kvlite.conversation.snapshot`, and the folder is all there is to it: files
may be put there or taken away. When one was used last is its time of modification.
"""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlite.config.atomic_file import replacing
from kvlite.config.paths import SUFFIX, data_folder
from kvlite.config.settings import Settings
from kvlite.config.units import parse_bytes, parse_number
from kvlite.conversation.file_info import About, about, digest_of
from kvlite.conversation.tensor_file import Progress
from kvlite.documents import Document
from kvlite.errors import SettingError, SnapshotError
from kvlite.methods import parse_method
from kvlite.model.identity import Identity

if TYPE_CHECKING:
    from kvlite.conversation.conversation import Conversation
    from kvlite.model.load import LoadedModel


# Not in names: what some file system forbids, and bytes that are no character of the locale.
_NEVER = r"\0-\x1f/\\<>:\"|?*\ud800-\udfff"
_NAME = re.compile(rf"[^\s.{_NEVER}]([^{_NEVER}]*[^\s{_NEVER}])?")
_LONGEST = 200
_READING = ("method", "budget", "kv_bits", "recall_bits")
_UNITS = (("day", 86_400), ("hour", 3_600), ("minute", 60))


@dataclass(frozen=True)
class Entry:
    """A file in the library.

    Attributes:
        name: what users call it.
        nbytes: how large.
        used: when it was saved or opened last, in seconds since 1970.
        about: what it says of itself; None if it cannot be opened.
        flaw: why not.
    """

    name: str
    path: Path
    nbytes: int
    used: float
    about: About | None
    flaw: str = ""


@dataclass(frozen=True)
class Added:
    """What was put into the library.

    Attributes:
        name, path, nbytes: its.
        removed: names of those that had to go for it, to keep to the limit.
    """

    name: str
    path: Path
    nbytes: int
    removed: list[str]


def library_folder() -> Path:
    """Where it is."""
    return data_folder() / "library"


def entries() -> list[Entry]:
    """All there are, the one used last first."""
    found = []
    for path in library_folder().glob(f"*{SUFFIX}"):
        said, flaw = None, ""
        try:
            state = path.stat()
            said = about(path)
        except (SnapshotError, FileNotFoundError) as error:
            if not path.exists():
                continue  # someone removed it meanwhile
            flaw = str(error)
        found.append(Entry(path.stem, path, state.st_size, state.st_mtime, said, flaw))
    return sorted(found, key=lambda each: -each.used)


def path_of(name: str) -> Path:
    """Where an entry of this name lies.

    Raises:
        SettingError: it is no name for a file.
    """
    if not _NAME.fullmatch(name) or len(name.encode()) > _LONGEST:
        raise SettingError(
            f'{name!r} is no name: leave out / \\ < > : " | ? *, do not begin with a dot, neither '
            f"begin nor end with a space, and be shorter than {_LONGEST} bytes"
        )
    return library_folder() / f"{name}{SUFFIX}"


def entry_path(name: str) -> Path:
    """Where the entry of this name lies.

    Raises:
        SettingError: there is none.
    """
    path = path_of(name)
    if not path.is_file():
        raise SettingError(f"the library has no {name!r}: {_there_is()}")
    return path


def add(talk: "Conversation", name: str = "", progress: Progress | None = None) -> Added:
    """Save a conversation there.

    Args:
        name: of the entry; one of that name gives way. Without one it is called as its documents
            are, or "conversation"; it then takes the place of the same documents read by the same
            model, and of nothing else.
        progress: told (bytes done, of how many).

    Raises:
        SettingError: it is no name for a file.
        SnapshotError: it cannot be saved, or is larger than the limit.
    """
    path = path_of(name) if name else _free_path(talk)
    path.parent.mkdir(parents=True, exist_ok=True)
    nbytes = talk.save(path, progress=progress, most=limit())
    return Added(path.stem, path, nbytes, _keep_to_limit(path))


def remove(name: str) -> int:
    """Remove an entry; the bytes that were freed.

    Raises:
        SettingError: there is none of this name.
    """
    path = entry_path(name)
    nbytes = path.stat().st_size
    path.unlink()
    return nbytes


def limit() -> int | None:
    """Bytes that all entries may take; None for any.

    Raises:
        SettingError: what is written there is none.
    """
    path = _limit_path()
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    size = parse_number(text, whole=True)
    if size is None or size < 0:
        raise SettingError(f"{path} holds no size: set it anew with `kvlite library limit SIZE`")
    return int(size)


def set_limit(size: str) -> list[str]:
    """Let all entries take no more than `size`, as in 50GiB, or with "none" any; the names of those
    that had to go: documents, as conversations stay.

    Raises:
        SettingError: it is no size.
    """
    wanted = None if size == "none" else parse_bytes(size)
    if wanted is None and size != "none":
        raise SettingError(f"{size!r} is not a size: give 50GiB, 800MB or none")
    path = _limit_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    if wanted is None:
        path.unlink(missing_ok=True)
        return []
    text = f"{wanted}\n".encode()
    with replacing(path, len(text)) as file:
        file.write(text)
    return _keep_to_limit(None)


def matching(
    model: "LoadedModel", documents: Sequence[Document], settings: Settings
) -> Entry | None:
    """The entry from which questions about documents are answered as if they were read now: the
    same texts, model, and way of reading. How much the cache keeps may differ, as all that was
    read is there.

    Args:
        settings: of the conversation to be.
    """
    if settings.recall == "off":
        return None
    wanted, found = digest_of(documents), entries()
    same = [each for each in found if each.about is not None and each.about.ahead == wanted]
    if not same:
        return None
    identity = Identity.of(model)
    for each in same:
        said = each.about
        if said is None or said.messages or said.light or said.identity != identity:
            continue
        if _reading(Settings().replace(_known(said))) == _reading(settings):
            return each
    return None


def used(path: Path) -> None:
    """Remember that an entry was opened now."""
    os.utime(path)


def ago(then: float) -> str:
    """How long ago something was, for people."""
    seconds = time.time() - then
    for unit, length in _UNITS:
        if (count := int(seconds // length)) > 0:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def _known(said: About) -> dict[str, object]:
    """What decides how a text was read, and how its entries are kept."""
    return {name: said.settings.get(name) for name in _READING}


def _reading(settings: Settings) -> tuple[str, ...]:
    """What a text's reading depends on, for what can be recalled of it: the method only if it goes
    on from what it found before, and all of these if it does not read all."""
    method = parse_method(settings.method)
    if not method.prefilling.exact:
        return tuple(getattr(settings, name) for name in _READING)
    return method.spec if method.caches_scores else "", settings.recall_bits


def _free_path(talk: "Conversation") -> Path:
    """Where a conversation without a name goes."""
    names = [each.name for each in talk.documents]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    base = re.sub(f"[{_NEVER}]", "_", f"{names[0]}{more}" if names else "conversation")
    base = base.lstrip(". ")[: _LONGEST // 4].strip() or "conversation"
    wanted, identity, number = digest_of(talk.documents), Identity.of(talk.model), 1
    while True:
        path = path_of(base if number == 1 else f"{base} ({number})")
        if not path.exists() or (names and _is_of(path, wanted, identity)):
            return path
        number += 1


def _is_of(path: Path, wanted: str, identity: Identity) -> bool:
    """Whether an entry is of documents that were read, and no more, by a model; or of nothing that
    can be opened."""
    try:
        said = about(path)
    except SnapshotError:
        return True
    return said.ahead == wanted and said.identity == identity and not said.messages


def _keep_to_limit(kept: Path | None) -> list[str]:
    """Remove documents that were not used for longest, which can be read again, until the rest
    keeps to the limit; their names. Conversations stay: what was said is nowhere else.

    Args:
        kept: stays too.
    """
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


def _limit_path() -> Path:
    return library_folder() / "limit"


def _there_is() -> str:
    names = [each.name for each in entries()]
    if not names:
        return "it is empty; `kvlite read FILE` puts a document there"
    more = ", …" if len(names) > 9 else ""
    return f"there is {', '.join(names[:9])}{more}"
