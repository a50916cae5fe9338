"""Plots of a run: where needles are found, and quality against bytes. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from itertools import islice
from math import ceil
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvlite.bench.intervals import Estimate
from kvlite.bench.rows import Curve, Tally

MIB = 1 << 20
# Okabe and Ito's colors, which stay apart for the color-blind; markers tell more methods apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6A3D9A", "#8C564B")
MARKERS = "osD^vPX<>*"
CONTROL, FULL = "#888888", "#000000"
METHODS_A_PAGE = 6
STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.dpi": 100,
    "savefig.dpi": 160,
}


Series = dict[str, list[tuple[float, Estimate]]]
"""Bytes held, rising, and how well that did, by method."""


def draw_quality(
    path: Path, title: str, tallies: Sequence[Tally[Any]], curves: Sequence[Curve]
) -> None:
    """Quality against the bytes a cache holds, a line a method, with 95% intervals; a row of
    panels for each curve, a column for each length."""
    lengths = list(dict.fromkeys(tally.rows[0].length for tally in tallies))
    panels = [[_series(tallies, length, curve) for length in lengths] for curve in curves]
    methods = list(dict.fromkeys(name for row in panels for each in row for name in each))
    looks = _looks(methods)
    width = max(5.5, 3.7 * len(lengths) + 0.6)
    legend_columns = max(1, min(4, int(width * 12 / (max(map(len, methods)) + 6))))
    legend = ceil(len(methods) / legend_columns) * 0.22 + 0.2
    size = (width, 2.7 * len(curves) + 0.5 + legend)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(len(curves), len(lengths), squeeze=False, sharex="col")
        for row, curve, own in zip(axes, curves, panels, strict=True):
            for axis, series in zip(row, own, strict=True):
                _quality(axis, curve, series, looks)
        for axis, length in zip(axes[0], lengths, strict=True):
            axis.set_title(f"{length:,} tokens")
        for axis in axes[-1]:
            axis.set_xlabel("KV cache after reading (MiB)")
        handles = [axes[0, 0].plot([], [], label=name, **looks[name])[0] for name in methods]
        figure.legend(handles=handles, loc="outside lower center", ncols=legend_columns, fontsize=9)
        figure.suptitle(title, fontsize=12)
        figure.savefig(path)


def _series(tallies: Sequence[Tally[Any]], length: int, curve: Curve) -> Series:
    series: Series = {}
    for tally in tallies:
        quality = tally.estimate(curve.column)
        if tally.rows[0].length == length and (quality.value > 0 or not curve.log):
            series.setdefault(tally.label, []).append((tally.kv_bytes, quality))
    return {name: sorted(points, key=itemgetter(0)) for name, points in series.items()}


def _quality(axis: Axes, curve: Curve, series: Series, looks: Mapping[str, dict[str, Any]]) -> None:
    for index, (name, points) in enumerate(series.items()):
        look = looks[name]
        axis.plot(
            [nbytes / MIB for nbytes, _ in points], [each.value for _, each in points], **look
        )
        if name == "full":
            axis.axhline(points[0][1].value, color=FULL, linestyle=":", linewidth=1)
        # Or intervals would hide each other.
        aside = 1.0 if name == "full" else 1.012 ** (index - len(series) / 2)
        for nbytes, each in points:
            if each.low is not None and each.high is not None:
                x, y = [nbytes / MIB * aside] * 2, [each.low, each.high]
                axis.plot(x, y, color=look["color"], linewidth=1, alpha=0.45)
    axis.set_xscale("log")
    _label_logarithms(axis.xaxis)
    axis.tick_params(labelbottom=True)
    axis.set_ylabel(curve.label)
    if curve.share:
        axis.set_ylim(-0.04, 1.04)
    if curve.log:
        axis.set_yscale("log")
        _label_logarithms(axis.yaxis)


def _label_logarithms(axis: Axis) -> None:
    """Few powers of ten lie in a grid of budgets: their halves and fifths are labeled too."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


Shares = dict[tuple[int, float], float]
"""Share of prompts with all keys found, at (length, depth)."""


def draw_depths(folder: Path, name: str, title: str, tallies: Sequence[Tally[Any]]) -> None:
    """Depth x length for every method and budget; `METHODS_A_PAGE` methods a file.

    Args:
        tallies: of rows of one depth each.
    """
    maps: dict[str, dict[str, Shares]] = {}
    for tally in tallies:
        row = tally.rows[0]
        size = "all entries" if row.method == "full" else f"{row.budget:,} entries"
        shares = maps.setdefault(tally.label, {}).setdefault(size, {})
        shares[row.length, row.depth] = tally.estimate("hit").value
    starts = range(0, len(maps), METHODS_A_PAGE)
    for number, start in enumerate(starts, 1):
        path = folder / (f"{name}-{number}.png" if len(starts) > 1 else f"{name}.png")
        _page(path, title, dict(islice(maps.items(), start, start + METHODS_A_PAGE)))


def _page(path: Path, title: str, maps: Mapping[str, Mapping[str, Shares]]) -> None:
    """A row of heat maps for each method, one for each budget."""
    places = [place for own in maps.values() for shares in own.values() for place in shares]
    lengths, depths = (sorted(set(values)) for values in zip(*places, strict=True))
    columns = max(map(len, maps.values()))
    width, height = max(1.5, 0.42 * len(lengths) + 0.9), max(1.3, 0.2 * len(depths) + 0.7)
    with matplotlib.rc_context(STYLE):
        size = (max(5.0, width * columns + 1.6), height * len(maps) + 1.3)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(len(maps), columns, squeeze=False, sharex=True, sharey=True)
        for axis in axes.flat:
            axis.axis("off")
        for row, (method, own) in zip(axes, maps.items(), strict=True):
            for axis, (budget, shares) in zip(row, own.items(), strict=False):
                image = _heat_map(axis, budget, shares, lengths, depths)
            row[0].set_title(f"{_shortened(method)}\n{next(iter(own))}", loc="left")
        figure.supxlabel("tokens of the prompt", fontsize=10)
        figure.supylabel("depth of the needle (%)", fontsize=10)
        figure.suptitle(title, fontsize=12)
        bar = figure.colorbar(image, ax=axes, fraction=0.04, shrink=min(1.0, 4 / size[1]))
        bar.set_label("share of prompts with all keys found")
        bar.outline.set_visible(False)
        figure.savefig(path)


def _heat_map(
    axis: Axes, budget: str, shares: Shares, lengths: Sequence[int], depths: Sequence[float]
) -> Any:
    axis.axis("on")
    grid = [[shares.get((n, depth), float("nan")) for n in lengths] for depth in depths]
    image = axis.imshow(grid, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    axis.grid(visible=False)
    axis.set_xticks([n - 0.5 for n in range(1, len(lengths))], minor=True)
    axis.set_yticks([n - 0.5 for n in range(1, len(depths))], minor=True)
    axis.grid(which="minor", color="white", linewidth=0.8)
    axis.set_title(f"\n{budget}", loc="left")
    axis.set_xticks(range(len(lengths)), [_thousands(n) for n in lengths], fontsize=8)
    step = max(1, len(depths) // 4)
    places = range(0, len(depths), step)
    axis.set_yticks(places, [f"{100 * depths[i]:.0f}" for i in places], fontsize=8)
    axis.tick_params(which="minor", length=0)
    axis.tick_params(length=2, labelbottom=True, labelleft=True)
    return image


def draw_attention(
    path: Path,
    title: str,
    layers: Sequence[Any],
    length: int,
    lines: Mapping[str, Sequence[int]],
) -> None:
    """Layer x position, as darker as more attention falls there; and how many entries take most of
    it, beside the lines that methods would cut layers to.

    Args:
        layers: rows of `attention`, one a layer.
        lines: entries of each layer, by method.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 0.6 + 0.13 * max(24, len(layers))), layout="constrained")
        where, count = figure.subplots(1, 2)
        grid = [[max(1e-5, share) for share in each.shares] for each in layers]
        extent = (0, length, len(layers) - 0.5, -0.5)
        norm = LogNorm(1e-4, 1)
        image = where.imshow(grid, cmap="cividis", norm=norm, aspect="auto", extent=extent)
        where.grid(visible=False)
        where.set_xlabel("position (tokens)")
        where.set_ylabel("layer")
        figure.colorbar(image, ax=where, label="share of the last tokens' attention")
        places = range(len(layers))
        count.plot([each.needed for each in layers], places, color=FULL, label="90% of attention")
        for (name, line), color in zip(lines.items(), COLORS, strict=False):
            count.plot(line, places, "--", color=color, label=f"{name}, as many in all")
        count.set_ylim(len(layers) - 0.5, -0.5)
        count.set_xlim(left=0)
        count.set_xlabel("entries")
        for axis in (where, count):
            axis.set_yticks(places[:: max(1, len(layers) // 10)])
            axis.set_yticklabels([str(each.layer) for each in layers][:: max(1, len(layers) // 10)])
        count.legend(fontsize=8)
        figure.suptitle(title, fontsize=12)
        figure.savefig(path)


def _looks(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    looks = {}
    others = [name for name in methods if name != "full" and not name.startswith("random")]
    for index, name in enumerate(others):
        looks[name] = _look(COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)])
    for name in methods:
        if name == "full":
            looks[name] = {**_look(FULL, "*"), "markersize": 10, "linestyle": "none"}
        elif name not in looks:
            looks[name] = {**_look(CONTROL, "x"), "linestyle": "--"}
    return looks


def _look(color: str, marker: str) -> dict[str, Any]:
    return {"color": color, "marker": marker, "markersize": 5, "linewidth": 1.5}


def _shortened(method: str) -> str:
    return method if len(method) <= 44 else f"{method[:42]}…"


def _thousands(tokens: int) -> str:
    return f"{tokens / 1000:g}k" if tokens >= 1000 else str(tokens)
