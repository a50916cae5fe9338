"""Electronic books (.epub)."""

import posixpath
import re
from urllib.parse import unquote

from kvlite.documents.archive import Archive, Attributes
from kvlite.documents.html import html_events
from kvlite.documents.plain_text import declared_in, decoded
from kvlite.documents.tracker import PARSER_ERRORS, Tracker
from kvlite.documents.visible_text import VisibleText, texts_of
from kvlite.errors import DocumentError

CONTAINER = "META-INF/container.xml"
_PAGES = ("application/xhtml+xml", "text/html")


def epub_text(data: bytes, tracker: Tracker) -> str:
    """The text of a book's files, in the order in which they are read; what stands outside that
    order comes last. A damaged file is left out and named.

    Raises:
        DocumentError: it is encrypted, or unpacks to too much.
        ContextError: it is longer than could fit.
    """
    archive, found = Archive(data, tracker), _Package()
    encrypted = "META-INF/encryption.xml"
    if encrypted in archive.names and b"xmlenc#aes" in archive.unpacked(encrypted):
        raise DocumentError(
            f"{tracker.label} is locked by its publisher: get it without that, or as a PDF."
        )
    archive.parse(CONTAINER, found.begin)
    archive.parse(found.path, found.begin)
    pages, order = list[VisibleText](), found.order + found.beside
    for number, id in enumerate(order):
        tracker.report(number, len(order))
        name, kind, properties = found.items.get(id, (id, _PAGES[0], ""))
        if kind.startswith("image/"):
            tracker.not_read["picture"] += 1
        elif kind not in _PAGES:
            tracker.not_read[f"part ({name})"] += 1
        elif "nav" not in properties.split():
            path = posixpath.join(posixpath.dirname(found.path), unquote(name))
            page = _page(archive, posixpath.normpath(path), tracker)
            if page is None:
                tracker.not_read[f"damaged part ({name})"] += 1
            else:
                pages.append(page)
    if not pages:
        raise ValueError("none of its parts can be read")
    return "\n\n".join(filter(None, texts_of(pages, tracker)))


def _page(archive: Archive, path: str, tracker: Tracker) -> VisibleText | None:
    """What is visible of one file; None if it is damaged."""
    try:
        data = archive.unpacked(path)
    except PARSER_ERRORS:
        return None
    # The title of a file is that of the book again, or the file's name.
    markup = re.sub(rb"(?s)<title\b.*?</title>", b"", data, count=1)
    try:
        return html_events(decoded(markup, tracker, declared_in(markup)), tracker)
    except DocumentError:
        return None


class _Package:
    """What a book's package names.

    Attributes:
        path: of the package itself.
        items: name, type and properties of each file, by its id.
        order: ids in the order of reading.
        beside: ids outside that order, such as those of notes.
    """

    def __init__(self) -> None:
        self.path = ""
        self.items = dict[str, tuple[str, str, str]]()
        self.order, self.beside = list[str](), list[str]()

    def begin(self, name: str, attributes: Attributes) -> None:
        """Look at an element of the container or the package."""
        if name == "rootfile":
            self.path = self.path or attributes["full-path"]
        elif name == "item":
            about = attributes["href"], attributes["media-type"], attributes.get("properties", "")
            self.items[attributes["id"]] = about
        elif name == "itemref":
            (self.beside if attributes.get("linear") == "no" else self.order).append(
                attributes["idref"]
            )
