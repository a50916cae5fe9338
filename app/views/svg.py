"""SVG elements and text.

Colors are blue and orange, which color-blind people can tell apart, at varying opacity; text and
lines take the page's color. So pictures suit light and dark pages, and a page may set
`--kvlite-held` and `--kvlite-back`.
"""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

WIDTH = 440
HELD, BACK = "var(--kvlite-held, #3d85c6)", "var(--kvlite-back, #e8820c)"
# The opacity of a cell that holds nothing.
TRACK = 0.09

# Up to how many per cent each opacity stands for.
STEPS = (10, 25, 50, 75, 99, 100)
STRENGTHS = (0.3, 0.44, 0.58, 0.72, 0.86, 1)


def element(name: str, content: str = "", **attributes: object) -> str:
    """An element around `content`, which is SVG already; `stroke_width` becomes `stroke-width`."""
    given = "".join(
        f' {key.replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items()
    )
    return f"<{name}{given}>{content}</{name}>" if content else f"<{name}{given}/>"


def title(text: str) -> str:
    """A tooltip."""
    return element("title", escape(text))


def label(x: float, y: float, text: str, **attributes: object) -> str:
    """A line of text whose baseline starts at a point."""
    return element("text", escape(text), x=number(x), y=number(y), **attributes)


def small(x: float, y: float, text: str, anchor: str = "start") -> str:
    """A line of small text that starts or ends at a point, or is centered there."""
    return label(x, y, text, font_size=11, text_anchor=anchor)


def rect(
    x: float, y: float, width: float, height: float, fill: str = "currentColor", opacity: float = 1
) -> str:
    """A filled rectangle."""
    return element(
        "rect",
        x=number(x),
        y=number(y),
        width=number(width),
        height=number(height),
        fill=fill,
        fill_opacity=f"{opacity:.2f}",
    )


def line(path: str, **attributes: object) -> str:
    """A line along a path, in the color of the text."""
    return element("path", "", d=path, stroke="currentColor", fill="none", **attributes)


def number(value: float) -> str:
    """A coordinate, as short as can be."""
    return f"{value:.1f}".removesuffix(".0")


def picture(name: str, told: str, height: float, content: Iterable[str]) -> str:
    """A whole picture, as wide as the page lets it; `told` is what it shows, for screen readers."""
    return element(
        "svg",
        title(name) + element("desc", escape(told)) + "".join(content),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {number(height)}",
        role="img",
        aria_label=f"{name}. {told}",
        font_family="system-ui, sans-serif",
        font_size=12,
        fill="currentColor",
        style="display:block;width:100%;max-width:720px;height:auto",
    )


def step(per_cent: int) -> int:
    """The index of the opacity that stands for a percentage; -1 for none."""
    return -1 if per_cent == 0 else next(at for at, most in enumerate(STEPS) if per_cent <= most)


def row(steps: Sequence[int], y: float, height: float, color: str) -> str:
    """A row of cells one unit wide, with one path for each opacity."""
    by_step: dict[int, list[str]] = {}
    at = 0
    for each, alike in groupby(steps):
        count = len([*alike])
        if each >= 0:
            by_step.setdefault(each, []).append(f"M{at} {number(y)}h{count}")
        at += count
    paths = [
        element("path", d="".join(by_step[each]), stroke_opacity=STRENGTHS[each])
        for each in sorted(by_step)
    ]
    if not paths:
        return ""
    return element("g", "".join(paths), stroke=color, stroke_width=number(height), fill="none")


def steps_legend(x: float, y: float, color: str) -> str:
    """The opacities side by side, the weakest first."""
    return "".join(
        rect(x + 9 * at, y, 9, 9, color, strength) for at, strength in enumerate(STRENGTHS)
    )


def percent(share: float) -> str:
    """A share for people: anything above 0 is not 0%, and anything below 1 is not 100%."""
    if 0 < share < 0.01:
        return "under 1%"
    return f"{min(99, round(100 * share)) if share < 1 else 100}%"


def ceiling(share: float) -> float:
    """The next round share, for the end of a scale."""
    ends = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
    return next((each for each in ends if share <= each), 1.0)


def spaced(size: float, least: float) -> int:
    """Every how many rows or columns of a size get a number, so that numbers do not overlap."""
    return next(each for each in (1, 2, 5, 10, 20, 50, 100, 1000) if each * size >= least)
