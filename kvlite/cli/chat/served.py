"""A chat that a server answers: messages, and the commands that go back in it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from kvlite.cli import BAD_INPUT, INTERRUPTED
from kvlite.cli.chat.typed import command_in, number
from kvlite.cli.opening import documents_to_send
from kvlite.cli.screen import at_terminal, line_typed, lines_said
from kvlite.cli.server_chat import print_served, talk_with
from kvlite.config.resolve import Resolved
from kvlite.engine.callbacks import NO_CALLBACKS
from kvlite.errors import KvliteError, SettingError, sentence
from kvlite.web.server_talk import Begin, ServerTalk

if TYPE_CHECKING:
    from rich.console import Console

_HINT = (
    "Say something, one message a line. /undo forgets the last one, /edit [N] changes one and "
    "answers it. Ctrl-D quits."
)


def served(
    url: str, files: Sequence[str], resolved: Resolved, screen: "Console", *, as_json: bool
) -> bool:
    """Let a server answer every line; documents go with the first. Whether anything was said.

    Raises:
        typer.Exit: an answer was interrupted that nobody typed for, or something was refused.
        SettingError: nothing that has models answers there.
    """
    documents = documents_to_send(files, screen, ocr=resolved.settings.ocr)
    talk, typed = talk_with(url, resolved, documents), at_terminal()
    said = failed = False
    for line in lines_said(screen, _HINT):
        said = True
        try:
            begin = _entered(talk, line, screen) if typed else talk.say(line.strip())
            if begin is None:
                continue
            answer = print_served(begin, screen, as_json=as_json)
        except KvliteError as error:
            screen.print(f"kvlite: {sentence(resolved.noted(error))}")
            failed = not typed
            continue
        if answer.finish_reason == "interrupted" and not typed:
            raise typer.Exit(INTERRUPTED)
    if failed:
        raise typer.Exit(BAD_INPUT)
    return said


def _entered(talk: ServerTalk, line: str, screen: "Console") -> Begin | None:
    """The answer to what was typed, or None if nothing is to be answered.

    Raises:
        SettingError: there is no such command or message.
    """
    name, argument = command_in(line) or ("", "")
    if not name:
        return talk.say(line.strip())
    if name == "undo" and not argument:
        _, message = talk.message(None)
        talk.undo(NO_CALLBACKS)
        screen.print(f"Forgotten: {message.text}", style="dim")
        return None
    if name != "edit":
        raise SettingError(
            f"there is no command {line.strip()} with --server: /undo and /edit [N] are there (a "
            "space before the slash makes it a message)"
        )
    at, message = talk.message(number(argument))
    text = (line_typed(message.text) or "").strip()
    if text in ("", message.text):
        screen.print("Nothing was changed.", style="dim")
        return None
    return talk.edit(at, text)
