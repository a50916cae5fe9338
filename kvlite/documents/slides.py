"""PowerPoint slides (.pptx)."""

from kvlite.documents.archive import Archive, Attributes
from kvlite.documents.elements import Elements
from kvlite.documents.office import OfficeNames, document_part, relations, require_new
from kvlite.documents.tracker import Tracker
from kvlite.documents.visible_text import VisibleText, texts_of

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
# Formulas, in a line.
_OPENING = {
    "m:num": "(",
    "m:den": "/(",
    "m:sup": "^(",
    "m:sub": "_(",
    "m:deg": "^(",
    "m:rad": "\u221a(",
    "m:d": "(",
}
_NOT_READ = {"p:pic": "picture", "c:chart": "chart", "dgm:relIds": "diagram"}


def slides(data: bytes, tracker: Tracker) -> list[str]:
    """The text of each slide, in the order in which they are shown, with its speaker's notes.

    Raises:
        DocumentError: it is an old or locked one, or unpacks to too much.
        ContextError: it is longer than could fit.
    """
    require_new(data, tracker.label, "PowerPoint", ".pptx")
    archive, names, ids = Archive(data, tracker), OfficeNames(), list[str]()

    def begin(name: str, attributes: Attributes) -> None:
        if name == "p:sldId":
            ids.append(attributes["r:id"])

    start = document_part(archive, "ppt/presentation.xml")
    archive.parse(start, begin, names=names)
    targets = {each.id: each.target for each in relations(archive, start)}
    pages, is_note = list[VisibleText](), list[bool]()
    for number, part in enumerate((targets[each] for each in ids), 1):
        notes = [each.target for each in relations(archive, part) if each.kind == "notesSlide"]
        pages += [_read(archive, each, names, tracker) for each in (part, *notes)]
        is_note += [False, *(True for _ in notes)]
        tracker.report(number, len(ids))
    made = list[str]()
    for text, is_said in zip(texts_of(pages, tracker), is_note, strict=True):
        if not is_said:
            made.append(text)
        elif text.strip():
            made[-1] += f"\n\nNotes: {text.strip()}"
    return made


def _read(archive: Archive, part: str, names: OfficeNames, tracker: Tracker) -> VisibleText:
    slide = _Slide(tracker, _HTML_NAMES)
    archive.parse(part, slide.begin, slide.end, slide.characters, names=names)
    return slide.pages[0]


class _Slide(Elements):
    """Collects the text of a slide."""

    _raised = ""

    def begin(self, name: str, attributes: Attributes) -> None:
        html_name, html_attributes = _HTML_NAMES.get(name, ""), dict[str, str]()
        if name == "a:r":
            self._raised = ""
        elif name == "a:rPr":
            baseline = attributes.get("baseline", "0").removesuffix("%")
            if baseline not in ("", "0"):
                self._raised = "sub" if baseline.startswith("-") else "sup"
            elif attributes.get("strike", "noStrike") != "noStrike":
                self._raised = "del"
        elif name == "a:t":
            html_name, self._raised = self._raised, ""
        elif name == "a:tc":
            html_attributes = {
                "colspan": attributes.get("gridSpan", ""),
                "rowspan": attributes.get("rowSpan", ""),
            }
            if {attributes.get("hMerge"), attributes.get("vMerge")} & {"1", "true"}:
                html_name = "template"
        self.enter(html_name, html_attributes)
        self.characters(_OPENING.get(name, ""))
        if name in _NOT_READ:
            self._tracker.not_read[_NOT_READ[name]] += 1
        elif name == "p:cNvPr" and (described := attributes.get("descr", "").strip()):
            self.enter("div", {})
            self.characters(f"[Picture: {described}]")
            super().end(name)

    def end(self, name: str) -> None:
        self.characters(")" if name in _OPENING else "")
        super().end(name)
