"""Commands about files: documents to read, conversations to save and load."""

import shlex
from pathlib import Path

from kvlite.cli.chat.terminal import Terminal
from kvlite.conversation import export as saving
from kvlite.conversation.session import Session
from kvlite.documents import Document, read_apart
from kvlite.engine.callbacks import NO_CALLBACKS
from kvlite.errors import SettingError
from kvlite.model.text_limit import text_limit


def read(session: Session, terminal: Terminal, argument: str) -> None:
    """Read documents for the next message."""

    runner = session.runner
    limit = text_limit(runner.tokenizer, runner.shape.max_context)

    def opened(path: str) -> Document:
        return terminal.work(
            f"Opening {Path(path).name}",
            lambda callbacks: read_apart(
                path, limit=limit, progress=callbacks.progress, cancel=callbacks.cancel
            ),
        )

    take(session, terminal, [opened(path) for path in _paths(argument)])


def take(session: Session, terminal: Terminal, documents: list[Document]) -> None:
    """Read documents, and say what became of them."""
    seen = session.talk.cache.seen
    read = terminal.work(
        "Reading",
        lambda callbacks: session.read(documents, callbacks),
    )
    names = ", ".join(document.name for document in documents)
    new = session.talk.cache.seen - seen
    if read:
        terminal.say(f"Read {names}: {new:,} tokens. Your next message is about it.")
    else:
        terminal.say(f"{names} will be read with your next message.")


def _paths(argument: str) -> list[str]:
    """File names: one with spaces as it is, or several, quoted where they have some.

    Raises:
        SettingError: there is none, or a quotation mark is not closed.
    """
    if argument and Path(argument).expanduser().is_file():
        return [str(Path(argument).expanduser())]
    try:
        paths = shlex.split(argument)
    except ValueError:
        raise SettingError(f"{argument}: a quotation mark is not closed") from None
    if not paths:
        raise SettingError("name a file: /read report.pdf")
    if "-" in paths:
        raise SettingError("standard input is what you type: name a file")
    return [str(Path(path).expanduser()) for path in paths]


def save(session: Session, terminal: Terminal, argument: str) -> None:
    """Save the conversation."""
    if not argument:
        raise SettingError("give it a name: /save trip, or /save trip.md to read it elsewhere")
    where, gone = terminal.work(
        "Saving", lambda callbacks: saving.save(session, argument, callbacks.progress)
    )
    terminal.say(f"Saved as {where}.")
    if gone:
        terminal.say(f"The library's limit was reached; it let go of {', '.join(gone)}.")


def load(session: Session, terminal: Terminal, argument: str) -> None:
    """Go on with a saved conversation."""
    if not argument:
        raise SettingError("which one: /load NAME")
    about = saving.found(argument)
    if about.light:
        terminal.work(
            "Reading",
            lambda callbacks: saving.load(session, about.path, None, callbacks),
        )
    else:
        with terminal.leaving_on_interrupt("Loading") as progress:
            saving.load(session, about.path, progress, NO_CALLBACKS)
    count = len(session.messages)
    terminal.say(f"{argument}: {count} message{'' if count == 1 else 's'}. It goes on.")
    if session.waiting:
        names = ", ".join(document.name for document in session.waiting)
        terminal.say(f"Your next message is about {names}.")
