"""The plot of a run: quality against bytes. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from math import ceil
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvlite.bench.intervals import Estimate
from kvlite.bench.rows import Curve, Tally

MIB = 1 << 20
# Okabe and Ito's colors, which stay apart for the color-blind; markers tell more methods apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6A3D9A", "#8C564B")
MARKERS = "osD^vPX<>*"
CONTROL, FULL = "#888888", "#000000"
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
    # Few powers of ten lie in a grid of budgets: their halves and fifths are labeled too.
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


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
