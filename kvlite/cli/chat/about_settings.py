"""Commands about settings: change one, show them, tell the model something first."""

from rich.table import Table
from rich.text import Text

from kvlite.cli.chat.options import option_named, shown_name, value_typed, written
from kvlite.cli.chat.terminal import Terminal
from kvlite.config.settings import OPTIONS
from kvlite.conversation.session import Session


def change(session: Session, terminal: Terminal, argument: str) -> None:
    """Change a setting; without a value, explain it; without a name, list them all."""
    typed, _, text = argument.replace("=", " ", 1).partition(" ")
    if not typed:
        terminal.show(_table([(name, _now(session, name)) for name in OPTIONS]))
        return
    name, text = option_named(typed), text.strip()
    if not text:
        terminal.say(f"{shown_name(name)} is {_now(session, name)}: {_about(name)}")
        return
    if name == "system":
        system(session, terminal, text)
        return
    session.change(**{name: value_typed(name, text)})
    terminal.say(f"{shown_name(name)} is {_now(session, name)} now.")


def show(session: Session, terminal: Terminal, argument: str) -> None:
    """Show settings that differ from the usual ones."""
    rows = []
    for name, option in OPTIONS.items():
        now = getattr(session.talk.settings, name)
        if now == option.default:
            continue
        planned = name not in session.changed and _decided(session, name) == now
        reason = "decided by the plan" if planned else f"usually {written(option.default)}"
        rows.append((name, f"{written(now)}  ({reason})"))
    if rows:
        terminal.show(_table(rows))
    else:
        terminal.say("All settings are the usual ones; /set lists them.")


def system(session: Session, terminal: Terminal, argument: str) -> None:
    """Begin a new conversation, in which the model is told something first."""
    if not argument:
        told = session.talk.settings.system
        terminal.say(f"The model is told: {told}" if told else "The model is told nothing first.")
        return
    session.begin(system=value_typed("system", argument))
    terminal.say("A new conversation, with another system message.")


def _decided(session: Session, name: str) -> object:
    """What the plan made of a setting that was left open; None if it left it as it was given."""
    planned = getattr(session.runner.settings, name)
    return None if planned == getattr(session.given, name) else planned


def _now(session: Session, name: str) -> str:
    return written(getattr(session.talk.settings, name))


def _about(name: str) -> str:
    about = OPTIONS[name].metadata
    choices, low, high = about["choices"], about["low"], about["high"]
    said: str = about["help"]
    if choices:
        said += f" ({'|'.join(choices)})"
    if low is not None:
        said += f" (from {low:g} on)" if high is None else f" ({low:g} to {high:g})"
    return said


def _table(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(Text(shown_name(name)), Text(value))
    return table
