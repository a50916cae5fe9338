"""Conversations in files: Markdown to be read by people, snapshots to go on from."""

import os
from pathlib import Path
from typing import NoReturn

from kvlite.chat.session import Session
from kvlite.errors import SettingError

_MARKDOWN = (".md", ".markdown")


def save(session: Session, name: str) -> Path:
    """Write the conversation to a file.

    Args:
        name: a file's path; `.md` for Markdown.

    Raises:
        SettingError: there is nothing to save, no such kind of file, or it cannot be written.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() not in _MARKDOWN:
        _no_snapshots(name)
    if not session.talk.messages:
        raise SettingError("nothing has been said yet, so there is nothing to save")
    try:
        _replace(path, markdown(session))
    except OSError as error:
        raise SettingError(f"{path} cannot be written: {error.strerror}") from error
    return path


def load(session: Session, name: str) -> None:
    """Go on with a saved conversation.

    Raises:
        SettingError: there is none that can be gone on with.
    """
    if Path(name).suffix.lower() in _MARKDOWN:
        raise SettingError(f"{name} is text for people: what the model held is not in it")
    _no_snapshots(name)


def _no_snapshots(name: str) -> NoReturn:
    raise SettingError(
        f"{name!r}: snapshots of conversations are not there yet; /save NAME.md writes Markdown"
    )


def markdown(session: Session) -> str:
    """The conversation for people: who said what, and the documents by their names."""
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


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
