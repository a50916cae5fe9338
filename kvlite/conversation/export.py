"""`/save` and `/load`: conversations as Markdown for people, or as files to go on from."""

from pathlib import Path

from kvlite.config.atomic_file import replaced
from kvlite.config.paths import SUFFIX
from kvlite.conversation import library
from kvlite.conversation.file_info import About, about
from kvlite.conversation.session import Session
from kvlite.engine.callbacks import Callbacks, Progress
from kvlite.errors import SettingError

_MARKDOWN = (".md", ".markdown")
_FORCE = " --force"


def save(session: Session, name: str, progress: Progress | None) -> tuple[str, list[str]]:
    """Save the conversation.

    Args:
        name: a path ending in `.md` or `.kv`, or the name of a library entry. With --force after
            it, an existing one is replaced; without, only this conversation's own.
        progress: called with (bytes done, bytes in all).

    Returns:
        Where it is, and the library entries that were removed for it.

    Raises:
        SettingError, SnapshotError: there is nothing to save, or it cannot be written there.
    """
    if not session.talk.messages and not session.waiting:
        raise SettingError("nothing has been said yet, so there is nothing to save")
    name, force = name.removesuffix(_FORCE).rstrip(), name.endswith(_FORCE)
    path = Path(name).expanduser()
    kind = path.suffix.lower()
    target = path if kind in (SUFFIX, *_MARKDOWN) else library.path_of(name)
    if target.exists() and not force and target.resolve() not in session.places:
        raise SettingError(
            f"{name} is there already, and is not this conversation: give another name, or replace "
            f"it with /save {name}{_FORCE}"
        )
    where, gone = str(path), list[str]()
    if kind == SUFFIX:
        session.talk.save(path, progress=progress)
    elif kind in _MARKDOWN:
        _write(path, markdown(session))
    else:
        added = library.add(session.talk, name, progress)
        where, gone = f"{added.name}, in the library", added.removed
    session.places.add(target.resolve())
    return where, gone


def _write(path: Path, text: str) -> None:
    try:
        with replaced(path) as file:
            file.write(text.encode("utf-8", "replace"))  # a file's name may be no text
    except OSError as error:
        raise SettingError(f"{path} cannot be written: {error.strerror}") from error


def found(name: str) -> About:
    """The description of a saved conversation. Raises SettingError if there is none of this name,
    and SnapshotError if it is damaged, or of a newer format."""
    path = Path(name).expanduser()
    if path.suffix.lower() in _MARKDOWN:
        raise SettingError(f"{name} is text for people: what the model held is not in it")
    if path.suffix.lower() != SUFFIX:
        path = library.entry_path(name)
    return about(path)


def load(session: Session, path: Path, progress: Progress | None, reading: Callbacks) -> None:
    """Go on with a saved conversation. Args and errors are those of `Runner.open`; after an error
    the session is as before."""
    session.resume(session.runner.open(path, progress=progress, reading=reading))
    session.places.add(path.resolve())


def markdown(session: Session) -> str:
    """The conversation as Markdown, with its documents by name."""
    messages = iter(session.messages)
    parts = [f"# A conversation with {session.talk.settings.model}"]
    for each in session.talk.messages:
        if each["role"] == "user":
            message = next(messages)
            read = [f"*read {document.name}*" for document in message.documents]
            parts += ["## You", *read, message.text.strip()]
        else:
            parts += ["## Model", each["content"].strip()]
    return "\n\n".join(parts) + "\n"
