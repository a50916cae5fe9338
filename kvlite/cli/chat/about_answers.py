"""Commands about answers: is this what the whole text says?"""

from collections.abc import Iterator

from rich.style import Style
from rich.text import Text

from kvlite.cli.chat.terminal import Terminal
from kvlite.conversation.metrics import Piece
from kvlite.conversation.session import Session
from kvlite.conversation.verify import Run, difference
from kvlite.engine.callbacks import Callbacks
from kvlite.printable import harmless

# Marks tell them apart where colours do not; the colours are a pair that nobody confuses.
_MARKED = {
    "one": ("[-", "-]", Style(color="yellow", strike=True)),
    "other": ("{+", "+}", Style(color="blue", bold=True)),
}
# Words around what differs.
_BESIDE = 3


def check(session: Session, terminal: Terminal, argument: str) -> None:
    """Answer the last message from everything, and say how the former answer differs."""
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
        terminal.show(_shown(runs))


def _shown(runs: list[Run]) -> Text:
    """What differs, in one line, with a few words around it."""
    line = Text("The former answer [-said-], this one {+says+}: ")
    for at, (kind, text) in enumerate(runs):
        words = harmless(text).split()
        if kind == "both":
            line.append(_around(words, first=at == 0, last=at == len(runs) - 1))
        else:
            before, behind, style = _MARKED[kind]
            line.append(f"{before}{' '.join(words)}{behind}", style)
        line.append(" ")
    line.rstrip()
    return line


def _around(words: list[str], *, first: bool, last: bool) -> str:
    """The words next to what differs."""
    end = [] if last else words[-_BESIDE:]
    start = [] if first else words[:_BESIDE]
    if len(start) + len(end) >= len(words):
        return " ".join(words)
    return " ".join([*start, "\u2026", *end])
