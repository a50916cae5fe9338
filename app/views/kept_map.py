"""A map of what each layer holds of each part of what was read."""

from ..engine.kept import KeptMap
from . import svg

_NAME = "What the cache holds"
LEFT, PLOT, SIDE = 30, 328, 372


def draw_kept(kept: KeptMap) -> str:
    """SVG of a row for each layer, the first on top, with positions from left to right and a bar of
    how much the layer holds. Layers with a sliding window have a mark."""
    if not kept.bins:
        said = "Nothing was read yet."
        return svg.picture(_NAME, said, 24, [svg.label(0, 16, said)])
    count = len(kept.layers)
    height = max(4, min(12, 320 // count))
    legend, top = _legend(kept)
    bottom = top + height * count
    scale = svg.ceiling(max(layer.all_held for layer in kept.layers) / 100)
    content = [legend, svg.small(0, top - 5, "layer"), svg.small(SIDE, top - 5, "kept of each")]
    content += [_layer(kept, at, top + at * height, height, scale) for at in range(count)]
    content += [
        svg.small(LEFT - 8, top + (at + 0.5) * height + 3.5, str(at), "end")
        for at in range(0, count, svg.spaced(height, 14))
    ]
    content += [
        _positions(kept, top, bottom),
        svg.small(SIDE, bottom + 13, "0", "middle"),
        svg.small(svg.WIDTH, bottom + 13, svg.percent(scale), "end"),
    ]
    return svg.picture(_NAME, told(kept), bottom + 33, content)


def told(kept: KeptMap) -> str:
    """The map in words."""
    layers = kept.layers
    held = sum(layer.all_held for layer in layers) / len(layers) / 100
    back = sum(layer.all_back for layer in layers) / len(layers) / 100
    order = sorted(range(len(layers)), key=lambda at: layers[at].all_held)
    said = [
        f"{len(layers)} layers, {kept.seen:,} tokens: {svg.percent(held)} are kept, on average "
        "over layers and heads."
    ]
    least, most = order[0], order[-1]
    if layers[least].all_held < layers[most].all_held:
        said.append(
            f"Layer {most} keeps most ({layers[most].all_held}%), layer {least} least "
            f"({layers[least].all_held}%)."
        )
    if back:
        said.append(f"{svg.percent(back)} came back while answering.")
    if windows := _windows(kept):
        count = sum(layer.window is not None for layer in layers)
        said.append(f"{count} layers see a sliding window of {windows} tokens.")
    return " ".join(said)


def _windows(kept: KeptMap) -> str:
    sizes = sorted({layer.window for layer in kept.layers if layer.window is not None})
    return " or ".join(f"{size:,}" for size in sizes)


def _came_back(kept: KeptMap) -> bool:
    return any(layer.all_back for layer in kept.layers)


def _legend(kept: KeptMap) -> tuple[str, float]:
    """The legend, and where the plot begins below it."""
    lines = [
        svg.steps_legend(0, 4, svg.HELD)
        + svg.label(60, 13, "kept, under 10% to all")
        + svg.rect(214, 4, 18, 9, opacity=svg.TRACK)
        + svg.label(238, 13, "offloaded")
    ]
    if _came_back(kept):
        said = "lower half of a row: came back while answering"
        lines.append(svg.steps_legend(0, 22, svg.BACK) + svg.label(60, 31, said))
    y = 18 * len(lines) + 4
    if windows := _windows(kept):
        lines.append(
            svg.rect(6, y, 3, 9) + svg.label(14, y + 9, f"sliding window of {windows} tokens")
        )
    if 0 < kept.read < kept.seen:
        y = 18 * len(lines) + 4
        lines.append(_answer_begins(8, y - 1, y + 11) + svg.label(14, y + 9, "the answer begins"))
    return "".join(lines), 18 * len(lines) + 24


def _answer_begins(x: float, top: float, bottom: float) -> str:
    return svg.line(
        f"M{svg.number(x)} {svg.number(top)}V{svg.number(bottom)}", stroke_dasharray="3 2"
    )


def _layer(kept: KeptMap, at: int, y: float, height: float, scale: float) -> str:
    """One row and its bar. Where anything came back, that has the row's lower half."""
    layer = kept.layers[at]
    sees = "sees everything" if layer.window is None else f"sliding window of {layer.window:,}"
    back = f", of which {layer.all_back}% came back" if layer.all_back else ""
    inner = height - 1
    upper = inner / 2 if _came_back(kept) else inner
    cells = (
        svg.rect(0, 0, kept.bins, inner, opacity=svg.TRACK)
        + svg.row([svg.step(each) for each in layer.held], upper / 2, upper, svg.HELD)
        + svg.row([svg.step(each) for each in layer.back], inner * 0.75, inner / 2, svg.BACK)
    )
    place = f"translate({LEFT} {svg.number(y)}) scale({PLOT / kept.bins:.4f} 1)"
    parts = [
        svg.title(f"Layer {at} ({sees}): {layer.all_held}% kept{back}"),
        svg.element("g", cells, transform=place, shape_rendering="crispEdges"),
    ]
    whole, again = (
        (svg.WIDTH - SIDE) * share / 100 / scale for share in (layer.all_held, layer.all_back)
    )
    if whole > again:
        parts.append(svg.rect(SIDE, y, whole - again, inner, svg.HELD))
    if again:
        parts.append(svg.rect(SIDE + whole - again, y, again, inner, svg.BACK))
    if layer.window is not None:
        parts.append(svg.rect(LEFT - 5, y, 3, inner))
    return svg.element("g", "".join(parts))


def _positions(kept: KeptMap, top: float, bottom: float) -> str:
    rounds = (size * 10**power for power in range(12) for size in (1, 2, 5))
    every = next(size for size in rounds if kept.seen / size <= 5)
    parts = []
    for at in range(0, kept.seen + 1, every):
        x = LEFT + PLOT * at / kept.seen
        parts.append(svg.line(f"M{svg.number(x)} {svg.number(bottom)}v3"))
        parts.append(svg.small(x, bottom + 13, f"{at:,}", "middle"))
    parts.append(svg.small(LEFT + PLOT / 2, bottom + 27, "position in tokens", "middle"))
    if 0 < kept.read < kept.seen:
        parts.append(_answer_begins(LEFT + PLOT * kept.read / kept.seen, top - 3, bottom + 3))
    return "".join(parts)
