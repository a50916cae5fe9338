"""What a chat shows: the status line, what takes memory, a plan, messages, differences."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from kvlite.cli.chat.typed import shown_name, written
from kvlite.config.settings import OPTIONS
from kvlite.config.units import readable
from kvlite.conversation.message import Message
from kvlite.documents import Document
from kvlite.planner.usage import Place, holding, places
from kvlite.printable import harmless

if TYPE_CHECKING:
    from kvlite.conversation.branch import BranchView
    from kvlite.conversation.entries import Entry
    from kvlite.conversation.session import Session
    from kvlite.conversation.verify import Run
    from kvlite.planner.plan import Plan

# Columns below which tables leave columns out.
_ROOMY = 70
# How differences are marked: not by color alone, and in colors that nobody confuses.
_DIFFERENT = {
    "one": ("[-", "-]", Style(color="yellow", strike=True)),
    "other": ("{+", "+}", Style(color="blue", bold=True)),
}
# Words shown on either side of a difference.
_BESIDE = 3


def status_line(session: "Session", width: int) -> str:
    """How full a session is and how fast it answers; as much as fits into `width` columns."""
    cache, last = session.talk.cache, session.last
    shown = f"context {cache.seen:,}/{session.runner.shape.max_context:,}"[:width]
    parts = [f"KV {readable(cache.nbytes)}"]
    if last is not None and last.decode_tokens_per_s:
        parts.append(f"{last.decode_tokens_per_s:.1f} tokens/s")
    for part in parts:
        if len(shown) + len(part) + 2 > width:
            break
        shown += f", {part}"
    return shown


def model_line(session: "Session") -> str:
    """Which model answers, where, and how much it can read."""
    model, most = session.runner.model, session.runner.shape.max_context
    where = " and ".join(map(str, model.all_devices))
    name = Path(session.given.model).name
    return f"{name}, {model.weights.name} on {where} · {most:,} tokens of context"


def unusual(session: "Session") -> list[tuple[str, str]]:
    """Settings that are not the usual ones, and why."""
    rows = []
    planned, given = session.runner.settings, session.given
    for name, option in OPTIONS.items():
        now = getattr(session.talk.settings, name)
        if now == option.default:
            continue
        decided = name not in session.changed and now == getattr(planned, name)
        if decided and now != getattr(given, name):
            reason = "decided by the plan"
        else:
            reason = f"usually {written(option.default)}"
        rows.append((shown_name(name), f"{written(now)}  ({reason})"))
    return rows


def memory_now(session: "Session") -> list[Place]:
    """Where every byte is, the device first."""
    talk = session.talk
    held = holding(talk.model, talk.cache, talk.store, talk.context.checkpoint_bytes)
    model = talk.model
    return places(model.device, held, session.runner.settings.vram, model.cards)


def memory(place: Place) -> RenderableType:
    """How much of a place is used, and for what."""
    used = f"{place.name}: {readable(place.used)} of {readable(place.total)} used"
    parts = [(part.name, f"{readable(part.nbytes)} {part.about}") for part in place.parts]
    return Group(Text(used), grid(parts))


def plan_view(plan: "Plan", width: int) -> RenderableType:
    """A plan phase by phase, whether it fits, and the reasons for its settings."""
    return Group(*_plan_parts(plan, width))


def _plan_parts(made: "Plan", width: int) -> Iterator[RenderableType]:
    room = made.room
    what = f"{made.model}, {made.choice.weights.name}: read {made.tokens:,} tokens"
    yield Text(f"{what}, answer {made.longest:,}, on {room.name}")
    yield _all_phases(made) if width >= _ROOMY else _highest_phase(made)
    verdict = "fits" if made.fits else "does not fit"
    offered = readable(room.tensors)
    others = {
        "CUDA context and allocator": room.context,
        "a desktop (assumed)": room.desktop,
        "margin": room.margin,
    }
    beside = ", ".join(f"{what} {readable(size)}" for what, size in others.items() if size)
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


def loaded(messages: Sequence[Message], entry: "Entry | None") -> str:
    """How many messages a conversation has, and how many a program said before them."""
    earlier = 0 if entry is None or entry.record is None else entry.record.earlier
    return counted(messages) + (f", and {earlier} before that a program said" if earlier else "")


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
