"""The pages of documents, by how much of them an answer was made from."""

from collections.abc import Sequence
from itertools import groupby
from textwrap import wrap

from ...engine.pages import PageShare
from .svg import (
    BACK,
    HELD,
    SMALL,
    TRACK,
    ceiling,
    element,
    label,
    number,
    percent,
    picture,
    short,
    shown,
    title,
)

LEFT = 30
# How far above the mean a page is that stands out, and how many are named.
ABOVE, NAMED = 1.15, 4
# Beyond so many pages of a document cells are half as large.
MANY = 400
LINE = 64


def draw_pages(pages: Sequence[PageShare], name: str = "Pages the answer was made from") -> str:
    """SVG of a cell a page, the stronger the more of it is held; those that stand out are framed,
    and named in words."""
    said = told(pages)
    if not pages:
        return picture(name, said, 24, [label(0, 16, said)])
    lines = wrap(said, LINE, break_long_words=True)
    content = [label(0, 14 + 16 * at, line) for at, line in enumerate(lines)]
    y = 16.0 * len(lines) + 8
    scale = ceiling(max(page.held for page in pages))
    content.append(_legend(pages, y, scale))
    y += 24
    framed = {id(page) for page in _best(pages)}
    for _, group in groupby(pages, key=lambda page: page.place):
        own = [*group]
        content.append(label(0, y + 12, short(shown(own[0].document), 52), font_weight="bold"))
        y += 20
        across, size = (40, 10) if len(own) > MANY else (20, 20)
        for at, page in enumerate(own):
            down, along = divmod(at, across)
            if not along:
                told_at = y + down * size + size / 2 + 3.5
                content.append(
                    label(LEFT - 6, told_at, str(at + 1), font_size=SMALL, text_anchor="end")
                )
            place = (LEFT + along * size, y + down * size, size - 2)
            content.append(_cell(page, *place, scale, framed=id(page) in framed))
        y += -(-len(own) // across) * size + 8
    return picture(name, said, y, content)


def told(pages: Sequence[PageShare]) -> str:
    """The pages in words: which of them stand out, and of which nothing is held."""
    written = [page for page in pages if page.tokens]
    if not written:
        return "No pages were read."
    held = [page.held for page in written]
    if min(held) >= 1:
        return "The answer was made from all pages, whole."
    if not any(held):
        return "Nothing is held of any page."
    many = len({page.place for page in pages}) > 1
    best = _best(pages)
    if best:
        said = [f"Held most: {_listed(best, [page.held for page in best], many)}."]
    elif (low := percent(min(held))) == (high := percent(max(held))):
        said = [f"All pages are held alike, {low} of each."]
    else:
        said = [f"No page stands out: {low} to {high} of each is held."]
    none = [page for page in written if not page.held]
    if none:
        said.append(f"Nothing is held of {_named(none, many)}.")
    came = sorted((page for page in written if page.back), key=lambda page: -page.back)[:NAMED]
    if came:
        listed = _listed(came, [page.back for page in came], many)
        said.append(f"While answering came back: {listed}.")
    return " ".join(said)


def _best(pages: Sequence[PageShare]) -> list[PageShare]:
    """Pages that stand out, the one most of which is held first."""
    written = [page for page in pages if page.tokens]
    mean = _mean([page.held for page in written])
    above = [page for page in written if page.held > ABOVE * mean]
    return sorted(above, key=lambda page: -page.held)[:NAMED]


def _mean(shares: Sequence[float]) -> float:
    return sum(shares) / max(1, len(shares))


def _listed(pages: Sequence[PageShare], shares: Sequence[float], many: bool) -> str:
    """Pages with their shares, document by document."""
    said: dict[int, list[str]] = {}
    names: dict[int, str] = {}
    for page, share in zip(pages, shares, strict=True):
        said.setdefault(page.place, []).append(f"{page.label} ({percent(share)})")
        names[page.place] = f" of {short(shown(page.document), 24)}" if many else ""
    return "; ".join(f"{', '.join(said[place])}{names[place]}" for place in said)


def _named(pages: Sequence[PageShare], many: bool) -> str:
    """Pages, or how many they are."""
    if many or len(pages) > NAMED:
        return f"{len(pages):,} pages" if len(pages) > 1 else "1 page"
    return ", ".join(page.label for page in pages)


def _legend(pages: Sequence[PageShare], y: float, scale: float) -> str:
    parts = [label(0, y + 9, "0%", font_size=SMALL)]
    parts += [_filled(22 + 12 * at, y, 12, 9, HELD, _strength((at + 0.5) / 6)) for at in range(6)]
    parts.append(label(98, y + 9, f"{percent(scale)} of a page held", font_size=SMALL))
    if any(page.back for page in pages):
        parts.append(_filled(234, y, 12, 9, BACK, 1))
        parts.append(label(250, y + 9, "came back while answering", font_size=SMALL))
    return "".join(parts)


def _strength(part: float) -> float:
    """Of a colour, for a part of the scale: something is never invisible."""
    return 0.12 + 0.88 * min(1, part)


def _filled(x: float, y: float, width: float, height: float, colour: str, strength: float) -> str:
    return element(
        "rect",
        x=number(x),
        y=number(y),
        width=number(width),
        height=number(height),
        fill=colour,
        fill_opacity=f"{strength:.2f}",
    )


def _cell(page: PageShare, x: float, y: float, size: float, scale: float, *, framed: bool) -> str:
    """A page, what came back of it at the bottom."""
    if not page.tokens:
        about = f"{page.label}: no text"
    else:
        back = f", {percent(page.back)} came back while answering" if page.back else ""
        about = f"{page.label}: {percent(page.held)} held{back}; {page.tokens:,} tokens"
    parts = [title(about)]
    if not page.held:
        parts.append(_filled(x, y, size, size, "currentColor", TRACK))
    else:
        low = size * min(1, page.back / page.held)
        strength = _strength(page.held / scale)
        if low < size:
            parts.append(_filled(x, y, size, size - low, HELD, strength))
        if low:
            parts.append(_filled(x, y + size - low, size, low, BACK, strength))
    if framed:
        parts.append(
            element(
                "rect",
                x=number(x - 0.5),
                y=number(y - 0.5),
                width=number(size + 1),
                height=number(size + 1),
                fill="none",
                stroke="currentColor",
                stroke_width=1.5,
            )
        )
    return element("g", "".join(parts))
