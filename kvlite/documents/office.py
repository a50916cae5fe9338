"""Documents of Microsoft Office: what their parts refer to, and what elements are called."""

import posixpath
from typing import Any, NamedTuple

from kvlite.documents.archive import Archive
from kvlite.errors import DocumentError

# What old files begin with, and new ones that have a password.
OLE = b"\xd0\xcf\x11\xe0"

_OFFICE = "http://schemas.openxmlformats.org"
NAMES = {
    "w": f"{_OFFICE}/wordprocessingml/2006/main",
    "p": f"{_OFFICE}/presentationml/2006/main",
    "m": f"{_OFFICE}/officeDocument/2006/math",
    "r": f"{_OFFICE}/officeDocument/2006/relationships",
    "a": f"{_OFFICE}/drawingml/2006/main",
    "pic": f"{_OFFICE}/drawingml/2006/picture",
    "wp": f"{_OFFICE}/drawingml/2006/wordprocessingDrawing",
    "c": f"{_OFFICE}/drawingml/2006/chart",
    "dgm": f"{_OFFICE}/drawingml/2006/diagram",
    "mc": f"{_OFFICE}/markup-compatibility/2006",
    "cx": "http://schemas.microsoft.com/office/drawing/2014/chartex",
    "v": "urn:schemas-microsoft-com:vml",
    "o": "urn:schemas-microsoft-com:office:office",
}
# The other standard's names differ in their beginning and have no year.
_STRICT = "http://purl.oclc.org/ooxml"
_ALIKE = {
    uri.replace(_OFFICE, _STRICT).replace("/2006", ""): f"{{{uri}}}" for uri in NAMES.values()
}
OFF = ("0", "false", "off")


def full(name: str) -> str:
    """The name that a tree has for an element or attribute, such as `w:p`."""
    prefix, _, own = name.partition(":")
    return f"{{{NAMES[prefix]}}}{own}"


def find(tree: Any, path: str) -> list[Any]:
    """What an XPath with such names leads to."""
    found: list[Any] = tree.xpath(path, namespaces=NAMES)
    return found


def value_of(element: Any, path: str) -> str | None:
    """What the element of Word at the end of a path says; None if there is none, or it says no
    more than that it is there."""
    found = element.find(path, NAMES)
    return None if found is None else found.get(full("w:val"))


def office_tree(archive: Archive, part: str) -> Any:
    """A part by the names of either standard, the first form of what it holds in several; raises
    as `Archive.tree`."""
    tree = archive.tree(part)
    if tree.tag.startswith(f"{{{_STRICT}"):
        for each in tree.iter():
            each.tag = _renamed(each.tag)
            for key, value in each.attrib.items():
                del each.attrib[key]
                each.set(_renamed(key), value)
    for each in find(tree, "descendant::mc:AlternateContent"):
        for other in each[1:]:
            each.remove(other)
    return tree


def _renamed(name: str) -> str:
    space, _, own = name.rpartition("}")
    return _ALIKE.get(space[1:], f"{space}}}" if space else "") + own


class Relation(NamedTuple):
    """What a part refers to, such as a slide."""

    id: str
    kind: str
    target: str


def relations(archive: Archive, part: str) -> list[Relation]:
    """What a part refers to within its document; "" is the document. Raises as `Archive.tree`."""
    folder, name = posixpath.split(part)
    held = posixpath.join(folder, "_rels", f"{name}.rels")
    if held not in archive.names:
        return []
    return [
        Relation(
            each.get("Id", ""),
            posixpath.basename(each.get("Type", "")),
            posixpath.normpath(posixpath.join("/", folder, each.get("Target"))).lstrip("/"),
        )
        for each in archive.tree(held)
        if each.get("Target") and each.get("TargetMode") != "External"
    ]


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
