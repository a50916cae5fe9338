"""Word documents: the parts of the archive, and how they make up one text.

Markup is parsed while it is unpacked, so it is never in memory as a whole.
"""

import io
import posixpath
import zipfile
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn
from xml.parsers import expat

from kvlite.config.units import readable
from kvlite.documents.tracker import PARSER_ERRORS, Tracker
from kvlite.documents.word_lists import Lists
from kvlite.documents.word_text import Attributes, LocalNames, Notes, WordText
from kvlite.errors import DocumentError

# All markup of a document; that of a book of 1,000 pages has some 30 MiB.
UNPACKED_LIMIT = 128 * 2**20
# Markup of words packs to a tenth, of tables full of the same to a fiftieth.
_DENSEST, _DENSE_FROM = 150, 16 * 2**20
# Word writes some dozens, and one for each picture.
_MOST_PARTS = 20_000
_PIECE = 2**16
_START = "word/document"
_KINDS = ("header", "footer", "footnotes", "endnotes", "comments", "numbering", "styles")


def is_word(data: bytes) -> bool:
    """Whether an archive is a Word document."""
    if data.count(b"PK\1\2") > _MOST_PARTS:
        return False
    try:
        names = zipfile.ZipFile(io.BytesIO(data)).namelist()
    except PARSER_ERRORS:
        return False
    return any(name.startswith(_START) and name.endswith(".xml") for name in names)


def word_text(data: bytes, tracker: Tracker) -> str:
    """The text of a .docx file: a line for each paragraph and each table row. Notes follow the
    paragraph that refers to them, headers come first and footers last.

    Raises:
        DocumentError: it is damaged, no Word document, or unpacks to too much.
        ContextError: it is longer than could fit.
        Stopped: someone cancelled.
    """
    if data.startswith(b"\xd0\xcf\x11\xe0"):
        raise DocumentError(
            f"{tracker.label} is an old Word file or locked by a password: save it in Word as "
            ".docx without a password."
        )
    try:
        return _text(_Package(data, tracker), tracker)
    except (expat.ExpatError, *PARSER_ERRORS) as error:
        raise DocumentError(
            f"{tracker.label} is damaged or no Word document: get it anew, or open it in Word or "
            "LibreOffice and save it again as .docx."
        ) from error


def _text(package: "_Package", tracker: Tracker) -> str:
    related = package.related(package.start)

    def parts(*kinds: str) -> Iterator[str]:
        return (each.target for kind in kinds for each in related if each.kind == kind)

    lists, notes = Lists(), Notes()
    for part in parts("styles", "numbering"):
        package.parse(part, lists.begin)
    for part in parts("footnotes", "endnotes", "comments"):
        package.read(part, WordText(tracker, notes=notes))
    body = WordText(tracker, notes=notes, lists=lists)
    lines = package.read(package.start, body, shown=True)
    beside = {kind: list[str]() for kind in body.references}
    for kind, ids in body.references.items():
        named = [each for each in related if each.id in ids]
        tracker.not_read[kind] += len({*ids} - {each.id for each in named})
        for part in dict.fromkeys(each.target for each in named):
            inside = package.read(part, WordText(tracker, notes=Notes(), lists=lists))
            beside[kind] += [line for line in inside if line.strip()]
    header, footer = (dict.fromkeys(beside[kind]) for kind in ("header", "footer"))
    return "\n".join([*header, *lines, *footer])


class _Relation(NamedTuple):
    id: str
    kind: str
    target: str


class _Package:
    """The parts of a document; how much they unpack to is counted and limited."""

    def __init__(self, data: bytes, tracker: Tracker) -> None:
        self.tracker = tracker
        if data.count(b"PK\1\2") > _MOST_PARTS:
            self._refuse(f"has more than {_MOST_PARTS:,} parts")
        self.archive = zipfile.ZipFile(io.BytesIO(data))
        self._packed = self._unpacked = 0
        targets = [each.target for each in self.related("") if each.kind == "officeDocument"]
        self.start = targets[0] if targets else f"{_START}.xml"

    def related(self, part: str) -> list[_Relation]:
        """What a part refers to; "" is the whole package."""
        folder, name = posixpath.split(part)
        found, held = list[_Relation](), posixpath.join(folder, "_rels", f"{name}.rels")

        def begin(_: str, attributes: Attributes) -> None:
            kind = posixpath.basename(attributes.get("Type", ""))
            wanted = (*_KINDS, "officeDocument")
            if kind in wanted and attributes.get("TargetMode") != "External":
                target = posixpath.join("/", folder, attributes["Target"])
                path = posixpath.normpath(target).lstrip("/")
                found.append(_Relation(attributes.get("Id", ""), kind, path))

        if held in self.archive.NameToInfo:
            self.parse(held, begin)
        return found

    def read(self, part: str, text: WordText, *, shown: bool = False) -> list[str]:
        """The lines of a part; `text` collects them. Raises as `parse`."""
        self.parse(part, text.begin, text.end, text.characters, shown=shown)
        return text.lines()

    def parse(
        self,
        part: str,
        begin: Callable[[str, Attributes], None],
        end: Callable[[str], None] | None = None,
        characters: Callable[[str], None] | None = None,
        *,
        shown: bool = False,
    ) -> None:
        """Pass a part's elements and text to callbacks, in order.

        Args:
            shown: report progress.

        Raises:
            DocumentError: it unpacks to too much.
            Stopped: someone cancelled.
        """
        parser = expat.ParserCreate(namespace_separator=" ")
        parser.buffer_text = True
        names = LocalNames()
        parser.StartElementHandler = lambda name, attributes: begin(
            names[name], {names[key]: value for key, value in attributes.items()}
        )
        if end is not None:
            parser.EndElementHandler = lambda name: end(names[name])
        if characters is not None:
            parser.CharacterDataHandler = characters
        # Otherwise an undeclared entity would vanish without a trace.
        parser.SkippedEntityHandler = _refuse_entity
        done, total = 0, self.archive.getinfo(part).file_size
        for piece in self._pieces(part):
            done += len(piece)
            if shown:
                self.tracker.report(min(done, total), total)
            parser.Parse(piece)
        parser.Parse(b"", True)

    def _pieces(self, part: str) -> Iterator[bytes]:
        """A part, unpacked; what comes out is counted, whatever size the archive states."""
        info = self.archive.getinfo(part)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{part} is packed as no Word document is")
        self._packed += info.compress_size
        with self.archive.open(info) as file:
            while piece := file.read(_PIECE):
                self.tracker.check()
                self._unpacked += len(piece)
                if self._unpacked > UNPACKED_LIMIT:
                    self._refuse(f"unpacks to more than {readable(UNPACKED_LIMIT)} of text")
                if _DENSE_FROM < self._unpacked > _DENSEST * self._packed:
                    self._refuse(f"unpacks to more than {_DENSEST} times its size")
                yield piece

    def _refuse(self, why: str) -> NoReturn:
        raise DocumentError(
            f"{self.tracker.label} {why}, which no document needs: get it anew from a source "
            "that you trust, or save it as text."
        )


def _refuse_entity(name: str, is_parameter: bool) -> None:
    raise ValueError(f"the entity {name} is not declared")
