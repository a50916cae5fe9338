"""OpenDocument files, of LibreOffice and others: texts (.odt) and slides (.odp)."""

import posixpath
import re
from collections import defaultdict
from typing import Any, NamedTuple

from kvlite.documents.archive import Archive
from kvlite.documents.list_numbers import number_in
from kvlite.documents.markup import text_of
from kvlite.documents.pandoc import write_formulas
from kvlite.documents.symbols import SPACE, TAB
from kvlite.documents.tracker import Tracker
from kvlite.errors import DocumentError

Element = Any
Attributes = dict[str, str]

_SPACES = {
    "http://www.w3.org/1998/Math/MathML": "",
    "http://www.w3.org/1999/xlink": "xlink:",
    "http://purl.org/dc/elements/1.1/": "dc:",
}
_HTML_NAMES = {
    "text:p": "p",
    "text:h": "h1",
    "text:line-break": "br",
    "text:note-body": "note",
    "table:table": "table",
    "table:table-header-rows": "thead",
    "table:table-rows": "tbody",
    "table:table-row-group": "tbody",
    "table:table-row": "tr",
    "table:table-cell": "td",
    "drawing:page": "div",
    "drawing:text-box": "div",
    "drawing:object-ole": "object",
    "drawing:plugin": "video",
    "drawing:floating-frame": "iframe",
}
# Hidden: what a wider cell covers, deleted text, who wrote a note and when, how a word is
# pronounced.
_HIDDEN = frozenset(
    (
        *("table:covered-table-cell", "table:title", "table:desc", "svg-compatible:title"),
        *("text:tracked-changes", "text:note-citation", "text:number", "text:ruby-text"),
        *("text:script", "office:binary-data", "dc:creator", "dc:date"),
    )
)
_BESIDE = {
    **{f"style:{kind}{which}": kind for kind in ("header", "footer")
       for which in ("", "-left", "-first")},
    "presentation:header-decl": "header",
    "presentation:footer-decl": "footer",
}  # fmt: skip
# What each page of notes says again.
_REPEATED = frozenset(("page-number", "date-time", "header", "footer"))
# What programs write as a picture's title.
_FILE_NAME = re.compile(r"\.\w{3,4}$")
_MOST_SPACES, _MOST_LEVELS = 1000, 10


class _Names(dict[str, str]):
    """Names with a short prefix, such as `text:p`, by lxml's full names."""

    def __missing__(self, name: str) -> str:
        space, _, own = name.rpartition("}")
        # Such as urn:oasis:names:tc:opendocument:xmlns:text:1.0
        short = f"{space.split(':')[-2]}:" if space.startswith("{urn:") else "?:" if space else ""
        self[name] = _SPACES.get(space[1:], short) + own
        return self[name]

    def of(self, element: Element) -> Attributes:
        """An element's attributes."""
        return {self[name]: value for name, value in element.attrib.items()}


class _Level(NamedTuple):
    """How a level of a list is numbered: in a form of `number_in`, "-" for a bullet, "" for
    nothing; `shown` is how many levels its number has."""

    form: str
    start: int
    shown: int
    prefix: str
    suffix: str


def opendocument_text(data: bytes, tracker: Tracker) -> str | list[str]:
    """The text of an .odt file, or of each slide of an .odp file. Footnotes and comments stand in
    brackets where they belong, headers come first and footers last.

    Raises:
        DocumentError: it has a password, or unpacks to too much.
        ContextError: it is longer than could fit.
    """
    archive = Archive(data, tracker)
    require_unlocked(archive)
    document = Elements(archive, set(archive.names))
    if "styles.xml" in archive.names:
        document.read("styles.xml")
    body = document.read("content.xml")
    write_formulas(body.xpath(".//math[not(ancestor::math)]"), "html", tracker)
    texts = [text_of(body, tracker)] if not document.slides else []
    for slide in document.slides:
        notes = [text_of(each, tracker, gap=1) for each in document.notes[slide]]
        said = [f"Notes: {each}" for each in notes if each]
        texts.append("\n\n".join((text_of(slide, tracker, gap=1), *said)))
    header, footer = (
        dict.fromkeys("\n".join(text_of(each, tracker, gap=1) for each in found).split("\n"))
        for found in (document.beside["header"], document.beside["footer"])
    )
    texts[0] = "\n\n".join(filter(None, ("\n".join(filter(None, header)), texts[0])))
    texts[-1] = "\n\n".join(filter(None, (texts[-1], "\n".join(filter(None, footer)))))
    return texts if document.slides else texts[0]


def require_unlocked(archive: Archive) -> None:
    """Raises DocumentError: a document has a password."""
    manifest = "META-INF/manifest.xml"
    if manifest in archive.names:
        locked = archive.tree(manifest).iter("{*}encryption-data")
        if next(locked, None) is not None:
            raise DocumentError(
                f"{archive.tracker.label} is locked by a password: save it in LibreOffice without "
                "one."
            )


class Elements:
    """Makes a document's elements those of HTML.

    Attributes:
        slides: what stands on each.
        notes: the speaker's notes of each.
        beside: its headers and its footers.
    """

    def __init__(self, archive: Archive, unread: set[str]) -> None:
        """A document.

        Args:
            unread: the parts that are read if something refers to them.
        """
        self.slides = list[Element]()
        self.notes = defaultdict[Element, list[Element]](list)
        self.beside = defaultdict[str, list[Element]](list)
        self._archive = archive
        self._unread = unread
        self._names = _Names()
        # What text of a style is in HTML if it is raised or hidden, by its family and name.
        self._effects = dict[tuple[str, str], str]()
        # What controls of forms show, by their names in the markup.
        self._controls = dict[str, str]()
        # By style and level; and the last number of each.
        self._levels = dict[tuple[str, int], _Level]()
        self._numbers = dict[tuple[str, int], int]()
        self._lists = dict[Element, tuple[str, int]]()

    def read(self, part: str) -> Element:
        """The body of a part, in HTML's elements; errors as of `Archive.tree`."""
        self._unread.discard(part)
        tree = self._archive.tree(part)
        for style in tree.iter("{*}style", "{*}list-style", "{*}outline-style"):
            self.learn(style)
        for form in tree.iter("{*}form"):
            for control in form:
                self._add_control(control)
        body = next(tree.iter("{*}body", "{*}master-styles"), tree)
        self.convert(body)
        return body

    def convert(self, body: Element) -> None:
        """Make an element and those in it HTML's."""
        for element in list(body.iter()):
            self._convert(element)

    def effect(self, family: str, name: str) -> str:
        """What text of a style is in HTML, "hidden" if it is not shown; "" if it is as usual."""
        return self._effects.get((family, name)) or self._effects.get(("", name), "")

    def learn(self, style: Element) -> None:
        """Note what a style does to text and lists."""
        attributes = self._names.of(style)
        name = attributes.get("style:name", "Outline")
        family = attributes.get("style:family", "")
        effect = self.effect(family, attributes.get("style:parent-style-name", ""))
        for element in style:
            about = self._names.of(element)
            raised = about.get("style:text-position", "").split(" ")[0]
            if raised:
                lowered = raised.startswith(("sub", "-"))
                effect = "" if raised == "0%" else "sub" if lowered else "sup"
            if about.get("style:text-line-through-style", "none") != "none":
                effect = effect or "del"
            if about.get("text:display") == "none":
                effect = "hidden"
            if "text:level" in about:
                self._levels[name, int(about["text:level"])] = _Level(
                    about.get("style:num-format", "-" if "bullet" in element.tag else ""),
                    int(about.get("text:start-value", "1")),
                    int(about.get("text:display-levels", "1")),
                    about.get("style:num-prefix", ""),
                    about.get("style:num-suffix", ""),
                )
        if effect:
            self._effects[family, name] = effect

    def _add_control(self, control: Element) -> None:
        """Note what a control of a form shows."""
        about = self._names.of(control)
        value = about.get("form:current-value") or about.get("form:value", "")
        match self._names[control.tag]:
            case "form:checkbox" | "form:radio":
                state = about.get("form:current-state") or about.get("form:state")
                is_on = state == "checked" or "true" in (
                    about.get(f"form:{each}selected") for each in ("current-", "")
                )
                value = f"{'[x]' if is_on else '[ ]'} {about.get('form:label', '')}"
            case "form:listbox":
                options = [self._names.of(each) for each in control]
                chosen = [
                    each
                    for each in options
                    if "true" in (each.get("form:current-selected"), each.get("form:selected"))
                ]
                value = ", ".join(each.get("form:label", "") for each in chosen)
            case "form:button" | "form:fixed-text":
                value = about.get("form:label", "")
            case "form:password" | "form:hidden":
                value = ""
        for key in ("form:id", "?:id"):
            self._controls[about.get(key, "")] = value.strip()

    def _convert(self, element: Element) -> None:
        name, attributes = self._names[element.tag], self._names.of(element)
        if ":" not in name or name in _HTML_NAMES:
            element.tag = _HTML_NAMES.get(name, name)
        family = "text" if name in ("text:span", "text:a") else "paragraph"
        effect = self.effect(family, attributes.get("text:style-name", ""))
        is_off = attributes.get("text:is-hidden") == "true" or effect == "hidden"
        is_off = is_off or attributes.get("text:display") == "none"
        # Lists of contents are made from sources.
        if name in _HIDDEN or is_off or (name[:5] == "text:" and name.endswith("-source")):
            within = element.getparent()
            is_mark = name == "text:hidden-paragraph" and within.tag in ("p", "h1")
            (within if is_mark else element).set("hidden", "")
        elif name == "text:span" and effect:
            element.tag = effect
        elif effect and name in ("text:p", "text:h"):
            _wrap(element, effect)
        match name:
            case "text:tab":
                element.text = TAB
            case "text:s":
                element.text = SPACE * min(int(attributes.get("text:c", "1")), _MOST_SPACES)
            case "text:list":
                self._list(element, attributes)
            case "text:list-item" | "text:list-header":
                self._item(element, attributes, is_header=name == "text:list-header")
            case "text:h":
                self._heading(element, attributes)
            case "office:annotation":
                element.tag = "span"
                element.set("class", "comment-start")
                element.set("data-author", element.findtext("{*}creator") or "")
            case "table:table-cell":
                repeated = attributes.get("table:number-columns-repeated", "1")
                element.set("colspan", attributes.get("table:number-columns-spanned", repeated))
                element.set("rowspan", attributes.get("table:number-rows-spanned", ""))
            case "drawing:page":
                self.slides.append(element)
            case "drawing:control":
                element.text = self._controls.get(attributes.get("drawing:control", ""), "")
            case "presentation:notes":
                self._notes(element)
            case "drawing:image":
                self._image(element)
            case "drawing:object" if len(element) == 0:
                self._object(element, attributes.get("xlink:href", ""))
            case "svg-compatible:desc":
                self._described(element)
            case _ if name in _BESIDE:
                self.beside[_BESIDE[name]].append(element)

    def _list(self, element: Element, attributes: Attributes) -> None:
        outer = next((each for each in element.iterancestors() if each in self._lists), None)
        outer_style, outer_level = self._lists.get(outer, ("", 0))
        style, level = attributes.get("text:style-name", outer_style), outer_level + 1
        self._lists[element] = style, level
        first = next((each for each in element.iter() if _own(each) in ("p", "h")), None)
        # Headings are numbered whatever list they stand in.
        if first is None or _own(first) != "h":
            element.tag = "ul"
            continues = attributes.get("text:continue-numbering") == "true"
            within = outer is not None and style == outer_style
            if not (continues or within or "text:continue-list" in attributes):
                self._restart(style, level)

    def _item(self, element: Element, attributes: Attributes, *, is_header: bool) -> None:
        style, level = self._lists.get(element.getparent(), ("", 1))
        if element.getparent().tag != "ul":
            return
        first, label = next(iter(element), None), ""
        # What holds a list and nothing before it is a level without a number.
        if first is None or _own(first) != "list":
            if not is_header:
                self._count(style, level, attributes.get("text:start-value"))
                label = self._label(style, level, "-")
            label = f"{label} " if label else "  "
        element.tag = "li"
        element.set("data-label", label)

    def _heading(self, element: Element, attributes: Attributes) -> None:
        level = int(attributes.get("text:outline-level", "1"))
        style, _ = self._lists.get(element.getparent().getparent(), ("", 0))
        style = style if (style, level) in self._levels else "Outline"
        if attributes.get("text:is-list-header") != "true":
            self._count(style, level, attributes.get("text:start-value"))
            if label := self._label(style, level, ""):
                element.text = f"{label} {element.text or ''}"

    def _count(self, style: str, level: int, start: str | None) -> None:
        at = self._levels.get((style, level))
        before = self._numbers.get((style, level), at.start - 1 if at else 0)
        self._numbers[style, level] = before + 1 if start is None else int(start)
        self._restart(style, level + 1)

    def _restart(self, style: str, level: int) -> None:
        for deeper in range(level, _MOST_LEVELS + 1):
            self._numbers.pop((style, deeper), None)

    def _label(self, style: str, level: int, other: str) -> str:
        """What stands before an item of a level, or the other if the style has no such level."""
        at = self._levels.get((style, level))
        if at is None or at.form in ("-", ""):
            return other if at is None else at.form
        shown = range(max(level - at.shown, 0) + 1, level + 1)
        found = [(each, self._levels.get((style, each))) for each in shown]
        numbers = ".".join(
            number_in(each.form, self._numbers.get((style, number), each.start))
            for number, each in found
            if each is not None and each.form not in ("-", "")
        )
        return f"{at.prefix}{numbers}{at.suffix or ('.' if other else '')}".strip()

    def _notes(self, element: Element) -> None:
        """Take a speaker's notes off their slide, without what each page of notes says again."""
        for frame in element.iter("{*}frame"):
            if self._names.of(frame).get("presentation:class") in _REPEATED:
                frame.clear(keep_tail=True)
        slide = element.getparent()
        slide.remove(element)
        self.notes[slide].append(element)

    def _image(self, element: Element) -> None:
        """A picture, if it does not stand for something else that is in its frame."""
        frame, before = element.getparent(), element.itersiblings(preceding=True)
        element.tag = (
            "img" if all(each.get("hidden") is not None for each in before) else "template"
        )
        described = (frame.findtext(f"{{*}}{each}") for each in ("desc", "title"))
        alternative = next(filter(None, described), "")
        if alternative and not _FILE_NAME.search(alternative):
            element.set("alt", alternative)

    def _described(self, element: Element) -> None:
        """A description of something else than a picture."""
        if element.text and element.getparent().find("img") is None:
            element.text = f"[Picture: {element.text}]"
        else:
            element.set("hidden", "")

    def _object(self, element: Element, folder: str) -> None:
        """What is a part of its own, such as a formula or a table."""
        part = posixpath.normpath(posixpath.join(folder, "content.xml"))
        if part not in self._unread:
            element.tag = "object"
            return
        body = Elements(self._archive, self._unread).read(part)
        if body.find("{*}chart") is None:
            element.append(body)
        else:
            element.tag = "object"


def _wrap(element: Element, name: str) -> None:
    """Put what stands in an element into one of another name in it."""
    inner = element.makeelement(name)
    inner.text, element.text = element.text, None
    inner.extend(element[:])
    element.append(inner)


def _own(element: Element) -> str:
    """An element's name without its namespace."""
    return str(element.tag).rpartition("}")[2]
