"""The map: what each layer holds of each part of what was read."""

from dataclasses import replace

from ...engine.kept import KeptMap
from .svg import (
    BACK,
    HELD,
    SMALL,
    TRACK,
    WIDTH,
    ceiling,
    element,
    label,
    number,
    percent,
    picture,
    row,
    runs,
    spaced,
    step,
    steps_legend,
    title,
)

LEFT, PLOT, SIDE = 30, 328, 372
# Runs of equal cells in the whole map; more would make the picture larger than a page should load.
MOST_RUNS = 9000


def draw_kept(kept: KeptMap, name: str = "What the cache holds") -> str:
    """SVG of the map: a row a layer, the first one on top, positions from left to right; beside
    it, how much each layer holds. Layers with a sliding window have a mark."""
    if not kept.bins:
        return picture(name, "Nothing was read yet.", 24, [label(0, 16, "Nothing was read yet.")])
    fine, kept = kept, _coarse_enough(kept)
    height = max(4, min(12, 320 // len(kept.layers)))
    legend, top = _legend(kept)
    bottom = top + height * len(kept.layers)
    scale = ceiling(max(layer.all_held for layer in kept.layers) / 100)
    back = any(layer.all_back for layer in kept.layers)
    content = [
        legend,
        label(0, top - 5, "layer", font_size=SMALL),
        label(SIDE, top - 5, "held of each", font_size=SMALL),
    ]
    content += [
        _layer(kept, at, top + at * height, height, scale, split=back)
        for at in range(len(kept.layers))
    ]
    content += [_numbers(len(kept.layers), top, height), _positions(kept, top, bottom)]
    content.append(label(SIDE, bottom + 13, "0", font_size=SMALL, text_anchor="middle"))
    content.append(label(WIDTH, bottom + 13, percent(scale), font_size=SMALL, text_anchor="end"))
    return picture(name, told(fine), bottom + 33, content)


def told(kept: KeptMap) -> str:
    """The map in words."""
    layers = kept.layers
    held = sum(layer.all_held for layer in layers) / len(layers) / 100
    back = sum(layer.all_back for layer in layers) / len(layers) / 100
    order = sorted(range(len(layers)), key=lambda at: layers[at].all_held)
    said = [
        f"{len(layers)} layers, {kept.seen:,} tokens: {percent(held)} are held, on average over "
        "layers and heads."
    ]
    least, most = order[0], order[-1]
    if layers[least].all_held < layers[most].all_held:
        said.append(
            f"Layer {most} holds most ({layers[most].all_held}%), layer {least} least "
            f"({layers[least].all_held}%)."
        )
    if back:
        said.append(f"{percent(back)} came back while answering.")
    windows = _windows(kept)
    if windows:
        count = sum(layer.window is not None for layer in layers)
        said.append(f"{count} layers see a sliding window of {windows} tokens.")
    return " ".join(said)


def _windows(kept: KeptMap) -> str:
    sizes = sorted({layer.window for layer in kept.layers if layer.window is not None})
    return " or ".join(f"{size:,}" for size in sizes)


def _legend(kept: KeptMap) -> tuple[str, float]:
    """What marks mean, and where the plot begins."""
    held, back = "held, under 10% to all", any(layer.all_back for layer in kept.layers)
    lines = [
        steps_legend(0, 4, HELD)
        + label(60, 13, held)
        + element("rect", x=214, y=4, width=18, height=9, fill_opacity=TRACK)
        + label(238, 13, "set aside")
    ]
    if back:
        said = "lower half of a row: came back while answering"
        lines.append(steps_legend(0, 22, BACK) + label(60, 31, said))
    windows, y = _windows(kept), 18 * len(lines) + 4
    if windows:
        lines.append(_mark(6, y, 9) + label(14, y + 9, f"sliding window of {windows} tokens"))
    if 0 < kept.read < kept.seen:
        y = 18 * len(lines) + 4
        lines.append(_cut(8, y - 1, y + 11) + label(14, y + 9, "the answer begins"))
    return "".join(lines), 18 * len(lines) + 24


def _mark(x: float, y: float, height: float) -> str:
    return element("rect", x=number(x), y=number(y), width=3, height=number(height))


def _cut(x: float, top: float, bottom: float) -> str:
    return element(
        "path",
        d=f"M{number(x)} {number(top)}V{number(bottom)}",
        stroke="currentColor",
        stroke_dasharray="3 2",
        fill="none",
    )


def _layer(kept: KeptMap, at: int, y: float, height: float, scale: float, *, split: bool) -> str:
    """One row, and its bar.

    Args:
        split: what came back has the row's lower half.
    """
    layer = kept.layers[at]
    sees = "sees everything" if layer.window is None else f"sliding window of {layer.window:,}"
    back = f", of which {layer.all_back}% came back" if layer.all_back else ""
    inner = height - 1
    upper = inner / 2 if split else inner
    cells = (
        element("rect", width=kept.bins, height=inner, fill_opacity=TRACK)
        + row([step(each) for each in layer.held], upper / 2, upper, HELD)
        + row([step(each) for each in layer.back], inner * 0.75, inner / 2, BACK)
    )
    unit = f"{PLOT / kept.bins:.4f}"
    parts = [
        title(f"Layer {at} ({sees}): {layer.all_held}% held{back}"),
        element(
            "g",
            cells,
            transform=f"translate({LEFT} {number(y)}) scale({unit} 1)",
            shape_rendering="crispEdges",
        ),
    ]
    width = (WIDTH - SIDE) * layer.all_held / 100 / scale
    of_it = (WIDTH - SIDE) * layer.all_back / 100 / scale
    for begin, long, colour in ((0, width - of_it, HELD), (width - of_it, of_it, BACK)):
        if long > 0:
            parts.append(
                element(
                    "rect",
                    x=number(SIDE + begin),
                    y=number(y),
                    width=number(long),
                    height=number(inner),
                    fill=colour,
                )
            )
    if layer.window is not None:
        parts.append(_mark(LEFT - 5, y, inner))
    return element("g", "".join(parts))


def _numbers(layers: int, top: float, height: float) -> str:
    """The numbers of some rows."""
    every = spaced(height, 14)
    return "".join(
        label(
            LEFT - 8,
            top + (at + 0.5) * height + 3.5,
            str(at),
            font_size=SMALL,
            text_anchor="end",
        )
        for at in range(0, layers, every)
    )


def _positions(kept: KeptMap, top: float, bottom: float) -> str:
    """The axis, and where the answer begins."""
    every = next(
        size * 10**power
        for power in range(12)
        for size in (1, 2, 5)
        if kept.seen / (size * 10**power) <= 5
    )
    parts = []
    for at in range(0, kept.seen + 1, every):
        x = LEFT + PLOT * at / kept.seen
        line = f"M{number(x)} {number(bottom)}v3"
        parts.append(element("path", d=line, stroke="currentColor", fill="none"))
        parts.append(label(x, bottom + 13, f"{at:,}", font_size=SMALL, text_anchor="middle"))
    parts.append(
        label(
            LEFT + PLOT / 2,
            bottom + 27,
            "position in tokens",
            font_size=SMALL,
            text_anchor="middle",
        )
    )
    if 0 < kept.read < kept.seen:
        parts.append(_cut(LEFT + PLOT * kept.read / kept.seen, top - 3, bottom + 3))
    return "".join(parts)


def _coarse_enough(kept: KeptMap) -> KeptMap:
    """With half the bins, as often as it takes."""
    while _count(kept) > MOST_RUNS and kept.bins > 1:
        layers = (
            replace(layer, held=_halved(layer.held), back=_halved(layer.back))
            for layer in kept.layers
        )
        kept = replace(kept, layers=tuple(layers))
    return kept


def _count(kept: KeptMap) -> int:
    return sum(
        len(runs([step(each) for each in line]))
        for layer in kept.layers
        for line in (layer.held, layer.back)
    )


def _halved(line: tuple[int, ...]) -> tuple[int, ...]:
    pairs = (line[at : at + 2] for at in range(0, len(line), 2))
    return tuple(_mean(pair) for pair in pairs)


def _mean(pair: tuple[int, ...]) -> int:
    mean = round(sum(pair) / len(pair))
    return mean if len({*pair}) == 1 else min(99, max(1, mean))
