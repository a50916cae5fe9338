"""The commands of a chat: what is typed after a slash."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvlite.cli.chat import about_answers, about_files, about_memory, about_settings, about_turns
from kvlite.cli.chat.terminal import Quit, Terminal
from kvlite.cli.chat.typed import command_in, unquoted
from kvlite.conversation.session import Session
from kvlite.errors import SettingError

_KEYS = (
    ("Enter", "sends; Alt-Enter begins another line"),
    ('"""', 'begins a message of several lines, and """ ends it'),
    ("Tab", "completes commands, settings, files"),
    ("Up, Ctrl-R", "earlier messages, also of other days"),
    ("Ctrl-G", "writes the message in your editor"),
    ("Ctrl-C", "ends an answer, whose part is kept; twice quits"),
    ("Ctrl-D", "quits"),
)


@dataclass(frozen=True)
class Command:
    """One of them.

    Attributes:
        name: what is typed, without the slash.
        takes: what follows it, as help shows it.
        help: what it does, in a line.
        run: does it, with what follows.
        completes: what the keyboard completes after it: files, saved, settings, commands, or
            nothing.
    """

    name: str
    takes: str
    help: str
    run: Callable[[Session, Terminal, str], None]
    completes: str = ""

    @property
    def usage(self) -> str:
        """As it is typed."""
        return f"/{self.name} {self.takes}".rstrip()


def _help(session: Session, terminal: Terminal, argument: str) -> None:
    if argument:
        command = command_named(argument.removeprefix("/"))
        terminal.say(f"{command.usage}: {command.help}")
        return
    rows = [(command.usage, command.help) for command in COMMANDS]
    terminal.show(_listed([*rows, ("", ""), *_KEYS], terminal.width))


def _listed(rows: list[tuple[str, str]], width: int) -> Table | Group:
    """Two columns; on a narrow terminal, one under the other."""
    widest = max(len(left) for left, _ in rows)
    if width < 2 * widest + 20:
        return Group(*(each for left, right in rows for each in _stacked(left, right)))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _stacked(left: str, right: str) -> list[RenderableType]:
    return [Text(left, "bold"), Padding(right, (0, 0, 0, 2))] if left else [Text()]


def _clear(session: Session, terminal: Terminal, argument: str) -> None:
    session.begin()
    terminal.clear()
    terminal.say("A new conversation. Settings are as you left them.")


def _exit(session: Session, terminal: Terminal, argument: str) -> None:
    raise Quit


COMMANDS = (
    Command("help", "[COMMAND]", "lists commands and keys", _help, "commands"),
    Command("read", "FILE...", "reads documents for your next message", about_files.read, "files"),
    Command("undo", "", "forgets your last message and its answer", about_turns.undo),
    Command("edit", "[N]", "changes message N, or the last, and answers it", about_turns.edit),
    Command("regen", "", "answers the last message again", about_turns.regenerate),
    Command(
        "check",
        "",
        "answers it once more from everything that was read, and says what differs",
        about_answers.check,
    ),
    Command(
        "branch",
        "[N]",
        "goes back to the answer to message N; what followed stays as a branch",
        about_turns.branch,
    ),
    Command("branches", "[N]", "lists branches, or goes to one", about_turns.branches),
    Command(
        "save", "NAME", "saves the conversation; NAME.md for reading", about_files.save, "saved"
    ),
    Command("load", "NAME", "goes on with a saved conversation", about_files.load, "saved"),
    Command(
        "system", "[TEXT]", "begins anew, the model being told TEXT first", about_settings.system
    ),
    Command(
        "set",
        "[NAME [VALUE]]",
        "changes a setting, or explains it",
        about_settings.change,
        "settings",
    ),
    Command("show", "", "shows settings that are not the usual ones", about_settings.show),
    Command("memory", "", "draws where every megabyte is", about_memory.memory),
    Command("plan", "", "shows what was planned before the model was loaded", about_memory.plan),
    Command("metrics", "", "says what the last answer was made from", about_memory.metrics),
    Command("clear", "", "begins a new conversation", _clear),
    Command("exit", "", "quits", _exit),
)

_ALSO = {"quit": "exit", "bye": "exit", "regenerate": "regen", "?": "help"}


def command_named(name: str) -> Command:
    """A command.

    Raises:
        SettingError: there is none, with the nearest that there is.
    """
    known = {command.name: command for command in COMMANDS}
    wanted = _ALSO.get(name, name)
    if wanted in known:
        return known[wanted]
    near = get_close_matches(wanted, known, 1) or [
        each for each in known if each.startswith(wanted)
    ]
    hint = f"did you mean /{near[0]}?" if near else "/help lists them"
    raise SettingError(
        f"there is no command /{name}: {hint} (a space before the slash makes it a message)"
    )


def enter(session: Session, terminal: Terminal, typed: str) -> None:
    """Do what was typed: a command, or a message to be answered; nothing if it is empty.

    Raises:
        Quit: the user leaves.
        Stopped: Ctrl-C, while something was read.
        KvliteError, OSError: it cannot be done; all is as it was.
    """
    found = command_in(typed)
    if found is not None:
        name, argument = found
        command = command_named(name)
        if argument and not command.takes:
            raise SettingError(f"/{command.name} takes nothing after it: leave out {argument!r}")
        command.run(session, terminal, argument)
        return
    message = unquoted(typed)
    if message.strip():
        terminal.answer(session.say(message))
