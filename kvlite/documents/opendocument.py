"""OpenDocument files, of LibreOffice and others: texts (.odt), tables (.ods), slides (.odp)."""

from kvlite.documents.archive import Archive, Attributes
from kvlite.documents.elements import Elements
from kvlite.documents.tracker import Tracker
from kvlite.errors import DocumentError

_HTML_NAMES = {
    "text:p": "p",
    "text:h": "h1",
    "text:list-item": "li",
    "text:list-header": "li",
    "text:line-break": "br",
    "table:table": "table",
    "table:table-row": "tr",
    "table:table-cell": "td",
    "table:covered-table-cell": "td",
    "drawing:image": "img",
    "drawing:object": "object",
    "drawing:object-ole": "object",
    "drawing:plugin": "video",
    # Hidden: deleted text, who wrote a note and when, how a word is pronounced.
    "text:tracked-changes": "template",
    "text:note-citation": "template",
    "text:ruby-text": "template",
    "dc:creator": "template",
    "dc:date": "template",
    "svg-compatible:title": "template",
}
_BRACKETED = {
    "text:note-body": "Note",
    "office:annotation": "Note",
    "svg-compatible:desc": "Picture",
}
_CHARACTERS = {"text:tab": "\t", "text:s": " "}
# Empty cells up to the next one that is not; more of them fill a row up to column 16,384.
_MOST_EMPTY = 64


class _Names(dict[str, str]):
    """Names with a short prefix, such as `text:p`, by expat's full names."""

    def __missing__(self, name: str) -> str:
        space, _, own = name.rpartition(" ")
        # Such as urn:oasis:names:tc:opendocument:xmlns:text:1.0
        short = space.split(":")[-2] if space.startswith("urn:") else ""
        self[name] = f"{'dc' if 'purl.org/dc' in space else short}:{own}"
        return self[name]


def opendocument_text(data: bytes, tracker: Tracker) -> str | list[str]:
    """The text of an .odt or .ods file, or of each slide of an .odp file. Footnotes and comments
    stand in brackets where they belong.

    Raises:
        DocumentError: it has a password, or unpacks to too much.
        ContextError: it is longer than could fit.
        Stopped: someone cancelled.
    """
    archive, names, content = Archive(data, tracker), _Names(), _Content(tracker)

    def require_open(name: str, _: Attributes) -> None:
        if name == "manifest:encryption-data":
            raise DocumentError(
                f"{tracker.label} is locked by a password: save it in LibreOffice without one."
            )

    if "META-INF/manifest.xml" in archive.names:
        archive.parse("META-INF/manifest.xml", require_open, names=names)
    if "styles.xml" in archive.names:
        archive.parse("styles.xml", content.begin_style, names=names)
    callbacks = content.begin, content.end, content.characters
    archive.parse("content.xml", *callbacks, names=names, shown=True)
    texts = content.texts()
    return texts if content.slides else texts[0]


class _Content(Elements):
    """Collects the text of a document.

    Attributes:
        slides: how many there were so far.
    """

    def __init__(self, tracker: Tracker) -> None:
        super().__init__(tracker, _HTML_NAMES)
        self.slides = 0
        self._style = ""
        self._numbered = set[tuple[str, str]]()
        self._names = list[str]()
        self._lists = [""]

    def begin_style(self, name: str, attributes: Attributes) -> None:
        """Note which levels of which lists are numbered."""
        if name == "text:list-style":
            self._style = attributes.get("style:name", "")
        elif name == "text:list-level-style-number" and attributes.get("style:num-format"):
            self._numbered.add((self._style, attributes.get("text:level", "")))

    def begin(self, name: str, attributes: Attributes) -> None:
        self.begin_style(name, attributes)
        self._names.append(name)
        html_attributes = dict[str, str]()
        html_name, around = _HTML_NAMES.get(name, ""), self._names[-2:-1]
        if name == "drawing:page":
            self.slides += 1
            if self.slides > 1:
                self.begin_page()
        elif name == "text:list":
            self._lists.append(attributes.get("text:style-name", self._lists[-1]))
            numbered = (self._lists[-1], str(len(self._lists) - 1)) in self._numbered
            html_name = "ol" if numbered else "ul"
        elif name == "table:table-cell":
            repeated = attributes.get("table:number-columns-repeated", "1")
            html_attributes["colspan"] = repeated
            if "office:value-type" not in attributes and int(repeated) > _MOST_EMPTY:
                html_name = ""
        elif name == "table:table" and around == ["office:spreadsheet"]:
            self.enter("h1", {})
            self.characters(attributes.get("table:name", ""))
            super().end(name)
        self.enter(html_name, html_attributes)
        if name in _BRACKETED:
            self._inline += 1
            self.characters(f" [{_BRACKETED[name]}: ")
        self.characters(_CHARACTERS.get(name, ""))

    def end(self, name: str) -> None:
        if name in _BRACKETED:
            self._inline -= 1
            self.characters("]")
        elif name == "text:list":
            self._lists.pop()
        self._names.pop()
        super().end(name)
