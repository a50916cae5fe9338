"""In how many directions the queries of each head spread, by which UNComp groups heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from kvlite.methods.rank import head_groups, layer_groups
from kvlite.methods.uncomp import UNComp
from kvlite.model.calibration import Calibration

from .svg import (
    HELD,
    STRENGTHS,
    WIDTH,
    element,
    line,
    number,
    picture,
    row,
    small,
    spaced,
    steps_legend,
    title,
)

LEFT, TOP = 46, 58


@dataclass(frozen=True)
class Plot:
    """The grid of cells.

    Attributes:
        wide, tall: of a cell, its gap included.
        low, high: the smallest and the largest rank.
        bottom: below the last row.
    """

    wide: float
    tall: float
    gap: float
    low: float
    high: float
    bottom: float


def draw_heads(
    calibration: Calibration,
    drop: float = UNComp.drop,
    groups: int = UNComp.groups,
    name: str = "Effective rank of heads",
) -> str:
    """SVG of a column for each layer and a row for each KV head, stronger the more directions its
    queries take. Heads of the first group, which keep most entries, have a dot; groups of layers
    are numbered below.

    Args:
        drop: by how much the rank falls where a group of layers begins.
        groups: of a layer's heads.
    """
    by_layer = layer_groups(calibration.layer_ranks, drop)
    ranks = calibration.head_ranks
    layers, heads = len(ranks), len(ranks[0])
    every = [rank for layer in ranks for rank in layer]
    wide, tall = (WIDTH - LEFT) / layers, max(6.0, min(22.0, 320 / heads))
    plot = Plot(wide, tall, min(1.0, wide / 5), min(every), max(every), TOP + tall * heads)
    content = [_legend(plot.low, plot.high, groups), small(0, TOP - 5, "layer")]
    for layer in range(layers):
        longest = [group == 0 for group in head_groups(calibration.heads_by_rank(layer), groups)]
        content.append(_column(ranks[layer], longest, plot, layer))
    content += [
        small(LEFT + (layer + 0.5) * wide, TOP - 5, str(layer), "middle")
        for layer in range(0, layers, spaced(wide, 24))
    ]
    content += [
        small(0, TOP + (head + 0.5) * tall + 3.5, f"head {head}")
        for head in range(0, heads, spaced(tall, 14))
    ]
    for group, members in groupby(range(layers), key=lambda layer: by_layer[layer]):
        own = [*members]
        content.append(_group(group, own[0], own[-1], plot))
    content.append(small(LEFT + (WIDTH - LEFT) / 2, plot.bottom + 36, "groups of layers", "middle"))
    return picture(name, _told(calibration, max(by_layer) + 1), plot.bottom + 42, content)


def _told(calibration: Calibration, groups: int) -> str:
    """The picture in words."""
    means = [sum(ranks) / len(ranks) for ranks in calibration.head_ranks]
    most, least = means.index(max(means)), means.index(min(means))
    return (
        f"{len(means)} layers of {len(calibration.head_ranks[0])} KV heads in {groups} "
        f"{'group' if groups == 1 else 'groups'} of layers. Queries spread most in layer {most} "
        f"({means[most]:.1f} directions, mean of its heads), least in layer {least} "
        f"({means[least]:.1f})."
    )


def _step(rank: float, low: float, high: float) -> int:
    """The index of the opacity that stands for a rank."""
    share = (rank - low) / (high - low) if high > low else 1.0
    return min(len(STRENGTHS) - 1, int(len(STRENGTHS) * share))


def _legend(low: float, high: float, groups: int) -> str:
    parts = [
        small(0, 13, f"{low:.1f}"),
        steps_legend(28, 4, HELD),
        small(88, 13, f"{high:.1f} directions that queries take"),
    ]
    if groups > 1:
        parts.append(element("circle", cx=5, cy=27, r=2.2))
        parts.append(small(14, 31, "the layer's first group: longest lines"))
    return "".join(parts)


def _column(ranks: Sequence[float], longest: Sequence[bool], plot: Plot, layer: int) -> str:
    """A layer's heads: a row of cells, turned so that the first is on top."""
    x, wide = LEFT + layer * plot.wide, plot.wide - plot.gap
    shown = ", ".join(f"{rank:.1f}" for rank in ranks)
    steps = [_step(rank, plot.low, plot.high) for rank in ranks]
    turned = f"matrix(0 {plot.tall:.3f} 1 0 {x:.2f} {TOP})"
    parts = [
        title(f"Layer {layer}: {shown}"),
        element("g", row(steps, wide / 2, wide, HELD), transform=turned),
    ]
    dots = "".join(
        f"M{x + wide / 2:.2f} {number(TOP + (head + 0.5) * plot.tall)}h0"
        for head, first in enumerate(longest)
        if first
    )
    if dots:
        width = number(min(4.4, plot.wide / 2, plot.tall / 2))
        parts.append(line(dots, stroke_width=width, stroke_linecap="round"))
    return element("g", "".join(parts))


def _group(group: int, first: int, last: int, plot: Plot) -> str:
    """A bracket below the layers of a group, with its number where there is room."""
    left, right = LEFT + first * plot.wide, LEFT + (last + 1) * plot.wide - plot.gap
    layers = f"layer {first}" if first == last else f"layers {first} to {last}"
    bracket = f"M{number(left)} {number(plot.bottom + 4)}v4H{number(right)}v-4"
    parts = [title(f"Group {group + 1}: {layers}"), line(bracket)]
    if right - left >= 8 * len(str(group + 1)):
        parts.append(small((left + right) / 2, plot.bottom + 20, str(group + 1), "middle"))
    return element("g", "".join(parts))
