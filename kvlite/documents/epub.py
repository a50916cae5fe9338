"""Electronic books (.epub)."""

import posixpath
import re
from typing import Any
from urllib.parse import unquote

from kvlite.documents.archive import Archive
from kvlite.documents.html import html_text
from kvlite.documents.plain_text import declared_in, decoded
from kvlite.documents.tracker import PARSER_ERRORS, Tracker
from kvlite.errors import DocumentError

_CONTAINER = "META-INF/container.xml"
_PAGES = ("application/xhtml+xml", "text/html")


def epub_text(data: bytes, tracker: Tracker) -> str:
    """The text of a book's files, in the order in which they are read; what stands outside that
    order comes last. A damaged file is left out and named.

    Raises:
        DocumentError: it is encrypted, or unpacks to too much.
        ContextError: it is longer than could fit.
    """
    archive = Archive(data, tracker)
    encrypted = "META-INF/encryption.xml"
    if encrypted in archive.names and b"xmlenc#aes" in archive.unpacked(encrypted):
        raise DocumentError(
            f"{tracker.label} is locked by its publisher: get it without that, or as a PDF."
        )
    path = next(archive.tree(_CONTAINER).iter("{*}rootfile")).attrib["full-path"]
    package = archive.tree(path)
    items = {each.get("id"): each for each in package.iter("{*}item")}
    spine = sorted(package.iter("{*}itemref"), key=lambda each: each.get("linear") == "no")
    chapters = list[str]()
    for number, itemref in enumerate(spine):
        tracker.report(number, len(spine))
        item = items.get(itemref.get("idref"))
        if item is None:
            tracker.not_read[f"damaged part ({itemref.get('idref')})"] += 1
        else:
            chapters += _chapter(archive, item, posixpath.dirname(path), tracker)
    if not chapters:
        raise ValueError("none of its parts can be read")
    return "\n\n".join(filter(None, chapters))


def _chapter(archive: Archive, item: Any, folder: str, tracker: Tracker) -> list[str]:
    """The text of one file; empty if it is none, or damaged."""
    name, kind = item.attrib["href"], item.attrib["media-type"]
    if kind.startswith("image/"):
        tracker.not_read["picture"] += 1
    elif kind not in _PAGES:
        tracker.not_read[f"part ({name})"] += 1
    elif "nav" not in item.get("properties", "").split():
        try:
            data = archive.unpacked(posixpath.normpath(posixpath.join(folder, unquote(name))))
        except PARSER_ERRORS:
            tracker.not_read[f"damaged part ({name})"] += 1
            return []
        # The title of a file is that of the book again, or the file's name.
        markup = re.sub(rb"(?s)<title\b.*?</title>", b"", data, count=1)
        try:
            return [html_text(decoded(markup, tracker, declared_in(markup)), tracker)]
        except DocumentError:
            tracker.not_read[f"damaged part ({name})"] += 1
    return []
