"""`kvlite chat`: a conversation at a terminal, or line by line."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvlite import __version__
from kvlite.cli import BAD_INPUT, INTERRUPTED
from kvlite.cli.chat.typed import command_in, number
from kvlite.cli.console import output
from kvlite.cli.first_start import with_first_model
from kvlite.cli.opening import FromLibrary, documents_to_send, open_files, require_files
from kvlite.cli.options import AsJson, Quiet, with_resolved
from kvlite.cli.screen import (
    at_terminal,
    console,
    guarded,
    line_typed,
    lines_said,
    print_answer,
    reading,
    unechoed,
)
from kvlite.cli.server_chat import Server, answer_lines, talk_with
from kvlite.config.resolve import Resolved
from kvlite.documents import Document
from kvlite.engine.callbacks import NO_CALLBACKS
from kvlite.errors import KvliteError, SettingError, Stopped, sentence
from kvlite.web.server_talk import Begin, ServerTalk

if TYPE_CHECKING:
    from kvlite.conversation.session import Session

_HINT = (
    "Say something, one message a line. /undo forgets the last one, /edit [N] changes one and "
    "answers it. Ctrl-D quits."
)
_USAGE = 'say something: echo "What is a cache?" | kvlite chat'


@with_resolved
def chat(
    resolved: Resolved,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE]...",
            help="documents to talk about; or a .kv file, to go on with it",
        ),
    ] = None,
    library: FromLibrary = True,
    server: Server = "",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Talk with a model, about documents or anything else.

    /help lists the commands: read files, undo, edit, answer again, save, change settings, see
    where memory is. Ctrl-C ends an answer where it stands, and its part is kept; Ctrl-D quits.

    Without a terminal, every line of standard input is a message, and only answers go to standard
    output. With --server, /undo, /edit and /thinking are the commands at a terminal.

    Examples:

      kvlite chat

      kvlite chat report.pdf --budget 25%

      kvlite chat trip.kv

      kvlite chat --server http://127.0.0.1:8000

      echo "What is a cache?" | kvlite chat --json
    """
    if "-" in (files or ()):
        raise SettingError(f"standard input is the conversation, no document: {_USAGE}")
    if server:
        _served(server, files or (), resolved, console(quiet), as_json=as_json)
        return
    typed = at_terminal()
    require_files(files or (), resolved.settings)
    resolved = with_first_model(resolved, console(quiet), files or ())
    settings = resolved.settings
    # The screen shows everything but answers.
    screen = output() if typed and sys.stdout.isatty() else console(quiet)
    with unechoed():
        runner, talk, documents = open_files(files or (), settings, "", screen, library=library)
    from kvlite.conversation.session import Session

    session = Session(runner, settings)
    if talk is not None:
        session.resume(talk)
        documents = []
    del runner, talk  # /model frees them
    if typed:
        _typed(session, screen, documents, resolved, as_json=as_json, quiet=quiet)
    else:
        _piped(session, screen, documents, resolved, as_json=as_json)


def _served(
    url: str, files: Sequence[str], resolved: Resolved, screen: Console, *, as_json: bool
) -> None:
    documents = documents_to_send(files, screen, resolved.settings)
    talk, lines = talk_with(url, resolved, documents), lines_said(screen, _HINT)
    typed = partial(_entered, talk, screen) if at_terminal() else None
    said = answer_lines(talk, lines, resolved, screen, as_json=as_json, typed=typed)
    if not said and typed is None:
        raise SettingError(f"standard input has no message: {_USAGE}")


def _entered(talk: ServerTalk, screen: Console, line: str) -> Begin | None:
    """The answer to what was typed, or None if nothing is to be answered. Raises SettingError if
    there is no such command or message."""
    name, argument = command_in(line) or ("", "")
    if not name:
        return talk.say(line.strip())
    if name == "undo" and not argument:
        _, message = talk.message(None)
        talk.undo(NO_CALLBACKS)
        screen.print(f"Forgotten: {message.text}", style="dim")
        return None
    if name == "thinking" and not argument:
        talk.message(None)
        thought = talk.said.turns[-1].reasoning
        screen.print(thought or "There was no reasoning before the last answer.", style="dim")
        return None
    if name != "edit":
        raise SettingError(
            f"there is no command {line.strip()} with --server: /undo, /edit [N] and /thinking are "
            "there (a space before the slash makes it a message)"
        )
    at, message = talk.message(number(argument))
    text = (line_typed(message.text) or "").strip()
    if text in ("", message.text):
        screen.print("Nothing was changed.", style="dim")
        return None
    return talk.edit(at, text)


def _typed(
    session: "Session",
    screen: Console,
    documents: list[Document],
    resolved: Resolved,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    from kvlite.cli.chat.commands import Quit, enter, read_documents
    from kvlite.cli.chat.prompt import prompt_on
    from kvlite.cli.chat.terminal import ChatTerminal
    from kvlite.cli.chat.views import model_line, status_line

    status = partial(status_line, session)
    prompt = prompt_on(screen, status)
    terminal = ChatTerminal(screen, prompt, status, as_json=as_json, quiet=quiet)

    def tried(work: Callable[..., None], *args: object) -> None:
        try:
            work(session, terminal, *args)
        except Stopped:
            waits = session.talk.history.half_read is not None
            kept = "the same again goes on from here." if waits else "nothing of it was read."
            terminal.say(f"Stopped while reading: {kept}")
        except (KvliteError, OSError) as error:
            terminal.warn(sentence(resolved.noted(error)))

    if not quiet:
        terminal.say(f"kvlite {__version__} · {model_line(session)}")
    hint = "Say something; /help lists commands"
    with guarded(), suppress(EOFError, Quit):
        if documents:
            tried(read_documents, documents)
        while True:
            typed = terminal.read(hint)
            hint = ""
            tried(enter, typed)


def _piped(
    session: "Session",
    screen: Console,
    documents: list[Document],
    resolved: Resolved,
    *,
    as_json: bool,
) -> None:
    session.change(checkpoint_limit="0MB")  # there is no undo here
    said = failed = False
    try:
        if documents:
            with reading(screen) as (_, callbacks):
                session.read(documents, callbacks)
        for line in filter(str.strip, sys.stdin or ()):
            said = True
            try:
                begin = session.say(line.strip())
                metrics = print_answer(begin, screen, as_json, account=screen.is_terminal)
            except Stopped:
                raise
            except KvliteError as error:
                screen.print(f"kvlite: {sentence(resolved.noted(error))}")
                failed = True
                continue
            if metrics.finish_reason == "interrupted":
                raise typer.Exit(INTERRUPTED)
            failed |= bool(metrics.failure)
    except Stopped:
        screen.print("Stopped while reading; nothing was answered.")
        raise typer.Exit(INTERRUPTED) from None
    if not said:
        raise SettingError(f"standard input has no message: {_USAGE}")
    if failed:
        raise typer.Exit(BAD_INPUT)
