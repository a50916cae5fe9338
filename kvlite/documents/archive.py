"""Parts of a document that is a zip archive: unpacked and parsed piece by piece, within limits."""

import io
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from kvlite.config.units import readable
from kvlite.documents.tracker import PARSER_ERRORS, Tracker
from kvlite.errors import DocumentError

# All markup of a document; that of a book of 1,000 pages has some 30 MiB.
UNPACKED_LIMIT = 128 * 2**20
# Markup of words packs to a tenth, of tables full of the same to a fiftieth.
_DENSEST, _DENSE_FROM = 150, 16 * 2**20
# Word writes some dozens, and one for each picture.
_MOST_PARTS = 20_000
_PIECE = 2**16
# Parsers read nothing but what they are given.
_CLOSED: dict[str, Any] = {
    "resolve_entities": False,
    "no_network": True,
    "load_dtd": False,
    "huge_tree": True,
    "remove_comments": True,
    "remove_pis": True,
}


def names_in(data: bytes) -> list[str]:
    """The names of an archive's parts; none if it is damaged, or has more than any document."""
    if data.count(b"PK\1\2") > _MOST_PARTS:
        return []
    try:
        return zipfile.ZipFile(io.BytesIO(data)).namelist()
    except PARSER_ERRORS:
        return []


def tree_of(pieces: Iterable[bytes]) -> Any:
    """The elements of a text in XML, as lxml's; comments are left out. Nothing else is read.

    Raises:
        ValueError: it is damaged, has entities of its own, or nests more than 2,048 deep.
    """
    from lxml.etree import Entity, LxmlError, XMLParser

    parser = XMLParser(**_CLOSED)
    try:
        for piece in pieces:
            parser.feed(piece)
        tree = parser.close()
    except LxmlError as error:
        raise ValueError(str(error)) from error
    declared = tree.getroottree().docinfo.internalDTD
    own = [] if declared is None else declared.entities()
    if own or next(tree.iter(Entity), None) is not None:
        raise ValueError("it has entities of its own")
    return tree


class Archive:
    """The parts of a document; how much they unpack to is counted and limited.

    Raises:
        DocumentError: it has more parts than any document.
    """

    def __init__(self, data: bytes, tracker: Tracker) -> None:
        self.tracker = tracker
        if data.count(b"PK\1\2") > _MOST_PARTS:
            self._refuse(f"has more than {_MOST_PARTS:,} parts")
        self._zip = zipfile.ZipFile(io.BytesIO(data))
        self._packed = self._unpacked = 0
        self.names = frozenset(self._zip.namelist())

    def unpacked(self, part: str) -> bytes:
        """A whole part. Raises as `tree`."""
        return b"".join(self._pieces(part))

    def require_small(self) -> None:
        """Unpack everything once, for parsers that have no limits. Raises as `tree`."""
        for part in self.names:
            for _ in self._pieces(part):
                pass

    def tree(self, part: str) -> Any:
        """A part's elements. Raises as `tree_of`, and DocumentError if it unpacks to too much."""
        return tree_of(self._pieces(part))

    def elements(self, part: str, *names: str) -> Iterator[Any]:
        """Those of a part's elements that have one of some names in any namespace, one at a time:
        each is emptied when the next is asked for. Progress is reported.

        Raises:
            DocumentError: it unpacks to too much.
            ValueError: it is damaged, or declares a type of document.
        """
        from lxml.etree import LxmlError, XMLPullParser

        wanted = [f"{{*}}{name}" for name in names]
        parser = XMLPullParser(events=("end",), tag=wanted, **_CLOSED)
        done, total = 0, self._zip.getinfo(part).file_size
        try:
            for piece in self._pieces(part):
                done += len(piece)
                self.tracker.report(min(done, total), total)
                parser.feed(piece)
                for _, element in parser.read_events():
                    if element.getroottree().docinfo.internalDTD is not None:
                        raise ValueError(f"{part} declares a type of document")
                    yield element
                    element.clear()
                    while element.getprevious() is not None:
                        del element.getparent()[0]
            parser.close()
        except LxmlError as error:
            raise ValueError(str(error)) from error

    def count(self, size: int) -> None:
        """Count what comes out of the archive.

        Raises:
            DocumentError: it is too much.
        """
        self._unpacked += size
        if self._unpacked > UNPACKED_LIMIT:
            self._refuse(f"unpacks to more than {readable(UNPACKED_LIMIT)} of text")
        if _DENSE_FROM < self._unpacked > _DENSEST * self._packed:
            self._refuse(f"unpacks to more than {_DENSEST} times its size")

    def _pieces(self, part: str) -> Iterator[bytes]:
        """A part, unpacked; what comes out is counted, whatever size the archive states."""
        info = self._zip.getinfo(part)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{part} is packed as no document is")
        self._packed += info.compress_size
        with self._zip.open(info) as file:
            while piece := file.read(_PIECE):
                self.count(len(piece))
                yield piece

    def _refuse(self, why: str) -> NoReturn:
        raise DocumentError(
            f"{self.tracker.label} {why}, which no document needs: get it anew from a source "
            "that you trust, or save it as text."
        )
