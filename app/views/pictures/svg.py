"""Parts of pictures: elements, text, cells, legends.

Colours are blue and orange, which colour-blind people tell apart, in strengths over whatever is
behind them; text and lines take the page's colour. So a picture is right on light and dark pages,
and a page may set `--kvlite-held` and `--kvlite-back`.
"""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from unicodedata import category

WIDTH = 440
HELD, BACK = "var(--kvlite-held, #3d85c6)", "var(--kvlite-back, #e8820c)"
TRACK = 0.09
SMALL, USUAL = 11, 12

# Up to how many per cent each strength stands for.
STEPS = (10, 25, 50, 75, 99, 100)
STRENGTHS = (0.3, 0.44, 0.58, 0.72, 0.86, 1)


def shown(text: str) -> str:
    """Text that is what it looks like: what no XML may have, and what turns or hides others, is
    shown as a replacement character."""
    hidden = ("Cc", "Cf", "Cs", "Co", "Cn")
    return "".join("\ufffd" if category(each) in hidden else each for each in text)


def element(name: str, content: str = "", **attributes: object) -> str:
    """An element; `stroke_width` is written `stroke-width`.

    Args:
        content: elements, or text that is escaped.
    """
    given = "".join(
        f' {key.replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items()
    )
    return f"<{name}{given}>{content}</{name}>" if content else f"<{name}{given}/>"


def title(text: str) -> str:
    """What is shown where the pointer rests."""
    return element("title", escape(shown(text)))


def label(x: float, y: float, text: str, **attributes: object) -> str:
    """A line of text whose baseline begins at a point."""
    return element("text", escape(shown(text)), x=number(x), y=number(y), **attributes)


def number(value: float) -> str:
    """A coordinate, as short as can be."""
    return f"{value:.1f}".removesuffix(".0")


def picture(name: str, told: str, height: float, content: Iterable[str]) -> str:
    """A whole picture, as wide as the page lets it.

    Args:
        name: what it is.
        told: what is to be seen in it, for those who cannot.
    """
    return element(
        "svg",
        title(name) + element("desc", escape(shown(told))) + "".join(content),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {number(height)}",
        role="img",
        aria_label=shown(f"{name}. {told}"),
        font_family="system-ui, sans-serif",
        font_size=USUAL,
        fill="currentColor",
        style="display:block;width:100%;max-width:720px;height:auto",
    )


def step(per_cent: int) -> int:
    """Which of the strengths stands for it, from 0; -1 for none."""
    return -1 if per_cent == 0 else next(at for at, most in enumerate(STEPS) if per_cent <= most)


def runs(steps: Sequence[int]) -> list[tuple[int, int, int]]:
    """Equal neighbours together: (step, first, how many)."""
    made, at = [], 0
    for each, alike in groupby(steps):
        count = len(list(alike))
        made.append((each, at, count))
        at += count
    return made


def row(steps: Sequence[int], y: float, height: float, colour: str) -> str:
    """A row of cells one unit wide, a path for each strength."""
    by_step: dict[int, list[str]] = {}
    for each, at, count in runs(steps):
        if each >= 0:
            by_step.setdefault(each, []).append(f"M{at} {number(y)}h{count}")
    paths = [
        element("path", d="".join(by_step[each]), stroke_opacity=STRENGTHS[each])
        for each in sorted(by_step)
    ]
    if not paths:
        return ""
    return element("g", "".join(paths), stroke=colour, stroke_width=number(height), fill="none")


def steps_legend(x: float, y: float, colour: str) -> str:
    """The strengths side by side, from the weakest."""
    size = 9
    return "".join(
        element(
            "rect",
            x=number(x + at * size),
            y=number(y),
            width=size,
            height=size,
            fill=colour,
            fill_opacity=strength,
        )
        for at, strength in enumerate(STRENGTHS)
    )


def percent(share: float) -> str:
    """A share as people write it: something is not 0%, and not all is not 100%."""
    if 0 < share < 0.01:
        return "under 1%"
    return f"{min(99, round(100 * share)) if share < 1 else 100}%"


def short(text: str, most: int) -> str:
    """Text of so many characters at most, its end kept."""
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end - 1]}…{text[-end:]}"


def ceiling(share: float) -> float:
    """A round share that is no less, for a scale's end."""
    ends = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
    return next((each for each in ends if share <= each), 1.0)


def spaced(size: float, least: float) -> int:
    """Which of many things of a size are numbered, every one or every so many, so that numbers
    have room."""
    return next(each for each in (1, 2, 5, 10, 20, 50, 100, 1000) if each * size >= least)
