"""The visible text of an HTML page, by a parser whose time grows no faster than the page."""

import html
import re

from kvlite.documents.plain_text import declared_in, decoded
from kvlite.documents.tracker import PARSER_ERRORS, Tracker
from kvlite.documents.visible_text import NOT_TEXT, VisibleText, texts_of
from kvlite.errors import DocumentError

_PIECE = 2**16


def html_page(data: bytes, tracker: Tracker, encoding: str = "") -> str:
    """The visible text of a page, in the encoding that it names, or else the one given; errors as
    of `decoded` and `html_text`."""
    return html_text(decoded(data, tracker, declared_in(data) or encoding), tracker)


def html_text(markup: str, tracker: Tracker) -> str:
    """The visible text of a page.

    Raises:
        DocumentError: it nests deeper than any page.
        ContextError: it is longer than could fit.
    """
    return texts_of([html_events(markup, tracker)], tracker)[0]


def html_events(markup: str, tracker: Tracker) -> VisibleText:
    """What is visible of a page; errors as of `html_text`."""
    from lxml.etree import LxmlError

    page = VisibleText(tracker)
    try:
        _parse(re.sub(NOT_TEXT, "", _without_cdata(markup)), page, tracker)
    except (LxmlError, *PARSER_ERRORS) as error:
        raise DocumentError(
            f"{tracker.label} cannot be read as HTML: open it in a browser and save it as text."
        ) from error
    return page


def _parse(markup: str, page: VisibleText, tracker: Tracker) -> None:
    from lxml.etree import HTMLParser

    parser = HTMLParser(target=page, huge_tree=True, remove_comments=True, remove_pis=True)
    for start in range(0, len(markup), _PIECE):
        tracker.report(start, len(markup))
        parser.feed(markup[start : start + _PIECE])
    if markup:
        parser.close()


def _without_cdata(markup: str) -> str:
    """XHTML's CDATA sections as escaped text: HTML takes them for comments."""
    if not markup.lstrip("\ufeff \t\r\n").startswith("<?xml"):
        return markup
    first, *others = markup.split("<![CDATA[")
    parts = [first]
    for other in others:
        text, end, after = other.partition("]]>")
        parts += [html.escape(text), after] if end else ["<![CDATA[", other]
    return "".join(parts)
