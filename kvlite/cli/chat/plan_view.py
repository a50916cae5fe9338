"""Draws a plan: phase by phase, then whether it fits, and why it is as it is."""

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from kvlite.config.units import readable
from kvlite.planner.plan import Plan

# Below so many columns phases do not go side by side.
_ROOMY = 70


class PlanView:
    """A plan for people."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lines that fit the console."""
        made = self.plan
        room, choice = made.room, made.choice
        what = f"{made.model}, {choice.weights.name}: read {made.tokens:,} tokens"
        yield Text(f"{what}, answer {made.longest:,}, on {room.name}")
        yield _items(made) if options.max_width >= _ROOMY else _highest(made)
        yield from self._verdict()

    def _verdict(self) -> Iterator[RenderableType]:
        made, room = self.plan, self.plan.room
        verdict = "fits" if made.fits else "does not fit"
        offered = readable(room.tensors)
        yield Text(f"Peak {readable(made.peak_bytes)} of tensors, {offered} offered: {verdict}.")
        if made.forecast.host_bytes:
            host = readable(made.forecast.host_bytes)
            yield Text(f"Host memory for recall: {host}, {readable(room.host)} free.")
        if made.tokens_per_s is not None:
            yield Text(f"Answering: {made.tokens_per_s:.0f} tokens/s at most, by its bandwidth.")
        for reason in made.reasons:
            yield Text(f"- {reason}")
        if not made.fits:
            yield Text("- what would: a smaller model, a shorter text, or more memory")


def _items(made: Plan) -> Table:
    """All phases side by side."""
    phases, room = made.phases, made.room
    table = Table("", *[f"to {name}" for name in phases])
    for name in dict.fromkeys(name for items in phases.values() for name in items):
        cells = [readable(items[name]) if items.get(name) else "" for items in phases.values()]
        table.add_row(name, *cells)
    table.add_section()
    table.add_row("tensors", *[readable(sum(items.values())) for items in phases.values()])
    if room.context:
        table.add_row("CUDA context, allocator", *[readable(room.context)] * len(phases))
    table.add_row("margin", *[readable(room.margin)] * len(phases))
    return table


def _highest(made: Plan) -> Table:
    """The phase that takes most."""
    phase, items = max(made.phases.items(), key=lambda each: sum(each[1].values()))
    table = Table("", f"to {phase}")
    for name, size in items.items():
        if size:
            table.add_row(name, readable(size))
    table.add_section()
    table.add_row("tensors", readable(sum(items.values())))
    return table
