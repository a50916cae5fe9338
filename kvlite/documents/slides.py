"""PowerPoint slides (.pptx)."""

from kvlite.documents.archive import Archive, Attributes
from kvlite.documents.elements import Elements
from kvlite.documents.office import OfficeNames, document_part, relations, require_new
from kvlite.documents.tracker import Tracker

_HTML_NAMES = {
    "a:p": "div",
    "a:br": "br",
    "a:tbl": "table",
    "a:tr": "tr",
    "a:tc": "td",
    "a:fld": "template",  # the slide's number, and the date
    "a:tableStyleId": "template",
    "p:timing": "template",
    "mc:Fallback": "template",
}
_NOT_READ = {"p:pic": "picture", "c:chart": "chart", "dgm:relIds": "diagram"}


def slides(data: bytes, tracker: Tracker) -> list[str]:
    """The text of each slide, in the order in which they are shown, with its speaker's notes.

    Raises:
        DocumentError: it is an old or locked one, or unpacks to too much.
        ContextError: it is longer than could fit.
        Stopped: someone cancelled.
    """
    require_new(data, tracker.label, "PowerPoint", ".pptx")
    archive, names, ids = Archive(data, tracker), OfficeNames(), list[str]()

    def begin(name: str, attributes: Attributes) -> None:
        if name == "p:sldId":
            ids.append(attributes["r:id"])

    start = document_part(archive, "ppt/presentation.xml")
    archive.parse(start, begin, names=names)
    targets = {each.id: each.target for each in relations(archive, start)}
    made = list[str]()
    for number, part in enumerate((targets[each] for each in ids), 1):
        notes = [each.target for each in relations(archive, part) if each.kind == "notesSlide"]
        texts = [_read(archive, each, names, tracker) for each in (part, *notes)]
        said = "\n".join(texts[1:]).strip()
        made.append(texts[0] + (f"\n\nNotes: {said}" if said else ""))
        tracker.report(number, len(ids))
    return made


def _read(archive: Archive, part: str, names: OfficeNames, tracker: Tracker) -> str:
    slide = _Slide(tracker, _HTML_NAMES)
    archive.parse(part, slide.begin, slide.end, slide.characters, names=names)
    return slide.texts()[0]


class _Slide(Elements):
    def begin(self, name: str, attributes: Attributes) -> None:
        super().begin(name, attributes)
        if name in _NOT_READ:
            self._tracker.not_read[_NOT_READ[name]] += 1
        elif name == "p:cNvPr" and (described := attributes.get("descr", "").strip()):
            self.enter("div", {})
            self.characters(f"[Picture: {described}]")
            super().end(name)
