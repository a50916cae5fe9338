"""HTML pages, parsed as browsers do, by a parser whose time grows no faster than the page."""

import html
import re
from collections.abc import Callable
from typing import Any

from kvlite.documents.markup import text_of
from kvlite.documents.pandoc import write_formulas
from kvlite.documents.plain_text import declared_in, decoded
from kvlite.documents.tracker import PARSER_ERRORS, Tracker
from kvlite.errors import DocumentError


def html_page(data: bytes, tracker: Tracker, encoding: str = "") -> str:
    """The visible text of a page, in the encoding that it names, or else the one given; errors as
    of `decoded` and `html_text`."""
    return html_text(decoded(data, tracker, declared_in(data) or encoding), tracker)


def html_text(
    markup: str, tracker: Tracker, *, prepare: Callable[[Any], None] | None = None
) -> str:
    """The visible text of a page.

    Args:
        prepare: what is done to its elements first.

    Raises:
        DocumentError: it nests deeper than any page.
        ContextError: it is longer than could fit.
    """
    tree = html_tree(markup, tracker)
    if prepare is not None:
        prepare(tree)
    formulas = [each for each in tree.iter("math") if not any(each.iterancestors("math"))]
    write_formulas(formulas, "html", tracker)
    return text_of(tree, tracker)


def html_tree(markup: str, tracker: Tracker) -> Any:
    """The elements of a page, as lxml's. Raises DocumentError if it cannot be parsed."""
    from lxml.etree import HTMLParser, LxmlError, fromstring

    parser = HTMLParser(huge_tree=True, remove_comments=True, remove_pis=True, encoding="utf-8")
    # The parser drops what follows these ends, which browsers show.
    text = re.sub("(?i)[\0-\x08\x0e-\x1f]|</(html|body)\\s*>", "", _without_cdata(markup))
    prefixes = {*re.findall(r"xmlns:(\w+)\s*=\s*[\"']http://www\.w3\.org/1998/Math/MathML", text)}
    if prefixes:
        text = re.sub(rf"<(/?)(?:{'|'.join(prefixes)}):", r"<\1", text)
    try:
        tree = fromstring(f"<html>{text}".encode(errors="replace"), parser)
    except (LxmlError, *PARSER_ERRORS) as error:
        raise DocumentError(
            f"{tracker.label} cannot be read as HTML: open it in a browser and save it as text."
        ) from error
    # Browsers go on to 512; what is deeper than 2,048 would be lost.
    if any(each.type_name == "ERR_RESOURCE_LIMIT" for each in parser.error_log):
        raise DocumentError(
            f"{tracker.label} nests elements more than 2,000 deep, as no page does: open it in a "
            "browser and save it as text."
        )
    return tree


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
