"""Word documents (.docx): what Word shows of them with all changes accepted, as a page of HTML."""

import re
from typing import Any

from kvlite.documents.archive import Archive
from kvlite.documents.markup import text_of
from kvlite.documents.office import (
    NAMES,
    OFF,
    document_part,
    find,
    full,
    office_tree,
    relations,
    require_new,
    value_of,
)
from kvlite.documents.pandoc import write_formulas
from kvlite.documents.symbols import SPACE, TAB, is_private, shown_in
from kvlite.documents.tracker import Tracker
from kvlite.documents.word_lists import Lists

# Deleted text, how a word is pronounced, definitions of tab stops, former formatting, and what
# stands between two runs that are formatted alike.
_SKIPPED = (
    "w:del w:moveFrom w:rt w:tabs w:rPrChange w:pPrChange w:sectPrChange m:ctrlPr w:proofErr "
    "w:bookmarkStart w:bookmarkEnd w:lastRenderedPageBreak"
)
# What stands around runs, rows and cells.
_UNWRAPPED = "w:sdt w:sdtContent w:customXml w:smartTag w:ins w:moveTo w:hyperlink w:fldSimple"
_HTML_NAMES = {"w:p": "p", "a:p": "p", "w:tbl": "table", "w:tr": "tr", "w:tc": "td"}
_LINE_BREAKS = "w:br", "w:cr"
_WRITTEN = {"w:tab": TAB, "w:ptab": TAB, "w:noBreakHyphen": "-"}
_NOT_READ = {
    "pic:pic": "picture",
    "v:imagedata[not(ancestor::w:object)]": "picture",
    "c:chart": "chart",
    "cx:chart": "chart",
    "dgm:relIds": "diagram",
    "o:OLEObject": "embedded object",
    "w:altChunk": "embedded document",
    "w:subDoc": "embedded document",
}
_EFFECTS = frozenset(("vanish", "vertAlign", "position", "strike", "dstrike"))
# Text that is moved by so many half points is raised or lowered; and how many of them a unit has.
_RAISED_BY = 3
_MEASURE = re.compile(r"(-?\d+(?:\.\d+)?)(|pt|pc|pi|in|cm|mm)")
_HALF_POINTS = {"": 1, "pt": 2, "pc": 24, "pi": 24, "in": 144, "cm": 56.7, "mm": 5.67}
_MOST_COLUMNS = 1000


def word_text(data: bytes, tracker: Tracker) -> str:
    """The text of a .docx file: a line for each paragraph and each table row. Notes and comments
    stand where they belong, headers come first and footers last.

    Raises:
        DocumentError: it is an old or locked one, or unpacks to too much.
        ContextError: it is longer than could fit.
    """
    require_new(data, tracker.label, "Word", ".docx")
    archive = Archive(data, tracker)
    start = document_part(archive, "word/document.xml")
    related = relations(archive, start)
    parts = {each.kind: each.target for each in related}
    styles, numbering = (
        office_tree(archive, parts[kind]) if kind in parts else None
        for kind in ("styles", "numbering")
    )
    page = _Page(styles, Lists(styles, numbering), tracker)
    for kind in ("footnote", "endnote", "comment"):
        if f"{kind}s" in parts:
            page.add_notes(kind, office_tree(archive, parts[f"{kind}s"]))
    body = office_tree(archive, start)
    beside = {"header": list[str](), "footer": list[str]()}
    targets = {each.id: each.target for each in related}
    for kind, texts in beside.items():
        ids = dict.fromkeys(find(body, f"//w:{kind}Reference/@r:id"))
        tracker.not_read[kind] += sum(id not in targets for id in ids)
        for part in dict.fromkeys(targets[id] for id in ids if id in targets):
            texts += page.text(office_tree(archive, part)).split("\n")
    text = page.text(body)
    header, footer = (dict.fromkeys(lines) for lines in beside.values())
    return "\n".join(filter(None, [*header, text, *page.comments(), *footer]))


class _Page:
    """Makes HTML of Word's elements."""

    def __init__(self, styles: Any, lists: Lists, tracker: Tracker) -> None:
        self._lists, self._tracker = lists, tracker
        self._notes = dict[tuple[str, str], str]()
        self._effects = dict[str | None, dict[str, str]]()
        known = [] if styles is None else find(styles, "descendant::w:style")
        own = {each.get(full("w:styleId")): _effects(each.find("w:rPr", NAMES)) for each in known}
        bases = {each.get(full("w:styleId")): value_of(each, "w:basedOn") for each in known}
        for style in own:
            chain = [style]
            while bases.get(chain[-1]) in own and bases[chain[-1]] not in chain:
                chain.append(bases[chain[-1]])
            self._effects[style] = {
                key: value for each in reversed(chain) for key, value in own[each].items()
            }

    def add_notes(self, kind: str, tree: Any) -> None:
        """Add the notes of a part, or its comments."""
        for each in tree.findall(f"w:{kind}", NAMES):
            by = f" by {author}" if (author := each.get(full("w:author"))) else ""
            id, text = each.get(full("w:id"), ""), " ".join(self.text(each).split())
            what = f"Comment{by}" if kind == "comment" else "Note"
            self._notes[kind, id] = f" [{what}: {text}]" if text else ""

    def comments(self) -> list[str]:
        """Those that nothing has referred to."""
        return [text.strip() for (kind, _), text in self._notes.items() if kind == "comment"]

    def text(self, tree: Any) -> str:
        """The text of a part, whose tree is spent."""
        from lxml.etree import strip_elements, strip_tags

        _join_paragraphs(tree)
        strip_elements(tree, *map(full, _SKIPPED.split()), with_tail=False)
        for what, counted in _NOT_READ.items():
            self._tracker.not_read[counted] += len(find(tree, f"descendant::{what}"))
        _fill_in(tree)
        strip_elements(tree, full("w:sdtPr"), full("w:sdtEndPr"))
        strip_tags(tree, *map(full, _UNWRAPPED.split()))
        self._mark_runs(tree)
        self._write(tree)
        equations = find(tree, "descendant::m:oMath")
        write_formulas(equations, "docx", self._tracker)
        for table in find(tree, "descendant::w:tbl"):
            _merge_cells(table)
        boxes = "descendant::w:txbxContent/* | descendant::a:p[ancestor::w:p]"
        for box in reversed(find(tree, boxes)):
            find(box, "ancestor::w:p[1]")[0].addnext(box)
        html_names = {full(name): html for name, html in _HTML_NAMES.items()}
        for each in tree.iter():
            if each.tag not in (full("w:t"), full("a:t"), "span"):
                each.text = None
            each.text, each.tail = (each.text or "").replace("  ", SPACE * 2), None
            each.tag = html_names.get(each.tag, "span" if "}" in each.tag else each.tag)
        return text_of(tree, self._tracker, gap=1)

    def _mark_runs(self, tree: Any) -> None:
        """Mark raised, lowered and struck text, and take out what is hidden."""
        for run in tree.iter(full("w:r")):
            paragraph = next(run.iterancestors(full("w:p")), run)
            effects = {
                **self._effects.get(value_of(paragraph, "w:pPr/w:pStyle"), {}),
                **self._effects.get(value_of(run, "w:rPr/w:rStyle"), {}),
                **_effects(run.find("w:rPr", NAMES)),
            }
            mark = _mark(effects) if effects else ""
            if mark == "hidden":
                run.clear()
            elif mark:
                run.tag = mark

    def _write(self, tree: Any) -> None:
        """Write what has no text of its own: numbers, notes, symbols, descriptions."""
        for paragraph in find(tree, "descendant::w:p[w:pPr]"):
            mark = self._lists.mark(paragraph.find("w:pPr", NAMES))
            self._tracker.not_read["list number"] += mark is None
            paragraph[0].clear()
            _say(paragraph[0], (mark or "").replace(" ", SPACE))
        for name, text in _WRITTEN.items():
            for each in tree.iter(full(name)):
                _say(each, text)
        for each in tree.iter(*map(full, _LINE_BREAKS)):
            each.tag = "br"
        for text in tree.iter(full("w:t")):
            if any(map(is_private, text.text or "")):
                font = text.getparent().find("w:rPr/w:rFonts", NAMES)
                self._show(text, None if font is None else font.get(full("w:ascii")), text.text)
        for symbol in tree.iter(full("w:sym")):
            character = chr(int(symbol.get(full("w:char"), "FFFD"), 16))
            self._show(symbol, symbol.get(full("w:font")), character)
        for code in tree.iter(full("w:instrText")):
            if (code.text or "").strip().startswith("EQ "):
                _say(code, code.text.strip().removeprefix("EQ "))
        for kind in ("footnote", "endnote", "comment"):
            for reference in tree.iter(full(f"w:{kind}Reference")):
                key = kind, reference.get(full("w:id"), "")
                self._tracker.not_read[kind] += key not in self._notes
                _say(reference, self._notes.get(key, ""))
                if kind == "comment":
                    self._notes.pop(key, None)
        for shape in tree.iter(full("wp:docPr"), full("v:shape")):
            described = " ".join((shape.get("descr") or shape.get("alt") or "").split())
            if described:
                shape.insert(0, _span(f"[Picture: {described}]"))
        for art in find(tree, "descendant::v:textpath[ancestor::w:p]"):
            paragraph = find(art, "ancestor::w:p[1]")[0]
            paragraph.addnext(paragraph.makeelement(full("w:p")))
            paragraph.getnext().append(_span(art.get("string", "")))

    def _show(self, element: Any, font: str | None, text: str) -> None:
        shown, unknown = shown_in(font, text)
        self._tracker.not_read["symbol"] += unknown
        _say(element, shown)


def _join_paragraphs(tree: Any) -> None:
    """Join paragraphs whose end is deleted with the next; take out deleted rows and cells."""
    for gone in find(tree, "descendant::w:tr[w:trPr/w:del] | descendant::w:tc[w:tcPr/w:cellDel]"):
        gone.getparent().remove(gone)
    for paragraph in reversed(find(tree, "descendant::w:p[w:pPr/w:rPr[w:del or w:moveFrom]]")):
        after = paragraph.getnext()
        if after is not None and after.tag == paragraph.tag:
            at = int(after.find("w:pPr", NAMES) is not None)
            after[at:at] = paragraph[1:]
            paragraph.getparent().remove(paragraph)


def _fill_in(tree: Any) -> None:
    """Write what forms were filled in with; take out what asks for it."""
    for control in find(tree, "descendant::w:sdt[w:sdtPr/w:showingPlcHdr]"):
        if _is_on(control, "w:sdtPr/w:showingPlcHdr"):
            control.clear()
    for field in find(tree, "descendant::w:fldChar[w:ffData]"):
        checkbox, choice = (field.find(f"w:ffData/w:{each}", NAMES) for each in
                            ("checkBox", "ddList"))  # fmt: skip
        if checkbox is not None:
            name = "w:checked" if checkbox.find("w:checked", NAMES) is not None else "w:default"
            _say(field, "[x]" if _is_on(checkbox, name) else "[ ]")
        elif choice is not None:
            entries = find(choice, "w:listEntry/@w:val")
            chosen = int(value_of(choice, "w:result") or value_of(choice, "w:default") or 0)
            _say(field, entries[chosen] if chosen < len(entries) else "")


def _merge_cells(table: Any) -> None:
    """Say of cells how many columns and rows they cover."""
    above = dict[int, Any]()
    for row in table.findall("w:tr", NAMES):
        skipped = min(int(value_of(row, "w:trPr/w:gridBefore") or 0), _MOST_COLUMNS)
        column = skipped
        for cell in row.findall("w:tc", NAMES):
            span = max(1, min(int(value_of(cell, "w:tcPr/w:gridSpan") or 1), _MOST_COLUMNS))
            merged = cell.find("w:tcPr/w:vMerge", NAMES)
            begins = merged is None or merged.get(full("w:val")) == "restart"
            if begins or column not in above or "".join(cell.itertext()).strip():
                above[column] = cell
                cell.set("colspan", str(span))
            else:
                first = above[column]
                first.set("rowspan", str(int(first.get("rowspan", "1")) + 1))
                row.remove(cell)
            column += span
        for properties in row.findall("w:trPr", NAMES):
            row.remove(properties)
        for _ in range(skipped):
            row.insert(0, row.makeelement(full("w:tc")))


def _effects(properties: Any) -> dict[str, str]:
    """What properties of text say of those that raise, strike or hide it."""
    found = dict[str, str]()
    for each in () if properties is None else properties:
        name = each.tag.rpartition("}")[2]
        if name in _EFFECTS:
            found[name] = each.get(full("w:val"), "1")
    return found


def _mark(effects: dict[str, str]) -> str:
    """How text is marked in HTML; "hidden" if it is not shown."""
    is_on = {name for name, value in effects.items() if value not in OFF}
    if "vanish" in is_on:
        return "hidden"
    raised = {"superscript": "sup", "subscript": "sub"}.get(effects.get("vertAlign", ""), "")
    by = _half_points(effects.get("position", "0"))
    if not raised and abs(by) >= _RAISED_BY:
        raised = "sup" if by > 0 else "sub"
    return raised or ("del" if is_on & {"strike", "dstrike"} else "")


def _half_points(measure: str) -> float:
    found = _MEASURE.fullmatch(measure)
    return float(found[1]) * _HALF_POINTS[found[2]] if found else 0


def _is_on(parent: Any, path: str) -> bool:
    found = parent.find(path, NAMES)
    return found is not None and found.get(full("w:val")) not in OFF


def _say(element: Any, text: str) -> None:
    """Put text in the place of an element."""
    element.clear()
    element.tag, element.text = "span", text


def _span(text: str) -> Any:
    from lxml.etree import Element

    span = Element("span")
    span.text = text
    return span
