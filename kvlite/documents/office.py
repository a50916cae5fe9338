"""Documents of Microsoft Office: what their parts refer to, and what elements are called."""

import posixpath
from typing import NamedTuple

from kvlite.documents.archive import Archive, Attributes
from kvlite.errors import DocumentError

# What old files begin with, and new ones that have a password.
OLE = b"\xd0\xcf\x11\xe0"

# Without the prefixes and the year that the two standards' names differ in.
_PREFIXES = ("http://schemas.openxmlformats.org/", "http://purl.oclc.org/ooxml/")
_NAMESPACES = {
    "wordprocessingml/main": "w",
    "presentationml/main": "p",
    "officeDocument/math": "m",
    "officeDocument/relationships": "r",
    "drawingml/main": "a",
    "drawingml/picture": "pic",
    "drawingml/wordprocessingDrawing": "wp",
    "drawingml/chart": "c",
    "drawingml/diagram": "dgm",
    "markup-compatibility": "mc",
    "http://schemas.microsoft.com/office/drawing/2014/chartex": "cx",
    "urn:schemas-microsoft-com:vml": "v",
    "urn:schemas-microsoft-com:office:office": "o",
}


class OfficeNames(dict[str, str]):
    """Element and attribute names as people write them, such as `w:p`, by expat's full names."""

    def __missing__(self, name: str) -> str:
        space, _, own = name.rpartition(" ")
        for prefix in _PREFIXES:
            space = space.removeprefix(prefix)
        short = _NAMESPACES.get(space.replace("/2006", ""), "?")
        self[name] = f"{short}:{own}" if space else own
        return self[name]


class Relation(NamedTuple):
    """What a part refers to, such as a slide."""

    id: str
    kind: str
    target: str


def relations(archive: Archive, part: str) -> list[Relation]:
    """What a part refers to within its document; "" is the document. Raises as `Archive.parse`."""
    folder, name = posixpath.split(part)
    found, held = list[Relation](), posixpath.join(folder, "_rels", f"{name}.rels")

    def begin(_: str, attributes: Attributes) -> None:
        if "Target" in attributes and attributes.get("TargetMode") != "External":
            kind = posixpath.basename(attributes.get("Type", ""))
            target = posixpath.join("/", folder, attributes["Target"])
            path = posixpath.normpath(target).lstrip("/")
            found.append(Relation(attributes.get("Id", ""), kind, path))

    if held in archive.names:
        archive.parse(held, begin)
    return found


def require_new(data: bytes, label: str, program: str, suffix: str) -> None:
    """Raises DocumentError for files of before 2007, and for those with a password."""
    if data.startswith(OLE):
        raise DocumentError(
            f"{label} is an old {program} file or locked by a password: save it in {program} as "
            f"{suffix} without a password."
        )


def document_part(archive: Archive, usual: str) -> str:
    """The part that a document begins with, or its usual name."""
    targets = [each.target for each in relations(archive, "") if each.kind == "officeDocument"]
    return targets[0] if targets else usual
