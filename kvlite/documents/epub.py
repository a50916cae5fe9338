"""Electronic books (.epub)."""

import posixpath
import re
from urllib.parse import unquote

from kvlite.documents.archive import Archive, Attributes
from kvlite.documents.html import html_page
from kvlite.documents.tracker import Tracker
from kvlite.errors import DocumentError

CONTAINER = "META-INF/container.xml"
_PAGES = ("application/xhtml+xml", "text/html")


def epub_text(data: bytes, tracker: Tracker) -> str:
    """The text of a book's files, in the order in which they are read.

    Raises:
        DocumentError: it is encrypted, or unpacks to too much.
        ContextError: it is longer than could fit.
        Stopped: someone cancelled.
    """
    archive, found = Archive(data, tracker), _Package()
    encrypted = "META-INF/encryption.xml"
    if encrypted in archive.names and b"xmlenc#aes" in archive.unpacked(encrypted):
        raise DocumentError(
            f"{tracker.label} is locked by its publisher: get it without that, or as a PDF."
        )
    archive.parse(CONTAINER, found.begin)
    archive.parse(found.path, found.begin)
    files = [found.items[each] for each in found.order if found.items[each][1] in _PAGES]
    folder, texts = posixpath.dirname(found.path), list[str]()
    for number, (name, _) in enumerate(files):
        tracker.report(number, len(files))
        path = posixpath.normpath(posixpath.join(folder, unquote(name)))
        # The title of a file is that of the book again, or the file's name.
        markup = re.sub(rb"(?s)<title\b.*?</title>", b"", archive.unpacked(path), count=1)
        texts.append(html_page(markup, tracker))
    return "\n\n".join(filter(None, texts))


class _Package:
    """What a book's package names.

    Attributes:
        path: of the package itself.
        items: name and type of each file, by its id.
        order: ids in the order of reading.
    """

    def __init__(self) -> None:
        self.path = ""
        self.items = dict[str, tuple[str, str]]()
        self.order = list[str]()

    def begin(self, name: str, attributes: Attributes) -> None:
        """Look at an element of the container or the package."""
        if name == "rootfile":
            self.path = self.path or attributes["full-path"]
        elif name == "item":
            self.items[attributes["id"]] = attributes["href"], attributes["media-type"]
        elif name == "itemref":
            self.order.append(attributes["idref"])
