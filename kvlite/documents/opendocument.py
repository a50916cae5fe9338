"""OpenDocument files, of LibreOffice and others: texts (.odt), tables (.ods), slides (.odp)."""

import posixpath

from kvlite.documents.archive import Archive, Attributes
from kvlite.documents.elements import Elements
from kvlite.documents.tracker import Tracker
from kvlite.documents.visible_text import VisibleText, texts_of
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
    "drawing:image": "img",
    "drawing:object": "object",
    "drawing:object-ole": "object",
    "drawing:plugin": "video",
    # Hidden: what a wider cell covers, deleted text, who wrote a note and when, how a word is
    # pronounced.
    "table:covered-table-cell": "template",
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
    stand in brackets where they belong, headers come first and footers last.

    Raises:
        DocumentError: it has a password, or unpacks to too much.
        ContextError: it is longer than could fit.
    """
    archive, names = Archive(data, tracker), _Names()
    content, beside = _Content(tracker, archive), _Beside(tracker, archive)

    def require_open(name: str, _: Attributes) -> None:
        if name == "manifest:encryption-data":
            raise DocumentError(
                f"{tracker.label} is locked by a password: save it in LibreOffice without one."
            )

    if "META-INF/manifest.xml" in archive.names:
        archive.parse("META-INF/manifest.xml", require_open, names=names)
    if "styles.xml" in archive.names:
        callbacks = beside.begin, beside.end, beside.characters
        archive.parse("styles.xml", *callbacks, names=names)
        content.styles, content.numbered = beside.styles, beside.numbered
    callbacks = content.begin, content.end, content.characters
    archive.parse("content.xml", *callbacks, names=names, shown=True)
    header, *texts, footer = texts_of(
        [beside.kinds["header"], *content.pages, beside.kinds["footer"]], tracker
    )
    texts[0] = "\n\n".join(filter(None, (_once(header), texts[0])))
    texts[-1] = "\n\n".join(filter(None, (texts[-1], _once(footer))))
    return texts if content.slides else texts[0]


def _once(text: str) -> str:
    """Lines that several kinds of pages have."""
    return "\n".join(dict.fromkeys(filter(None, text.split("\n"))))


class _Content(Elements):
    """Collects the text of a document.

    Attributes:
        slides: how many there were so far.
        styles: what text of a style is in HTML, if it is raised, lowered, struck or hidden.
        numbered: styles and levels of lists with numbers.
    """

    def __init__(self, tracker: Tracker, archive: Archive) -> None:
        super().__init__(tracker, _HTML_NAMES)
        self.slides = 0
        self.styles = dict[str, str]()
        self.numbered = set[tuple[str, str]]()
        self._archive = archive
        self._style = ""
        self._names = list[str]()
        self._lists = [""]
        self._formula = False

    def begin_style(self, name: str, attributes: Attributes) -> None:
        """Note which levels of which lists are numbered, and what changes numbers in text."""
        if name in ("text:list-style", "style:style"):
            self._style = attributes.get("style:name", "")
        elif name == "text:list-level-style-number" and attributes.get("style:num-format"):
            self.numbered.add((self._style, attributes.get("text:level", "")))
        elif name == "style:text-properties":
            raised = attributes.get("style:text-position", "").split(" ")[0]
            if raised not in ("", "0%"):
                self.styles[self._style] = "sub" if raised.startswith(("sub", "-")) else "sup"
            elif attributes.get("style:text-line-through-style", "none") != "none":
                self.styles[self._style] = "del"
            if attributes.get("text:display") == "none":
                self.styles[self._style] = "template"

    def begin(self, name: str, attributes: Attributes) -> None:
        self.begin_style(name, attributes)
        self._names.append(name)
        html_attributes = dict[str, str]()
        html_name, around = _HTML_NAMES.get(name, ""), self._names[-2:-1]
        if name == "drawing:page":
            self.slides += 1
            if self.slides > 1:
                self.begin_page()
        elif name == "text:span":
            html_name = self.styles.get(attributes.get("text:style-name", ""), "")
        elif name == "text:list":
            self._lists.append(attributes.get("text:style-name", self._lists[-1]))
            numbered = (self._lists[-1], str(len(self._lists) - 1)) in self.numbered
            html_name = "ol" if numbered else "ul"
        elif name == "table:table-cell":
            repeated = attributes.get("table:number-columns-repeated", "1")
            html_attributes["colspan"] = attributes.get("table:number-columns-spanned", repeated)
            html_attributes["rowspan"] = attributes.get("table:number-rows-spanned", "")
            if "office:value-type" not in attributes and int(repeated) > _MOST_EMPTY:
                html_name = ""
        elif name == "table:table" and around == ["office:spreadsheet"]:
            self.enter("h1", {})
            self.characters(attributes.get("table:name", ""))
            super().end(name)
        elif name == "drawing:frame":
            self._formula = False
        elif name == "drawing:object" and self._read_formula(attributes.get(":href", "")):
            html_name, self._formula = "", True
        elif name == "drawing:image" and self._formula:
            html_name = ""
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

    def _read_formula(self, folder: str) -> bool:
        """Whether an object was a formula, which is a part of its own."""
        part = posixpath.normpath(posixpath.join(folder, "content.xml"))
        if part not in self._archive.names:
            return False
        found = list[str]()

        def begin(name: str, attributes: Attributes) -> None:
            found.append(name)
            if found[0] == "math":
                self.enter(name, {})

        def end(name: str) -> None:
            if found[0] == "math":
                Elements.end(self, name)

        def characters(text: str) -> None:
            if found[:1] == ["math"]:
                self.characters(text)

        self._archive.parse(part, begin, end, characters)
        return found[:1] == ["math"]


class _Beside(_Content):
    """Collects headers and footers, which stand among the styles.

    Attributes:
        kinds: the text of each kind.
    """

    def __init__(self, tracker: Tracker, archive: Archive) -> None:
        super().__init__(tracker, archive)
        self.kinds = {kind: VisibleText(tracker) for kind in ("header", "footer")}
        self._inside = False

    def begin(self, name: str, attributes: Attributes) -> None:
        kind = _kind(name)
        if kind:
            self.pages, self._inside = [self.kinds[kind]], True
        elif self._inside:
            super().begin(name, attributes)
        else:
            self.begin_style(name, attributes)

    def end(self, name: str) -> None:
        if _kind(name):
            self._inside = False
        elif self._inside:
            super().end(name)

    def characters(self, text: str) -> None:
        if self._inside:
            super().characters(text)


def _kind(name: str) -> str:
    """Whether an element is a header or a footer, of all pages or only some."""
    kind = name.removeprefix("style:").split("-")[0]
    is_one = name.startswith("style:") and not name.endswith(("-style", "-properties"))
    return kind if is_one and kind in ("header", "footer") else ""
