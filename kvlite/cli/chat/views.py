"""What a chat draws: the status line, where memory is, a plan, messages, differences."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from kvlite.config.units import readable
from kvlite.conversation.message import Message
from kvlite.documents import Document
from kvlite.planner.usage import FREE, Place, holding, places
from kvlite.printable import harmless

if TYPE_CHECKING:
    from kvlite.conversation.history import BranchView
    from kvlite.conversation.session import Session
    from kvlite.conversation.verify import Run
    from kvlite.planner.plan import Plan

# The marks of a bar's parts, and of what is free; those of terminals that have ASCII only.
_MARKS, _EMPTY = "█▓▒▞▚▤▥", "░"
_ASCII_MARKS, _ASCII_EMPTY = "#=+*%@o", "."
_COLORS = ("blue", "green", "cyan", "magenta", "yellow", "red", "bright_blue", "bright_black")
# Columns of the status line's bar; and those below which tables leave columns out.
_BAR, _ROOMY = 10, 70
# Seconds between two looks at memory.
_FRESH = 1.0
# How differences are marked: not by color alone, and in colors that nobody confuses.
_DIFFERENT = {
    "one": ("[-", "-]", Style(color="yellow", strike=True)),
    "other": ("{+", "+}", Style(color="blue", bold=True)),
}
# Words shown on either side of a difference.
_BESIDE = 3


def marks(ascii_only: bool) -> str:
    """The characters of a bar's parts, in order."""
    return _ASCII_MARKS if ascii_only else _MARKS


def bar(shares: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """Shares of a whole (0 to 1) side by side, in `width` characters; the rest is shown as free.

    A share above 0 gets at least one character, as long as there are any.
    """
    shown, kinds, done = "", marks(ascii_only), 0.0
    for number, share in enumerate(shares):
        done += share
        cells = max(int(share > 0), round(done * width) - len(shown))
        shown += kinds[number % len(kinds)] * min(cells, width - len(shown))
    empty = _ASCII_EMPTY if ascii_only else _EMPTY
    return shown + empty * (width - len(shown))


class Gauge:
    """A session's status line; memory is looked up once a second at most."""

    def __init__(
        self,
        session: "Session",
        clock: Callable[[], float] = time.monotonic,
        *,
        ascii_only: bool = False,
    ) -> None:
        self.session = session
        self.clock = clock
        self.ascii_only = ascii_only
        self._due = float("-inf")

    def line(self, width: int) -> str:
        """As much as fits into `width` columns, the most important first."""
        if self.clock() >= self._due:
            self._place = memory_now(self.session)[0]
            self._due = self.clock() + _FRESH
        cache, last = self.session.talk.cache, self.session.last
        parts = [
            f"context {cache.seen:,}/{self.session.runner.shape.max_context:,}",
            f"KV {readable(cache.nbytes)}",
        ]
        if last is not None and last.decode_tokens_per_s:
            parts.append(f"{last.decode_tokens_per_s:.1f} tokens/s")
        return status_line(parts, self._place, width, ascii_only=self.ascii_only)


def status_line(
    parts: Sequence[str], memory: Place, width: int, *, ascii_only: bool = False
) -> str:
    """As many parts as fit into `width` columns, then how much memory is used."""
    share = memory.used / memory.total if memory.total else 0.0
    drawn = bar([share], _BAR, ascii_only=ascii_only)
    used = f"{memory.short} {drawn} {readable(memory.used)} of {readable(memory.total)}"
    separator = " | " if ascii_only else " · "
    whole = separator.join([*parts, used])
    if len(whole) <= width:
        return whole
    shown = parts[0][:width]
    for part in (*parts[1:], f"{memory.short} {share:.0%}"):
        if len(shown) + len(separator) + len(part) > width:
            break
        shown += separator + part
    return shown


def memory_now(session: "Session") -> list[Place]:
    """Where every byte is, the device first."""
    talk = session.talk
    held = holding(talk.model, talk.cache, talk.store, talk.checkpoint_bytes)
    model = talk.model
    return places(model.device, held, session.runner.settings.vram, model.cards)


class MemoryView:
    """A bar and a table for each place."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = places

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, place in enumerate(self.places):
            if number:
                yield Text()
            used = f"{readable(place.used)} of {readable(place.total)} used"
            yield Text(f"{place.name}: {used}", style="bold")
            yield _memory_bar(place, options.max_width, options.ascii_only)
            yield _memory_table(place, options.max_width >= _ROOMY, options.ascii_only)


def _memory_bar(place: Place, width: int, ascii_only: bool) -> Text:
    shares = [part.nbytes / place.total for part in place.parts[:-1]]
    text, kinds = Text(no_wrap=True), marks(ascii_only)
    for mark in bar(shares, min(width, 72), ascii_only=ascii_only):
        number = kinds.find(mark)
        text.append(mark, _COLORS[number] if number >= 0 else "bright_black")
    return text


def _memory_table(place: Place, roomy: bool, ascii_only: bool) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "left", "right", *(["left"] if roomy else [])):
        table.add_column(justify=justify, no_wrap=justify == "right")  # type: ignore[arg-type]
    kinds = marks(ascii_only)
    for number, part in enumerate(place.parts):
        free = part.name == FREE
        mark = Text(" ") if free else Text(kinds[number % len(kinds)], _COLORS[number % 8])
        about = [Text(part.about, style="dim")] if roomy else []
        table.add_row(mark, part.name, readable(part.nbytes), *about)
    return table


class PlanView:
    """A plan phase by phase, whether it fits, and the reasons for its settings."""

    def __init__(self, plan: "Plan") -> None:
        self.plan = plan

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        made, room = self.plan, self.plan.room
        what = f"{made.model}, {made.choice.weights.name}: read {made.tokens:,} tokens"
        yield Text(f"{what}, answer {made.longest:,}, on {room.name}")
        yield _all_phases(made) if options.max_width >= _ROOMY else _highest_phase(made)
        verdict = "fits" if made.fits else "does not fit"
        offered = readable(room.tensors)
        beside = f"margin {readable(room.margin)}"
        if room.context:
            beside = f"CUDA context and allocator {readable(room.context)}, {beside}"
        if made.cards:
            yield _by_card(made)
        yield Text(f"Peak {readable(made.peak_bytes)} of tensors, {offered} offered: {verdict}.")
        yield Text(f"Besides tensors: {beside}.")
        if made.forecast.host_bytes:
            host = readable(made.forecast.host_bytes)
            yield Text(f"Host memory for recall: {host}, {readable(room.host)} free.")
        if made.tokens_per_s is not None:
            yield Text(f"Answering: {made.tokens_per_s:,.0f} tokens/s at most, by its bandwidth.")
        for reason in made.changes or made.reasons * (not made.fits):
            yield Text(f"- {reason}")
        if not made.fits:
            yield Text("- what would: a smaller model, a shorter text, or more memory")


def _all_phases(made: "Plan") -> Table:
    phases = made.phases.values()
    table = Table("", *[f"to {name}" for name in made.phases])
    for name in dict.fromkeys(name for items in phases for name in items if items[name]):
        table.add_row(name, *[readable(items[name]) if items.get(name) else "" for items in phases])
    table.add_section()
    table.add_row("tensors", *[readable(sum(items.values())) for items in phases])
    return table


def _by_card(made: "Plan") -> Table:
    table = Table("card", "layers", "weights", "cache", "work", "free")
    begin = 0
    for card in made.cards:
        layers = f"{begin}-{begin + card.layers - 1}" if card.layers else "none"
        free = readable(card.free) if card.free >= 0 else f"{readable(-card.free)} too few"
        sizes = map(readable, (card.weights, card.kv, card.work))
        table.add_row(card.name, layers, *sizes, free)
        begin += card.layers
    return table


def _highest_phase(made: "Plan") -> Table:
    phase, items = max(made.phases.items(), key=lambda each: sum(each[1].values()))
    table = Table("", f"to {phase}")
    for name, size in items.items():
        if size:
            table.add_row(name, readable(size))
    table.add_section()
    table.add_row("tensors", readable(sum(items.values())))
    return table


def grid(rows: Sequence[tuple[str, str]]) -> Table:
    """Two columns, the first in bold."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def listed(rows: Sequence[tuple[str, str]], width: int) -> RenderableType:
    """The same; on a narrow terminal, the second column under the first."""
    if width >= 2 * max(len(left) for left, _ in rows) + 20:
        return grid(rows)
    stacked: list[RenderableType] = []
    for left, right in rows:
        stacked += [Text(left, "bold"), Padding(right, (0, 0, 0, 2))] if left else [Text()]
    return Group(*stacked)


def numbered(messages: Sequence[Message], width: int) -> Table:
    """A user's messages, a line each."""
    abouts = [f"[{names(each.documents)}] " if each.documents else "" for each in messages]
    lines = [about + each.text for about, each in zip(abouts, messages, strict=True)]
    return _lines(enumerate(lines, 1), width)


def branch_list(session: "Session", known: "Sequence[BranchView]", width: int) -> Table:
    """The last message of each branch; the current branch has an asterisk."""
    rows = []
    for number, each in enumerate(known, 1):
        users = session.typed(each.messages)
        last = users[-1].text if users else "(nothing said yet)"
        here = "*" if each.current else " "
        rows.append((f"{here}{number}", f"{counted(users)}, the last: {last}"))
    return _lines(rows, width)


def _lines(rows: Iterable[tuple[int | str, str]], width: int) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for number, text in rows:
        table.add_row(str(number), short(text, width - 6))
    return table


def counted(messages: Sequence[Message]) -> str:
    """How many messages, in words."""
    return f"{len(messages)} message{'' if len(messages) == 1 else 's'}"


def names(documents: Sequence[Document]) -> str:
    """The documents' names."""
    return ", ".join(document.name for document in documents)


def short(text: str, width: int) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(harmless(text).split())
    return line if len(line) <= width else line[: max(1, width - 1)] + "…"


def differences(runs: "Sequence[Run]") -> Text:
    """What differs between two answers, in one line, with a few words on either side."""
    line = Text("The former answer [-said-], this one {+says+}: ")
    for at, (kind, text) in enumerate(runs):
        words = harmless(text).split()
        if kind == "both":
            line.append(_around(words, first=at == 0, last=at == len(runs) - 1))
        else:
            before, behind, style = _DIFFERENT[kind]
            line.append(f"{before}{' '.join(words)}{behind}", style)
        line.append(" ")
    line.rstrip()
    return line


def _around(words: Sequence[str], *, first: bool, last: bool) -> str:
    end = [] if last else words[-_BESIDE:]
    start = [] if first else words[:_BESIDE]
    if len(start) + len(end) >= len(words):
        return " ".join(words)
    return " ".join([*start, "\u2026", *end])
