"""Completion of commands when Tab is pressed."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

from kvlite.cli.chat.commands import COMMANDS, command_named
from kvlite.cli.chat.typed import command_in, option_named, shown_name
from kvlite.config.paths import SUFFIX
from kvlite.config.settings import OPTIONS
from kvlite.conversation.convert import open_library
from kvlite.errors import SettingError


class ChatCompleter(Completer):
    """Completes commands and what follows them."""

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterator[Completion]:
        """Completions of the text before the cursor, in order; none for a message."""
        typed = document.text_before_cursor
        if not typed.startswith("/") or "\n" in typed:
            return
        if " " not in typed:
            yield from _commands(typed.lower(), "/")
            return
        found = command_in(typed)
        if found is None:
            return
        with suppress(SettingError):  # no such command or setting
            after = _AFTER.get(command_named(found[0]).completes)
            if after is not None:
                yield from after(typed.partition(" ")[2].lstrip(" "))


def _completion(text: str, typed: str, about: str = "") -> Completion:
    return Completion(text, -len(typed), display_meta=about)


def _commands(typed: str, slash: str = "") -> Iterator[Completion]:
    for command in COMMANDS:
        if f"{slash}{command.name}".startswith(typed):
            yield _completion(f"{slash}{command.name}", typed, command.help)


def _files(rest: str) -> Iterator[Completion]:
    """Files whose names begin with all that is typed, else with its last word."""
    whole = list(_paths(rest))
    yield from whole or _paths(rest.rpartition(" ")[2])


def _saved(rest: str) -> Iterator[Completion]:
    for record in open_library().records():
        if record.title.startswith(rest):
            yield _completion(record.title, rest, "in the library")
    for found in _paths(rest):
        if found.text.endswith(os.sep) or Path(found.text).suffix in (".md", SUFFIX):
            yield found


def _paths(typed: str) -> Iterator[Completion]:
    folder, name = os.path.split(typed)
    try:
        entries = sorted(os.scandir(Path(folder or ".").expanduser()), key=lambda each: each.name)
    except (OSError, RuntimeError):  # no such folder, or no such user
        return
    for entry in entries:
        hidden = entry.name.startswith(".") and not name.startswith(".")
        if entry.name.startswith(name) and not hidden:
            is_folder = entry.is_dir()
            text = entry.name + (os.sep if is_folder else "")
            yield _completion(text, name, "folder" if is_folder else "")


def _settings(rest: str) -> Iterator[Completion]:
    typed, space, value = rest.partition(" ")
    if not space:
        for name, option in OPTIONS.items():
            if shown_name(name).startswith(typed):
                yield _completion(shown_name(name), typed, option.metadata["help"])
        return
    option = OPTIONS[option_named(typed)]
    choices = ("true", "false") if option.type is bool else option.metadata["choices"]
    for choice in choices:
        if choice.startswith(value):
            yield _completion(choice, value)


_AFTER: dict[str, Callable[[str], Iterator[Completion]]] = {
    "files": _files,
    "saved": _saved,
    "settings": _settings,
    "commands": _commands,
}
