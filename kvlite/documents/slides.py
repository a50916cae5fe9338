"""PowerPoint slides (.pptx)."""

from typing import Any

from kvlite.documents.archive import Archive
from kvlite.documents.list_numbers import number_in
from kvlite.documents.markup import text_of
from kvlite.documents.office import (
    NAMES,
    document_part,
    find,
    full,
    office_tree,
    relations,
    require_new,
)
from kvlite.documents.pandoc import write_formulas
from kvlite.documents.symbols import SPACE
from kvlite.documents.tracker import Tracker

_HTML_NAMES = {
    "a:p": "div",
    "p:text": "div",
    "a:br": "br",
    "a:tbl": "table",
    "a:tr": "tr",
    "a:tc": "td",
}
# The slide's number, and the date; what a wider cell covers; what is not shown.
_HIDDEN = (
    "descendant::a:fld | descendant::p:sp[.//p:ph/@type='sldNum'] | descendant::a:tableStyleId "
    "| descendant::p:timing | descendant::a:tc[@hMerge or @vMerge] "
    "| descendant::p:cNvPr[@hidden='1']/../.."
)
_TITLES = "descendant::p:sp[p:nvSpPr/p:nvPr/p:ph[@type='title' or @type='ctrTitle']]"
_BESIDE = {"notesSlide": "Notes", "comments": "Comments"}
_NOT_READ = {
    "p:pic[not(ancestor::p:oleObj)]": "picture",
    "c:chart": "chart",
    "cx:chart": "chart",
    "p:oleObj": "embedded object",
}
_FORMS = {"alphaLc": "a", "alphaUc": "A", "romanLc": "i", "romanUc": "I"}


def slides(data: bytes, tracker: Tracker) -> list[str]:
    """The text of each slide, in the order in which they are shown, with its speaker's notes and
    its comments.

    Raises:
        DocumentError: it is an old or locked one, or unpacks to too much.
        ContextError: it is longer than could fit.
    """
    require_new(data, tracker.label, "PowerPoint", ".pptx")
    archive, made = Archive(data, tracker), list[str]()
    start = document_part(archive, "ppt/presentation.xml")
    targets = {each.id: each.target for each in relations(archive, start)}
    parts = [targets[each] for each in find(office_tree(archive, start), "//p:sldId/@r:id")]
    for number, part in enumerate(parts, 1):
        texts = [_text(archive, part, tracker)]
        for beside in relations(archive, part):
            said = _text(archive, beside.target, tracker) if beside.kind in _BESIDE else ""
            texts += [f"{_BESIDE[beside.kind]}: {said}"] if said else []
        made.append("\n\n".join(texts))
        tracker.report(number, len(parts))
    return made


def _text(archive: Archive, part: str, tracker: Tracker) -> str:
    """The text of a slide, or of a page of notes."""
    tree = office_tree(archive, part)
    for each in find(tree, _HIDDEN):
        each.set("hidden", "")
    targets = {each.id: each.target for each in relations(archive, part)}
    for diagram in find(tree, "descendant::dgm:relIds"):
        diagram.append(office_tree(archive, targets[diagram.get(full("r:dm"))]))
    for title in find(tree, _TITLES):
        title.getparent().insert(0, title)
    for what, counted in _NOT_READ.items():
        tracker.not_read[counted] += len(find(tree, f"descendant::{what}"))
    for each in find(tree, "descendant::p:cNvPr[normalize-space(@descr)]"):
        each.tag, each.text = "div", f"[Picture: {each.get('descr').strip()}]"
    for run in find(tree, "descendant::a:r[a:rPr]"):
        if mark := _mark(run.find("a:rPr", NAMES)):
            run.tag = mark
    for body in find(tree, "descendant::a:p/.."):
        _label(find(body, "a:p"))
    write_formulas(find(tree, "descendant::m:oMath[not(ancestor::m:oMath)]"), "docx", tracker)
    for cell in find(tree, "descendant::a:tc"):
        cell.set("colspan", cell.get("gridSpan", ""))
        cell.set("rowspan", cell.get("rowSpan", ""))
    for name, html_name in _HTML_NAMES.items():
        for each in tree.iter(full(name)):
            each.tag = html_name
    return text_of(tree, tracker, gap=1)


def _mark(properties: Any) -> str:
    """What HTML has for raised, lowered or struck text."""
    raised = properties.get("baseline", "0").removesuffix("%")
    if raised not in ("", "0"):
        return "sub" if raised.startswith("-") else "sup"
    return "del" if properties.get("strike", "noStrike") != "noStrike" else ""


def _label(paragraphs: list[Any]) -> None:
    """Write indents, bullets and numbers before the paragraphs of one box.

    At the outermost level there is a bullet if the paragraph asks for its own: whether it has one
    from the slide's design does not matter to readers.
    """
    numbers = dict[int, int]()
    for paragraph in paragraphs:
        if not "".join(paragraph.itertext()).strip():
            continue
        properties = paragraph.find("a:pPr", NAMES)
        if properties is None:
            numbers.clear()
            continue
        level = int(properties.get("lvl", "0"))
        numbered = properties.find("a:buAutoNum", NAMES)
        numbers = {outer: number for outer, number in numbers.items() if outer <= level}
        if numbered is None:
            numbers.pop(level, None)
            is_plain = properties.find("a:buNone", NAMES) is not None
            bullet = level > 0 or properties.find("a:buChar", NAMES) is not None
            label = "- " if bullet and not is_plain else ""
        else:
            before = numbers.get(level, int(numbered.get("startAt", "1")) - 1)
            numbers[level] = before + 1
            kind = numbered.get("type", "")
            form = next((form for start, form in _FORMS.items() if kind.startswith(start)), "")
            label = number_in(form, before + 1) + (") " if "Paren" in kind else ". ")
        paragraph.text = SPACE * 2 * min(level, 8) + label
