"""FictionBooks (.fb2), whose elements are nearly HTML's, and Jupyter notebooks (.ipynb)."""

import html
import re
from typing import Any

from kvlite.config.checked_file import from_json
from kvlite.documents.archive import tree_of
from kvlite.documents.html import html_text
from kvlite.documents.markup import text_of
from kvlite.documents.plain_text import declared_in, decoded
from kvlite.documents.tracker import Tracker

_HTML_NAMES = {
    "strikethrough": "del",
    "style": "span",
    "empty-line": "br",
    "subtitle": "p",
    "stanza": "p",
    "v": "div",
    "text-author": "div",
    "image": "img",
    "cite": "blockquote",
    "poem": "blockquote",
    "epigraph": "blockquote",
    "annotation": "blockquote",
}
# Kinds of output that are text, the simplest first; and what stands for others.
_TEXTS = "text/plain", "text", "text/markdown", "text/latex"
_NO_OUTPUT = re.compile(r"<IPython\.core\.display\.\w+ object>")
_XML_ENTITIES = frozenset(("lt", "gt", "amp", "quot", "apos"))


def fb2_text(data: bytes, tracker: Tracker) -> str:
    """The text of a book, notes where they belong.

    Raises:
        ValueError: it is damaged.
        ContextError: it is longer than could fit.
    """
    from lxml.etree import strip_elements

    def entity(found: re.Match[str]) -> str:
        return found[0] if found[1] in _XML_ENTITIES else html.escape(html.unescape(found[0]))

    markup = re.sub(
        r"^\s*<\?xml[^>]*\?>|<!DOCTYPE[^>\[]*(\[[^\]]*\]\s*)?>",
        "",
        decoded(data, tracker, declared_in(data)),
    )
    markup = re.sub(r"&(\w+);", entity, markup)
    book = tree_of([markup.encode()])
    strip_elements(book, "{*}description", "{*}binary", with_tail=False)
    for each in book.iter():
        name = each.tag.rpartition("}")[2]
        each.tag = _HTML_NAMES.get(name, name)
        if each.tag == "a" and each.get("type") == "note":
            target = next((value for key, value in each.items() if key.endswith("}href")), "")
            each.attrib.update({"role": "doc-noteref", "href": target})
    return text_of(book, tracker)


def notebook_text(data: bytes, tracker: Tracker) -> str:
    """The cells of a notebook as written, each followed by what came out of it.

    Raises:
        ValueError: it is damaged.
        ContextError: it is longer than could fit.
    """
    book, parts = from_json(data), list[str]()
    sheets = book.get("worksheets", [book])
    for cell in (cell for sheet in sheets for cell in sheet["cells"]):
        parts.append(_joined(cell.get("source", cell.get("input", ""))))
        tracker.not_read["picture"] += len(cell.get("attachments", ()))
        parts += [_output(each, tracker) for each in cell.get("outputs", ())]
    return "\n\n".join(filter(None, parts))


def _output(output: dict[str, Any], tracker: Tracker) -> str:
    found = output.get("data", output)
    pictures = [key for key in found if key.split("/")[0] in ("image", "png", "svg", "jpeg")]
    tracker.not_read["picture"] += bool(pictures)
    if "evalue" in output:
        return f"{output['ename']}: {output['evalue']}"
    said = (_joined(found.get(kind, "")) for kind in _TEXTS)
    text = next((each for each in said if each and not _NO_OUTPUT.fullmatch(each)), "")
    markup = _joined(found.get("text/html", found.get("html", "")))
    text = text or (html_text(markup, tracker) if markup.strip() else "")
    if not text and not pictures:
        for kind in output.get("data", ()):
            tracker.not_read[f"output ({kind})"] += 1
    return text


def _joined(text: str | list[str]) -> str:
    """A text, which may be given line by line, without the codes that color terminals."""
    return re.sub(r"\x1b\[[\d;]*m", "", "".join(text)).strip("\n")
