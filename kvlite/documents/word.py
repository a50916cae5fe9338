"""Word documents: the parts of the archive, and how they make up one text.

Markup is parsed while it is unpacked, so it is never in memory as a whole.
"""

from collections.abc import Iterator

from kvlite.documents.archive import Archive
from kvlite.documents.office import OfficeNames, document_part, relations, require_new
from kvlite.documents.tracker import Tracker
from kvlite.documents.word_lists import Lists
from kvlite.documents.word_text import Notes, WordText


def word_text(data: bytes, tracker: Tracker) -> str:
    """The text of a .docx file: a line for each paragraph and each table row. Notes follow the
    paragraph that refers to them, headers come first and footers last.

    Raises:
        DocumentError: it is an old or locked one, or unpacks to too much.
        ContextError: it is longer than could fit.
        Stopped: someone cancelled.
    """
    require_new(data, tracker.label, "Word", ".docx")
    archive, names = Archive(data, tracker), OfficeNames()

    def read(part: str, text: WordText, *, shown: bool = False) -> list[str]:
        archive.parse(part, text.begin, text.end, text.characters, names=names, shown=shown)
        return text.lines()

    start = document_part(archive, "word/document.xml")
    related = relations(archive, start)

    def parts(*kinds: str) -> Iterator[str]:
        return (each.target for kind in kinds for each in related if each.kind == kind)

    lists, notes = Lists(), Notes()
    for part in parts("styles", "numbering"):
        archive.parse(part, lists.begin, names=names)
    for part in parts("footnotes", "endnotes", "comments"):
        read(part, WordText(tracker, notes=notes))
    body = WordText(tracker, notes=notes, lists=lists)
    lines = read(start, body, shown=True)
    beside = {kind: list[str]() for kind in body.references}
    for kind, ids in body.references.items():
        named = [each for each in related if each.id in ids and each.kind in body.references]
        tracker.not_read[kind] += len({*ids} - {each.id for each in named})
        for part in dict.fromkeys(each.target for each in named):
            inside = read(part, WordText(tracker, notes=Notes(), lists=lists))
            beside[kind] += [line for line in inside if line.strip()]
    header, footer = (dict.fromkeys(beside[kind]) for kind in ("header", "footer"))
    return "\n".join([*header, *lines, *footer])
