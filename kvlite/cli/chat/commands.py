"""The commands of a chat: what may be typed after a slash, and what it does."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvlite.cli.chat import typed, views
from kvlite.cli.screen import source_lines
from kvlite.config.settings import OPTIONS
from kvlite.config.units import readable
from kvlite.conversation.change_model import change_model
from kvlite.conversation.file_info import about
from kvlite.conversation.metrics import Piece, told
from kvlite.conversation.session import Session, saved_as
from kvlite.conversation.verify import difference
from kvlite.documents import Document, read_document
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks
from kvlite.errors import SettingError, Stopped

if TYPE_CHECKING:
    from kvlite.cli.chat.terminal import ChatTerminal

Run = Callable[[Session, "ChatTerminal", str], None]

_KEYS = (
    ("Enter", "sends; Alt-Enter begins another line"),
    ('"""', 'begins a message of several lines, and """ ends it'),
    ("Tab", "completes commands, settings, files"),
    ("Up, Ctrl-R", "earlier messages, also of other days"),
    ("Ctrl-G", "writes the message in your editor"),
    ("Ctrl-C", "ends an answer, whose part is kept; twice quits"),
    ("Ctrl-D", "quits"),
)
_ALSO = {"quit": "exit", "bye": "exit", "regenerate": "regen", "?": "help"}


class Quit(Exception):
    """The user leaves."""


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        name: what is typed, without the slash.
        takes: its arguments, as help shows them.
        help: what it does, in a line.
        run: does it, given the arguments.
        completes: what Tab completes after it: files, saved, settings, commands, or nothing.
    """

    name: str
    takes: str
    help: str
    run: Run
    completes: str = ""

    @property
    def usage(self) -> str:
        """As it is typed."""
        return f"/{self.name} {self.takes}".rstrip()


COMMANDS: list[Command] = []


def _command(name: str, takes: str, help: str, completes: str = "") -> Callable[[Run], Run]:
    """Make a function a command; help lists them in the order of this file."""

    def register(run: Run) -> Run:
        COMMANDS.append(Command(name, takes, help, run, completes))
        return run

    return register


def command_named(name: str) -> Command:
    """The command of this name, or of another name that it has. Raises SettingError if there is
    none; the message names the nearest."""
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


def enter(session: Session, terminal: "ChatTerminal", text: str) -> None:
    """Run the command that was typed, or answer the message; ignore an empty line. Raises Quit if
    the user leaves, Stopped by Ctrl-C while something is read, and KvliteError or OSError if it
    cannot be done, and nothing has changed."""
    found = typed.command_in(text)
    if found is not None:
        name, argument = found
        command = command_named(name)
        if argument and not command.takes:
            raise SettingError(f"/{command.name} takes nothing after it: leave out {argument!r}")
        command.run(session, terminal, argument)
        return
    message = typed.unquoted(text)
    if message.strip():
        terminal.answer(session.say(message))


@_command("help", "[COMMAND]", "lists commands and keys", "commands")
def _help(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    if argument:
        command = command_named(argument.removeprefix("/"))
        terminal.say(f"{command.usage}: {command.help}")
        return
    rows = [*((command.usage, command.help) for command in COMMANDS), ("", ""), *_KEYS]
    terminal.show(views.listed(rows, terminal.width))


@_command("read", "FILE...", "reads documents for your next message", "files")
def _read(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    runner, settings = session.runner, session.talk.settings

    def opened(path: str) -> Document:
        return terminal.work(
            f"Opening {Path(path).name}",
            lambda callbacks: read_document(
                path,
                limit=runner.text_limit,
                progress=callbacks.progress,
                cancel=callbacks.cancel,
                **settings.reading,
            ),
        )

    read_documents(session, terminal, [opened(path) for path in typed.files(argument)])


def read_documents(session: Session, terminal: "ChatTerminal", documents: list[Document]) -> None:
    """Read documents for the next message, and say what became of them."""
    seen = session.talk.cache.seen
    read = terminal.work("Reading", lambda callbacks: session.read(documents, callbacks))
    if read:
        new = session.talk.cache.seen - seen
        terminal.say(
            f"Read {views.names(documents)}: {new:,} tokens. Your next message is about it."
        )
    else:
        terminal.say(f"{views.names(documents)} will be read with your next message.")


@_command("undo", "", "forgets your last message and its answer")
def _undo(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    _, message = session.message(None)
    if _went_back(session, terminal, session.undo):
        terminal.say(f"Forgotten: {views.short(message.text, terminal.width)}")
        _say_waiting(session, terminal)


@_command("edit", "[N]", "changes message N, or the last, and answers it")
def _edit(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    number, message = session.message(typed.number(argument))
    text = terminal.ask(message.text)
    if not text.strip() or text == message.text:
        terminal.say("Nothing was changed.")
        return
    terminal.answer(session.edit(number, text))


@_command("regen", "", "answers the last message again")
def _regenerate(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    session.message(None)
    if not session.talk.settings.temperature:
        terminal.say("With temperature 0 an answer comes out the same: /set temperature 0.7")
    terminal.answer(session.regenerate())


@_command("thinking", "[on|off|auto]", "shows what led to the last answer, or switches reasoning")
def _thinking(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    if argument:
        _set(session, terminal, f"thinking {argument}")
        return
    session.message(None)
    thought = session.talk.messages[-1].get("reasoning_content")
    terminal.say(thought or "There was no reasoning before the last answer.")


@_command("continue", "", "goes on with an answer that was stopped, or came to a limit")
def _continue(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    terminal.answer(session.continue_answer())


@_command("check", "", "answers it once more from everything that was read, and says what differs")
def _check(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    begin, heard = session.check(), list[str]()
    former = session.talk.messages[-1]["content"]

    def listened(callbacks: Callbacks) -> Iterator[Piece]:
        for piece in begin(callbacks):
            heard.append(piece.text)
            yield piece

    metrics = terminal.answer(listened)
    if metrics.finish_reason in ("interrupted", "memory"):
        terminal.say("It was not finished, so it says nothing about the former answer.")
        return
    runs = difference(former, "".join(heard))
    if all(kind == "both" for kind, _ in runs):
        terminal.say("The same answer.")
    else:
        terminal.show(views.differences(runs))


@_command("branch", "[N]", "goes back to the answer to message N; what followed stays as a branch")
def _branch(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    number = typed.number(argument)
    session.message(number)
    if number is not None:
        if not _went_back(session, terminal, partial(session.branch, number)):
            return
        terminal.say(
            f"You are after the answer to message {number}; /branches lists what you left."
        )
    terminal.show(views.numbered(session.messages, terminal.width))
    if number is not None:
        _say_waiting(session, terminal)


@_command("branches", "[N]", "lists branches, or goes to one")
def _branches(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    number, known = typed.number(argument), list(session.talk.branches)
    if len(known) < 2:
        raise SettingError("there are no branches yet: /edit, /regen and /branch make them")
    if number is None:
        terminal.show(views.branch_list(session, known, terminal.width))
        return
    if not 1 <= number <= len(known):
        raise SettingError(f"there is no branch {number}: give 1 to {len(known)}")
    if _went_back(session, terminal, partial(session.switch, number)):
        terminal.say(f"You are on branch {number}.")
        terminal.show(views.numbered(session.messages, terminal.width))
        _say_waiting(session, terminal)


def _went_back(
    session: Session, terminal: "ChatTerminal", work: Callable[[Callbacks], None]
) -> bool:
    """Go back under a progress bar; False if Ctrl-C stopped it half-way, which is said."""
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


def _say_waiting(session: Session, terminal: "ChatTerminal") -> None:
    if session.waiting:
        terminal.say(f"Your next message is about {views.names(session.waiting)}.")


@_command("save", "NAME", "saves the conversation; NAME.md for reading", "saved")
def _save(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    if not argument:
        raise SettingError("give it a name: /save trip, or /save trip.md to read it elsewhere")
    where, gone = terminal.work(
        "Saving", lambda callbacks: session.save(argument, callbacks.progress)
    )
    terminal.say(f"Saved as {where}.")
    if gone:
        terminal.say(f"Removed {', '.join(gone)} from the library, to keep to its limit.")


@_command("load", "NAME", "goes on with a saved conversation", "saved")
def _load(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    if not argument:
        raise SettingError("which one: /load NAME")
    path, entry = saved_as(argument)
    if about(path).light:
        why = terminal.work("Reading", lambda callbacks: session.load(path, entry, None, callbacks))
    else:
        with terminal.leaving_on_interrupt("Loading") as progress:
            why = session.load(path, entry, progress, NO_CALLBACKS)
    terminal.say(f"{argument}: {views.loaded(session.messages, entry)}. It goes on.")
    if why:
        terminal.say(f"{why}. What is said here is kept with /save under another name.")
    _say_waiting(session, terminal)


@_command("system", "[TEXT]", "begins anew, the model being told TEXT first")
def _system(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    if not argument:
        told_first = session.talk.settings.system
        terminal.say(
            f"The model is told: {told_first}" if told_first else "The model is told nothing first."
        )
        return
    waiting = session.waiting
    session.begin(system=typed.value_typed("system", argument))
    terminal.say("A new conversation, with another system message.")
    if waiting:
        read_documents(session, terminal, waiting)


@_command("set", "[NAME [VALUE]]", "changes a setting, or explains it", "settings")
def _set(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    named, _, text = argument.replace("=", " ", 1).partition(" ")
    if not named:
        terminal.show(
            views.grid([(typed.shown_name(name), _now(session, name)) for name in OPTIONS])
        )
        return
    name, text = typed.option_named(named), text.strip()
    if not text:
        terminal.say(f"{typed.shown_name(name)} is {_now(session, name)}: {typed.explained(name)}")
    elif name == "system":
        _system(session, terminal, text)
    else:
        session.change(**{name: typed.value_typed(name, text)})
        terminal.say(f"{typed.shown_name(name)} is {_now(session, name)} now.")


def _now(session: Session, name: str) -> str:
    return typed.written(getattr(session.talk.settings, name))


@_command("show", "", "shows settings that are not the usual ones")
def _show(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    if rows := views.unusual(session):
        terminal.show(views.grid(rows))
    else:
        terminal.say("All settings are the usual ones; /set lists them.")


@_command("memory", "", "says where every megabyte is")
def _memory(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    for place in views.memory_now(session):
        terminal.show(views.memory(place))
    if session.last is not None:
        terminal.say(f"The last answer's peak: {readable(session.last.peak_bytes)}.")


@_command("plan", "", "shows what was planned before the model was loaded")
def _plan(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    if session.runner.plan is None:
        raise SettingError("no plan could be made of this model")
    terminal.show(views.plan_view(session.runner.plan, terminal.width))


@_command("metrics", "", "says what the last answer was made from")
def _metrics(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    if session.last is None:
        raise SettingError("nothing has been answered yet")
    for sentence in told(session.last):
        terminal.say(sentence)


@_command("sources", "", "quotes the passages that the last answer came from")
def _sources(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    if session.last is None:
        raise SettingError("nothing has been answered yet")
    if not session.sources:
        raise SettingError(
            "no passages are known for the last answer: ask about a document that was read with "
            "/read in this conversation"
        )
    for line in source_lines(session.sources, whole=True):
        terminal.say(line)


@_command("model", "[NAME]", "has another model go on, which reads again what was said", "files")
def _model(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    if not argument:
        terminal.say(f"{session.given.model} answers; /model NAME has another one go on.")
        return
    terminal.work(f"Loading {argument}", partial(change_model, session, argument))
    terminal.say(views.model_line(session))


@_command("clear", "", "begins a new conversation")
def _clear(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    session.begin()
    terminal.clear()
    terminal.say("A new conversation. Settings are as you left them.")


@_command("exit", "", "quits")
def _exit(session: Session, terminal: "ChatTerminal", argument: str) -> None:
    raise Quit
