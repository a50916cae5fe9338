"""Plots of a run: where needles are found, and quality against bytes. Needs matplotlib."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvlite.bench.intervals import Estimate

MIB = 1 << 20
# Okabe and Ito's colours, which stay apart for the colour-blind; markers tell more methods apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6A3D9A", "#8C564B")
MARKERS = "osD^vPX<>*"
CONTROL, YARDSTICK = "#888888", "#000000"
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


@dataclass(frozen=True)
class Point:
    """A method at one budget: bytes held, and how well it did."""

    nbytes: float
    quality: Estimate


@dataclass(frozen=True)
class Panel:
    """One picture of a figure.

    Attributes:
        title: what the panels of a figure differ in.
        quality: label of the vertical axis, with its unit.
        series: points by method, by rising bytes.
        share: quality lies between 0 and 1.
        log: quality spans powers of ten.
    """

    title: str
    quality: str
    series: Mapping[str, Sequence[Point]]
    share: bool = False
    log: bool = False


@dataclass(frozen=True)
class HeatMap:
    """One method at one budget: quality by depth and length.

    Attributes:
        method, budget: which.
        shares: quality of 0 to 1 at (length, depth).
    """

    method: str
    budget: str
    shares: Mapping[tuple[int, float], float]


def draw_quality(path: Path, title: str, rows: Sequence[Sequence[Panel]]) -> Path:
    """Quality against the bytes a cache holds, a line a method, with 95% intervals.

    Args:
        rows: panels of the figure, row by row, each row with the same number.
    """
    methods = list(dict.fromkeys(name for row in rows for panel in row for name in panel.series))
    looks = _looks(methods)
    columns = len(rows[0])
    legend = ceil(len(methods) / _legend_columns(methods)) * 0.22 + 0.2
    height = 2.7 * len(rows) + 0.5 + legend
    with _style():
        figure = Figure(figsize=(max(5.5, 3.7 * columns + 0.6), height), layout="constrained")
        axes = figure.subplots(len(rows), columns, squeeze=False, sharex="col")
        for at, row in enumerate(rows):
            for axis, panel in zip(axes[at], row, strict=True):
                _quality(axis, panel, looks)
                if at == len(rows) - 1:
                    axis.set_xlabel("KV cache after reading (MiB)")
                if at == 0:
                    axis.set_title(panel.title)
        handles = [axes[0, 0].plot([], [], label=name, **looks[name])[0] for name in methods]
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=_legend_columns(methods),
            fontsize=9,
        )
        figure.suptitle(title, fontsize=12)
        figure.savefig(path)
    return path


def draw_heat_maps(folder: Path, name: str, title: str, maps: Sequence[HeatMap]) -> list[Path]:
    """Depth x length for every method and budget; `METHODS_A_PAGE` methods a file."""
    methods = list(dict.fromkeys(each.method for each in maps))
    starts = range(0, len(methods), METHODS_A_PAGE)
    pages = [methods[at : at + METHODS_A_PAGE] for at in starts]
    paths = []
    for number, page in enumerate(pages, 1):
        path = folder / (f"{name}-{number}.png" if len(pages) > 1 else f"{name}.png")
        _page(path, title, [each for each in maps if each.method in page])
        paths.append(path)
    return paths


def _quality(axis: Axes, panel: Panel, looks: Mapping[str, dict[str, Any]]) -> None:
    for index, (name, points) in enumerate(panel.series.items()):
        look = looks[name]
        x = [point.nbytes / MIB for point in points]
        y = [point.quality.value for point in points]
        axis.plot(x, y, **look)
        if name == "full":
            axis.axhline(y[0], color=YARDSTICK, linestyle=":", linewidth=1)
        spans = [(a, p.quality.low, p.quality.high) for a, p in zip(x, points, strict=True)]
        # Or intervals would hide each other.
        aside = 1.0 if name == "full" else 1.012 ** (index - len(panel.series) / 2)
        for at, low, high in spans:
            if low is not None and high is not None:
                axis.plot(
                    [at * aside, at * aside],
                    [low, high],
                    color=look["color"],
                    linewidth=1,
                    alpha=0.45,
                )
    axis.set_xscale("log")
    _label_logarithms(axis.xaxis)
    axis.tick_params(labelbottom=True)
    axis.set_ylabel(panel.quality)
    if panel.share:
        axis.set_ylim(-0.04, 1.04)
    if panel.log:
        axis.set_yscale("log")
        _label_logarithms(axis.yaxis)


def _label_logarithms(axis: Axis) -> None:
    """Few powers of ten lie in a grid of budgets: their halves and fifths are labelled too."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _page(path: Path, title: str, maps: Sequence[HeatMap]) -> None:
    methods = list(dict.fromkeys(each.method for each in maps))
    columns = max(sum(each.method == method for each in maps) for method in methods)
    lengths = sorted({length for each in maps for length, _ in each.shares})
    depths = sorted({depth for each in maps for _, depth in each.shares})
    width, height = max(1.5, 0.42 * len(lengths) + 0.9), max(1.3, 0.2 * len(depths) + 0.7)
    with _style():
        size = (max(5.0, width * columns + 1.6), height * len(methods) + 1.3)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(len(methods), columns, squeeze=False, sharex=True, sharey=True)
        for axis in axes.flat:
            axis.axis("off")
        for at, method in enumerate(methods):
            own = [each for each in maps if each.method == method]
            for axis, each in zip(axes[at], own, strict=False):
                image = _heat_map(axis, each, lengths, depths)
            axes[at, 0].set_title(f"{_shortened(method)}\n{own[0].budget}", loc="left")
        figure.supxlabel("tokens of the prompt", fontsize=10)
        figure.supylabel("depth of the needle (%)", fontsize=10)
        figure.suptitle(title, fontsize=12)
        bar = figure.colorbar(image, ax=axes, fraction=0.04, shrink=min(1.0, 4 / size[1]))
        bar.set_label("share of prompts with all keys found")
        bar.outline.set_visible(False)
        figure.savefig(path)


def _heat_map(axis: Axes, each: HeatMap, lengths: Sequence[int], depths: Sequence[float]) -> Any:
    axis.axis("on")
    grid = [[each.shares.get((n, depth), float("nan")) for n in lengths] for depth in depths]
    image = axis.imshow(grid, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    axis.grid(visible=False)
    axis.set_xticks([n - 0.5 for n in range(1, len(lengths))], minor=True)
    axis.set_yticks([n - 0.5 for n in range(1, len(depths))], minor=True)
    axis.grid(which="minor", color="white", linewidth=0.8)
    axis.set_title(f"\n{each.budget}", loc="left")
    axis.set_xticks(range(len(lengths)), [_thousands(n) for n in lengths], fontsize=8)
    step = max(1, len(depths) // 4)
    places = range(0, len(depths), step)
    axis.set_yticks(places, [f"{100 * depths[i]:.0f}" for i in places], fontsize=8)
    axis.tick_params(which="minor", length=0)
    axis.tick_params(length=2, labelbottom=True, labelleft=True)
    return image


def _looks(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    looks = {}
    others = [name for name in methods if name != "full" and not name.startswith("random")]
    for index, name in enumerate(others):
        looks[name] = _look(COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)])
    for name in methods:
        if name == "full":
            looks[name] = {**_look(YARDSTICK, "*"), "markersize": 10, "linestyle": "none"}
        elif name not in looks:
            looks[name] = {**_look(CONTROL, "x"), "linestyle": "--"}
    return looks


def _look(colour: str, marker: str) -> dict[str, Any]:
    return {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.5}


def _legend_columns(methods: Sequence[str]) -> int:
    return max(1, min(4, 100 // (max(map(len, methods)) + 6)))


def _shortened(method: str) -> str:
    return method if len(method) <= 44 else f"{method[:42]}…"


def _thousands(tokens: int) -> str:
    return f"{tokens / 1000:g}k" if tokens >= 1000 else str(tokens)


@contextmanager
def _style() -> Iterator[None]:
    with matplotlib.rc_context(STYLE):
        yield
