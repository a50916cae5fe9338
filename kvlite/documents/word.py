"""Word documents: the parts of the archive, and how they make up one text."""

import io
import zipfile
from collections.abc import Iterator

from kvlite.documents.archive import Archive
from kvlite.documents.office import OfficeNames, document_part, relations, require_new
from kvlite.documents.pandoc import pandoc_text, with_lost
from kvlite.documents.tracker import Tracker
from kvlite.documents.word_copy import WordCopy
from kvlite.documents.word_lists import Lists

_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006"
_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_SPACES = f'xmlns:w="{_WORD}" xmlns:m="{_OFFICE}/math"'
_PACKAGE = "http://schemas.openxmlformats.org/package/2006/relationships"


def word_text(data: bytes, tracker: Tracker) -> str:
    """The text of a .docx file: a line for each paragraph and each table row. Notes and comments
    stand where they belong, headers come first and footers last.

    Raises:
        DocumentError: it is an old or locked one, or unpacks to too much.
        ContextError: it is longer than could fit.
    """
    require_new(data, tracker.label, "Word", ".docx")
    archive, names = Archive(data, tracker), OfficeNames()
    start = document_part(archive, "word/document.xml")
    related = relations(archive, start)
    comments, pieces, lists = dict[str, str](), list[str](), Lists()

    def copied(part: str, *, shown: bool = False) -> WordCopy:
        copy = WordCopy(tracker, comments=comments, lists=lists)
        archive.parse(part, copy.begin, copy.end, copy.characters, names=names, shown=shown)
        return copy

    def parts(*kinds: str) -> Iterator[str]:
        return (each.target for kind in kinds for each in related if each.kind == kind)

    for part in parts("styles", "numbering"):
        archive.parse(part, lists.begin, names=names)
    for part in parts("comments"):
        copied(part)
    notes = {kind: [copied(part) for part in parts(f"{kind}s")] for kind in ("footnote", "endnote")}
    body = copied(start, shown=True)
    beside = dict[str, dict[str, None]]()
    for kind in ("header", "footer"):
        ids = body.references[kind]
        named = [each for each in related if each.id in ids and each.kind == kind]
        tracker.not_read[kind] += len({*ids} - {each.id for each in named})
        copies = [copied(part) for part in dict.fromkeys(each.target for each in named)]
        beside[kind] = dict.fromkeys(
            each for copy in copies for each in copy.blocks if "<w:t" in each
        )
        pieces += [piece for copy in copies for piece in copy.pieces]
    files = dict[str, str]()
    for kind, copies in notes.items():
        defined = {id for copy in copies for id in copy.notes}
        tracker.not_read[kind] += len({*body.references[kind]} - defined)
        pieces += [piece for copy in copies for piece in copy.pieces]
        inside = "".join(block for copy in copies for block in copy.blocks)
        files[f"{kind}s"] = f"<w:{kind}s {_SPACES}>{inside}</w:{kind}s>"
    blocks = "".join([*beside["header"], *body.blocks, *beside["footer"]])
    files["document"] = f"<w:document {_SPACES}><w:body>{blocks}</w:body></w:document>"
    text = pandoc_text(_packed(files), "docx+empty_paragraphs", tracker, gap="\n")
    return with_lost(text, [*pieces, *body.pieces, *comments.values()])


def _packed(files: dict[str, str]) -> bytes:
    """A document of nothing but these parts."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, markup in files.items():
            archive.writestr(f"word/{name}.xml", markup.encode())
        archive.writestr("_rels/.rels", _relations({"officeDocument": "word/document.xml"}))
        targets = {name: f"{name}.xml" for name in files if name != "document"}
        archive.writestr("word/_rels/document.xml.rels", _relations(targets))
    return out.getvalue()


def _relations(targets: dict[str, str]) -> str:
    inside = "".join(
        f'<Relationship Id="{kind}" Type="{_OFFICE}/relationships/{kind}" Target="{target}"/>'
        for kind, target in targets.items()
    )
    return f'<Relationships xmlns="{_PACKAGE}">{inside}</Relationships>'
