"""In how many directions the queries of each head spread, by which UNComp groups heads."""

from collections.abc import Sequence
from itertools import groupby

from kvlite.methods.rank import head_groups, layer_groups
from kvlite.methods.uncomp import UNComp
from kvlite.model.calibration import Calibration

from . import svg

LEFT, TOP = 46, 58


def draw_heads(calibration: Calibration, groups: int = UNComp.groups) -> str:
    """SVG of a column for each layer and a row for each KV head, stronger the more directions its
    queries take. Heads of the first of a layer's `groups`, which keep most entries, have a dot;
    groups of layers are numbered below."""
    by_layer = layer_groups(calibration.layer_ranks, UNComp.drop)
    ranks = calibration.head_ranks
    layers, heads = len(ranks), len(ranks[0])
    every = [rank for layer in ranks for rank in layer]
    wide, tall = (svg.WIDTH - LEFT) / layers, max(6.0, min(22.0, 320 / heads))
    gap, bottom = min(1.0, wide / 5), TOP + tall * heads
    content = [_legend(min(every), max(every), groups), svg.small(0, TOP - 5, "layer")]
    for layer, own in enumerate(ranks):
        x = LEFT + layer * wide
        steps = [_step(rank, min(every), max(every)) for rank in own]
        first = [group == 0 for group in head_groups(calibration.heads_by_rank(layer), groups)]
        shown = ", ".join(f"{rank:.1f}" for rank in own)
        cells = _cells(steps, x, wide - gap, tall) + _dots(first, x + (wide - gap) / 2, wide, tall)
        content.append(svg.element("g", svg.title(f"Layer {layer}: {shown}") + cells))
    content += [
        svg.small(LEFT + (layer + 0.5) * wide, TOP - 5, str(layer), "middle")
        for layer in range(0, layers, svg.spaced(wide, 24))
    ]
    content += [
        svg.small(0, TOP + (head + 0.5) * tall + 3.5, f"head {head}")
        for head in range(0, heads, svg.spaced(tall, 14))
    ]
    for group, alike in groupby(range(layers), key=lambda layer: by_layer[layer]):
        members = [*alike]
        left, right = LEFT + members[0] * wide, LEFT + (members[-1] + 1) * wide - gap
        content.append(_bracket(group + 1, members, left, right, bottom))
    content.append(
        svg.small(LEFT + (svg.WIDTH - LEFT) / 2, bottom + 36, "groups of layers", "middle")
    )
    said = _told(calibration, max(by_layer) + 1)
    return svg.picture("Effective rank of heads", said, bottom + 42, content)


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
    return min(len(svg.STRENGTHS) - 1, int(len(svg.STRENGTHS) * share))


def _legend(low: float, high: float, groups: int) -> str:
    parts = [
        svg.small(0, 13, f"{low:.1f}"),
        svg.steps_legend(28, 4, svg.HELD),
        svg.small(88, 13, f"{high:.1f} directions that queries take"),
    ]
    if groups > 1:
        parts.append(svg.element("circle", cx=5, cy=27, r=2.2))
        parts.append(svg.small(14, 31, "the layer's first group: most entries"))
    return "".join(parts)


def _cells(steps: Sequence[int], x: float, wide: float, tall: float) -> str:
    """A row of cells, turned so that the first is on top."""
    turned = f"matrix(0 {tall:.3f} 1 0 {x:.2f} {TOP})"
    return svg.element("g", svg.row(steps, wide / 2, wide, svg.HELD), transform=turned)


def _dots(first: Sequence[bool], x: float, wide: float, tall: float) -> str:
    dots = "".join(
        f"M{x:.2f} {svg.number(TOP + (head + 0.5) * tall)}h0"
        for head, is_first in enumerate(first)
        if is_first
    )
    size = svg.number(min(4.4, wide / 2, tall / 2))
    return svg.line(dots, stroke_width=size, stroke_linecap="round") if dots else ""


def _bracket(group: int, layers: Sequence[int], left: float, right: float, bottom: float) -> str:
    """A bracket below the layers of a group, with its number where there is room."""
    first, last = layers[0], layers[-1]
    told = f"layer {first}" if first == last else f"layers {first} to {last}"
    bracket = f"M{svg.number(left)} {svg.number(bottom + 4)}v4H{svg.number(right)}v-4"
    parts = [svg.title(f"Group {group}: {told}"), svg.line(bracket)]
    if right - left >= 8 * len(str(group)):
        parts.append(svg.small((left + right) / 2, bottom + 20, str(group), "middle"))
    return svg.element("g", "".join(parts))
