"""Which plots a run's rows make."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from kvlite.bench.fidelity import FidelityRow, FidelityTally
from kvlite.bench.fidelity import tallies as fidelity_tallies
from kvlite.bench.grid import label
from kvlite.bench.intervals import Estimate
from kvlite.bench.plots import HeatMap, Panel, Point, draw_heat_maps, draw_quality
from kvlite.bench.questions import QuestionRow, QuestionTally
from kvlite.bench.questions import tallies as question_tallies
from kvlite.bench.turns import TurnRow, TurnTally
from kvlite.bench.turns import tallies as turn_tallies

Tally = TypeVar("Tally", QuestionTally, FidelityTally, TurnTally)


def draw_questions(rows: Sequence[QuestionRow], folder: Path) -> list[Path]:
    """Of each kind and setting: found and surprise against bytes, and heat maps if there are
    depths."""
    paths = []
    for kind, question in dict.fromkeys((row.kind, row.question) for row in rows):
        own = [row for row in rows if (row.kind, row.question) == (kind, question)]
        told = f"{own[0].task} {kind}, question {question}"
        lengths = list(dict.fromkeys(row.length for row in own))
        tallies = question_tallies(own)
        panels = [
            [_panel(tallies, n, "all keys found (share)", lambda t: t.hit, share=True)
             for n in lengths],
            [_panel(tallies, n, "surprise (nats a key token)", lambda t: t.surprise)
             for n in lengths],
        ]  # fmt: skip
        paths.append(draw_quality(folder / f"quality-{kind}-{question}.png", told, panels))
        if own[0].depth is not None:
            name = f"depths-{kind}-{question}"
            paths += draw_heat_maps(folder, name, told, _heat_maps(own))
    return paths


def draw_fidelity(rows: Sequence[FidelityRow], folder: Path) -> list[Path]:
    """KL, agreement and attention kept against bytes."""
    tallies = fidelity_tallies(rows)
    lengths = list(dict.fromkeys(row.length for row in rows))
    kept = [each for each in tallies if each.kl.value > 0]  # 0 is off a log scale
    panels = [
        [_panel(kept, n, "KL from the full cache (nats)", lambda t: t.kl, log=True)
         for n in lengths],
        [_panel(tallies, n, "same top token (share)", lambda t: t.agreement) for n in lengths],
        [_panel(tallies, n, "attention kept (share)", lambda t: t.attention_kept) for n in lengths],
    ]  # fmt: skip
    title = "Fidelity to the full cache"
    return [draw_quality(folder / "quality-fidelity.png", title, panels)]


def draw_turns(rows: Sequence[TurnRow], folder: Path) -> list[Path]:
    """Questions answered, and digits right, against bytes."""
    tallies = turn_tallies(rows)
    lengths = list(dict.fromkeys(row.length for row in rows))
    panels = [
        [_panel(tallies, n, "questions answered (share)", lambda t: t.hit, share=True)
         for n in lengths],
        [_panel(tallies, n, "leading digits right (share)", lambda t: t.leading, share=True)
         for n in lengths],
    ]  # fmt: skip
    return [draw_quality(folder / "quality-turns.png", "Questions one after the other", panels)]


def _panel(
    tallies: Iterable[Tally],
    length: int,
    quality: str,
    value: Callable[[Tally], Estimate],
    *,
    share: bool = False,
    log: bool = False,
) -> Panel:
    series: dict[str, list[Point]] = {}
    for tally in tallies:
        if tally.length == length:
            name = label(tally.method, tally.kv_bits, tally.recall)
            series.setdefault(name, []).append(Point(tally.kv_bytes, value(tally)))
    by_bytes = {
        name: sorted(points, key=lambda point: point.nbytes) for name, points in series.items()
    }
    return Panel(f"{length:,} tokens", quality, by_bytes, share, log)


def _heat_maps(rows: Sequence[QuestionRow]) -> list[HeatMap]:
    maps = []
    of = attrgetter("method", "kv_bits", "budget", "recall")
    for method, kv_bits, budget, recall in dict.fromkeys(map(of, rows)):
        hits: dict[tuple[int, float], list[float]] = {}
        for row in rows:
            if of(row) == (method, kv_bits, budget, recall):
                hits.setdefault((row.length, row.depth or 0.0), []).append(row.hit)
        size = "all entries" if method == "full" else f"{budget:,} entries"
        name, means = label(method, kv_bits, recall), {at: fmean(each) for at, each in hits.items()}
        maps.append(HeatMap(name, size, means))
    return maps
