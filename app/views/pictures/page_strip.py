"""The pages of documents, by how much of them an answer was made from."""

from collections.abc import Sequence
from itertools import groupby
from textwrap import wrap

from ...engine.pages import PageShare
from . import svg

LEFT = 30
# How far above the mean a page stands out, and how many are named.
ABOVE, NAMED = 1.15, 4
# With more pages than this in a document, its cells are half as large.
MANY = 400
LINE = 64


def draw_pages(pages: Sequence[PageShare], name: str = "Pages the answer was made from") -> str:
    """SVG of a cell for each page, stronger the more of it is held. Pages that stand out are
    framed, and named in words."""
    said = told(pages)
    if not pages:
        return svg.picture(name, said, 24, [svg.label(0, 16, said)])
    lines = wrap(said, LINE, break_long_words=True)
    content = [svg.label(0, 14 + 16 * at, text) for at, text in enumerate(lines)]
    y = 16.0 * len(lines) + 8
    scale = svg.ceiling(max(page.held for page in pages))
    content.append(_legend(pages, y, scale))
    y += 24
    framed = {id(page) for page in _best(pages)}
    for _, group in groupby(pages, key=lambda page: page.place):
        own = [*group]
        content.append(
            svg.label(0, y + 12, svg.short(svg.shown(own[0].document), 52), font_weight="bold")
        )
        y += 20
        across, size = (40, 10) if len(own) > MANY else (20, 20)
        for at, page in enumerate(own):
            down, along = divmod(at, across)
            top = y + down * size
            if not along:
                content.append(svg.small(LEFT - 6, top + size / 2 + 3.5, str(at + 1), "end"))
            left = LEFT + along * size
            content.append(_cell(page, left, top, size - 2, scale, framed=id(page) in framed))
        y += -(-len(own) // across) * size + 8
    return svg.picture(name, said, y, content)


def told(pages: Sequence[PageShare]) -> str:
    """The pages in words: which stand out, and of which nothing is held."""
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
    elif (low := svg.percent(min(held))) == (high := svg.percent(max(held))):
        said = [f"All pages are held alike, {low} of each."]
    else:
        said = [f"No page stands out: {low} to {high} of each is held."]
    none = [page.label for page in written if not page.held]
    if none:
        count = f"{len(none):,} pages" if len(none) > 1 else "1 page"
        named = count if many or len(none) > NAMED else ", ".join(none)
        said.append(f"Nothing is held of {named}.")
    came = sorted((page for page in written if page.back), key=lambda page: -page.back)[:NAMED]
    if came:
        listed = _listed(came, [page.back for page in came], many)
        said.append(f"While answering came back: {listed}.")
    return " ".join(said)


def _best(pages: Sequence[PageShare]) -> list[PageShare]:
    """Pages that stand out, the one most of which is held first."""
    written = [page for page in pages if page.tokens]
    mean = sum(page.held for page in written) / max(1, len(written))
    above = [page for page in written if page.held > ABOVE * mean]
    return sorted(above, key=lambda page: -page.held)[:NAMED]


def _listed(pages: Sequence[PageShare], shares: Sequence[float], many: bool) -> str:
    """Pages with their shares, document by document."""
    said: dict[int, list[str]] = {}
    names: dict[int, str] = {}
    for page, share in zip(pages, shares, strict=True):
        said.setdefault(page.place, []).append(f"{page.label} ({svg.percent(share)})")
        names[page.place] = f" of {svg.short(svg.shown(page.document), 24)}" if many else ""
    return "; ".join(f"{', '.join(said[place])}{names[place]}" for place in said)


def _legend(pages: Sequence[PageShare], y: float, scale: float) -> str:
    parts = [svg.small(0, y + 9, "0%")]
    parts += [
        svg.rect(22 + 12 * at, y, 12, 9, svg.HELD, _strength((at + 0.5) / 6)) for at in range(6)
    ]
    parts.append(svg.small(98, y + 9, f"{svg.percent(scale)} of a page held"))
    if any(page.back for page in pages):
        parts.append(svg.rect(234, y, 12, 9, svg.BACK))
        parts.append(svg.small(250, y + 9, "came back while answering"))
    return "".join(parts)


def _strength(part: float) -> float:
    """The opacity for a part of the scale; the smallest part is still visible."""
    return 0.12 + 0.88 * min(1, part)


def _cell(page: PageShare, x: float, y: float, size: float, scale: float, *, framed: bool) -> str:
    """A page, with what came back of it at the bottom."""
    if not page.tokens:
        about = f"{page.label}: no text"
    else:
        back = f", {svg.percent(page.back)} came back while answering" if page.back else ""
        about = f"{page.label}: {svg.percent(page.held)} held{back}; {page.tokens:,} tokens"
    parts = [svg.title(about)]
    if not page.held:
        parts.append(svg.rect(x, y, size, size, opacity=svg.TRACK))
    else:
        low = size * min(1, page.back / page.held)
        strength = _strength(page.held / scale)
        if low < size:
            parts.append(svg.rect(x, y, size, size - low, svg.HELD, strength))
        if low:
            parts.append(svg.rect(x, y + size - low, size, low, svg.BACK, strength))
    if framed:
        edge = f"M{x - 0.5:.1f} {y - 0.5:.1f}h{size + 1}v{size + 1}h-{size + 1}z"
        parts.append(svg.line(edge, stroke_width=1.5))
    return svg.element("g", "".join(parts))
