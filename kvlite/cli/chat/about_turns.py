"""Commands that go back: undo, edit, answer again, branches."""

from collections.abc import Sequence
from functools import partial

from rich.table import Table
from rich.text import Text

from kvlite.cli.chat.terminal import Terminal, Work
from kvlite.conversation.history import BranchView
from kvlite.conversation.session import Message, Session
from kvlite.documents import Document
from kvlite.errors import SettingError, Stopped
from kvlite.printable import harmless


def undo(session: Session, terminal: Terminal, argument: str) -> None:
    """Forget the last message and its answer."""
    _, message = session.message(None)
    if _went_back(session, terminal, session.undo):
        terminal.say(f"Forgotten: {_short(message.text, terminal.width)}")
        _waiting(session, terminal)


def edit(session: Session, terminal: Terminal, argument: str) -> None:
    """Change a message, and answer it."""
    number, message = session.message(_number(argument))
    text = terminal.ask(message.text)
    if not text.strip() or text == message.text:
        terminal.say("Nothing was changed.")
        return
    terminal.answer(session.edit(number, text))


def regenerate(session: Session, terminal: Terminal, argument: str) -> None:
    """Answer the last message again."""
    session.message(None)
    if not session.talk.settings.temperature:
        terminal.say("With temperature 0 an answer comes out the same: /set temperature 0.7")
    terminal.answer(session.regenerate())


def branch(session: Session, terminal: Terminal, argument: str) -> None:
    """Go back to just after an answer; without a number, show which there are."""
    number = _number(argument)
    if number is None:
        session.message(None)
        terminal.show(_numbered(session.messages, terminal.width))
        return
    session.message(number)
    if not _went_back(session, terminal, partial(session.branch, number)):
        return
    terminal.say(f"You are after the answer to message {number}; /branches lists what you left.")
    terminal.show(_numbered(session.messages, terminal.width))
    _waiting(session, terminal)


def branches(session: Session, terminal: Terminal, argument: str) -> None:
    """List branches, or go to one."""
    number, known = _number(argument), list(session.talk.branches)
    if len(known) < 2:
        raise SettingError("there are no branches yet: /edit, /regen and /branch make them")
    if number is None:
        terminal.show(_branches(session, known, terminal.width))
        return
    if not 1 <= number <= len(known):
        raise SettingError(f"there is no branch {number}: give 1 to {len(known)}")
    if _went_back(session, terminal, partial(session.switch, number)):
        terminal.say(f"You are on branch {number}.")
        terminal.show(_numbered(session.messages, terminal.width))
        _waiting(session, terminal)


def _went_back(session: Session, terminal: Terminal, work: Work[None]) -> bool:
    """Go back under a bar; whether that was not stopped. If it was, says where things stand."""
    try:
        terminal.work("Going back", work)
    except Stopped:
        last = len(session.messages)
        where = f"after the answer to message {last}" if last else "at the beginning"
        terminal.say(
            f"Stopped: you are {where}, on a branch of its own; /branches lists the others."
        )
        return False
    return True


def _waiting(session: Session, terminal: Terminal) -> None:
    if session.waiting:
        terminal.say(f"Your next message is about {_names(session.waiting)}.")


def _number(argument: str) -> int | None:
    """The number given to a command, None if there is none.

    Raises:
        SettingError: it is something else.
    """
    if not argument:
        return None
    if not argument.isascii() or not argument.isdecimal() or len(argument) > 9:
        raise SettingError(f"{argument!r} is not a number: count from 1")
    return int(argument)


def _numbered(messages: Sequence[Message], width: int) -> Table:
    """A user's messages, a line each."""
    table = _lines()
    for number, message in enumerate(messages, 1):
        about = f"[{_names(message.documents)}] " if message.documents else ""
        table.add_row(Text(str(number)), Text(_short(about + message.text, width - 6)))
    return table


def _branches(session: Session, known: Sequence[BranchView], width: int) -> Table:
    """What was said last on each."""
    table = _lines()
    for number, each in enumerate(known, 1):
        here = "*" if each.current else " "
        users = session.typed(each.messages)
        last = users[-1].text if users else "(nothing said yet)"
        count = f"{len(users)} message{'' if len(users) == 1 else 's'}"
        shown = f"{count}, the last: {last}"
        table.add_row(Text(f"{here}{number}"), Text(_short(shown, width - 6)))
    return table


def _lines() -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    return table


def _names(documents: Sequence[Document]) -> str:
    return ", ".join(document.name for document in documents)


def _short(text: str, width: int) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(harmless(text).split())
    return line if len(line) <= width else line[: max(1, width - 1)] + "…"
