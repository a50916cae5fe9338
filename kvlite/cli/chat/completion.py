"""What may follow what is typed, when Tab is pressed."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvlite.cli.chat.commands import COMMANDS, command_named
from kvlite.cli.chat.options import option_named, shown_name
from kvlite.cli.chat.typed import command_in
from kvlite.config.paths import SUFFIX
from kvlite.config.settings import OPTIONS
from kvlite.conversation.library import library_folder
from kvlite.errors import SettingError


@dataclass(frozen=True)
class Completion:
    """One of several ways to go on.

    Attributes:
        text: what takes the place of what is typed.
        replaces: how many characters of it, from the end.
        about: what it is, in a few words.
    """

    text: str
    replaces: int
    about: str = ""


def completions(typed: str) -> Iterator[Completion]:
    """Ways to go on, in order; none for a message."""
    if not typed.startswith("/") or "\n" in typed:
        return
    if " " not in typed:
        for command in COMMANDS:
            if command.name.startswith(typed[1:].lower()):
                yield Completion(f"/{command.name}", len(typed), command.help)
        return
    found = command_in(typed)
    if found is None:
        return
    try:
        kind = command_named(found[0]).completes
    except SettingError:
        return
    rest = typed.partition(" ")[2].lstrip(" ")
    if kind in _AFTER:
        yield from _AFTER[kind](rest)


def _files(rest: str) -> Iterator[Completion]:
    """Of all that is typed, in case a name has spaces; else of its last word."""
    whole = list(_paths(rest))
    yield from whole or _paths(rest.rpartition(" ")[2])


def _saved(rest: str) -> Iterator[Completion]:
    """Entries of the library, files that conversations are kept in, folders."""
    for path in sorted(library_folder().glob(f"*{SUFFIX}")):
        if path.stem.startswith(rest):
            yield Completion(path.stem, len(rest), "in the library")
    for found in _paths(rest):
        if found.text.endswith(os.sep) or Path(found.text).suffix in (".md", SUFFIX):
            yield found


def _paths(typed: str) -> Iterator[Completion]:
    folder, name = os.path.split(typed)
    try:
        entries = sorted(os.scandir(Path(folder or ".").expanduser()), key=lambda each: each.name)
    except (OSError, RuntimeError):  # none, or no such user
        return
    for entry in entries:
        hidden = entry.name.startswith(".") and not name.startswith(".")
        if entry.name.startswith(name) and not hidden:
            is_folder = entry.is_dir()
            text = entry.name + (os.sep if is_folder else "")
            yield Completion(text, len(name), "folder" if is_folder else "")


def _settings(rest: str) -> Iterator[Completion]:
    """A setting's name, then what it may be."""
    typed, space, value = rest.partition(" ")
    if not space:
        for name, option in OPTIONS.items():
            if shown_name(name).startswith(typed):
                yield Completion(shown_name(name), len(typed), option.metadata["help"])
        return
    try:
        option = OPTIONS[option_named(typed)]
    except SettingError:
        return
    choices = ("true", "false") if option.type is bool else option.metadata["choices"]
    for choice in choices:
        if choice.startswith(value):
            yield Completion(choice, len(value))


def _commands(rest: str) -> Iterator[Completion]:
    for command in COMMANDS:
        if command.name.startswith(rest):
            yield Completion(command.name, len(rest), command.help)


_AFTER = {"files": _files, "saved": _saved, "settings": _settings, "commands": _commands}
