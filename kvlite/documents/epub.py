"""Electronic books (.epub)."""

import posixpath
import re
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit

from kvlite.documents.archive import Archive
from kvlite.documents.html import html_text
from kvlite.documents.plain_text import declared_in, decoded
from kvlite.documents.tracker import PARSER_ERRORS, Tracker
from kvlite.errors import DocumentError

_CONTAINER = "META-INF/container.xml"
_PAGES = ("application/xhtml+xml", "text/html", "text/x-oeb1-document")


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
    package, book = archive.tree(path), _Book(archive, tracker)
    items = {each.get("id"): each for each in package.iter("{*}item")}
    spine = sorted(package.iter("{*}itemref"), key=lambda each: each.get("linear") == "no")
    chapters = list[str]()
    for number, itemref in enumerate(spine):
        tracker.report(number, len(spine))
        item = items.get(itemref.get("idref"))
        if item is None:
            tracker.not_read[f"damaged part ({itemref.get('idref')})"] += 1
        else:
            chapters += book.chapter(item, path)
    if not chapters:
        raise ValueError("none of its parts can be read")
    return "\n\n".join(filter(None, chapters))


class _Book:
    """Reads the files of a book."""

    def __init__(self, archive: Archive, tracker: Tracker) -> None:
        self._archive, self._tracker = archive, tracker
        self._sheet = cache(self._read_sheet)

    def chapter(self, item: Any, package: str) -> list[str]:
        """The text of one file; empty if it is none, or damaged."""
        name, kind = item.get("href", ""), item.get("media-type", "").lower()
        if kind.startswith("image/"):
            self._tracker.not_read["picture"] += 1
        elif kind not in _PAGES and not re.search(r"(?i)html?$", urlsplit(name).path):
            self._tracker.not_read[f"part ({name})"] += 1
        elif "nav" not in item.get("properties", "").split():
            path = _path(name, package)
            try:
                data = self._archive.unpacked(path)
            except PARSER_ERRORS:
                self._tracker.not_read[f"damaged part ({name})"] += 1
                return []
            try:
                text = decoded(data, self._tracker, declared_in(data))
                return [
                    html_text(text, self._tracker, prepare=lambda page: self._prepare(page, path))
                ]
            except DocumentError:
                self._tracker.not_read[f"damaged part ({name})"] += 1
        return []

    def _prepare(self, page: Any, path: str) -> None:
        """Take out the title, which is that of the book or the file's name, and put style sheets
        where they are referred to."""
        for each in list(page.iterfind("head/title")):
            each.clear(keep_tail=True)
        for link in page.iter("link"):
            if "stylesheet" in link.get("rel", "").lower().split():
                link.tag, link.text = "style", self._sheet(_path(link.get("href", ""), path))

    def _read_sheet(self, path: str) -> str:
        if path not in self._archive.names:
            return ""
        try:
            return self._archive.unpacked(path).decode(errors="replace")
        except PARSER_ERRORS:
            return ""


def _path(reference: str, part: str) -> str:
    """The part of the archive that another refers to."""
    name = unquote(urlsplit(reference).path)
    return posixpath.normpath(posixpath.join(posixpath.dirname(part), name))
