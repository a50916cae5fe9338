"""Numbers and bullets of a Word document's lists: counted from its styles and numbering, as its
text does not contain them."""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from kvlite.documents.list_numbers import number_in
from kvlite.documents.office import NAMES, full, value_of

_LEVELS = 9
# The longest chain of styles that is followed.
_LONGEST = 20
_FORMS = {"lowerLetter": "a", "upperLetter": "A", "lowerRoman": "i", "upperRoman": "I"}
_INDENT = "  "


@dataclass(frozen=True)
class _Level:
    start: int = 1
    form: str = "decimal"
    text: str = ""
    # Whether numbers of levels above are in digits; and which levels begin this one anew.
    legal: bool = False
    restart: int = 9


@dataclass(frozen=True)
class _Style:
    number: str | None
    level: str | None
    base: str


class Lists:
    """The lists of a document.

    Raises:
        ValueError: a number in its markup is none.
    """

    def __init__(self, styles: Any, numbering: Any) -> None:
        """Of the parts with its styles and its numbering, as trees; either may be None."""
        self._styles, self._list_of = dict[str, _Style](), dict[str, str]()
        self._levels = defaultdict[str, dict[int, _Level]](dict)
        self._styled, self._restarts = dict[tuple[str, str], int](), dict[tuple[str, int], int]()
        self._changed = defaultdict[str, dict[int, _Level]](dict)
        # Lists that are those of a style.
        self._links = dict[str, str]()
        self._counts = defaultdict[str, dict[int, int]](dict)
        for style in () if styles is None else styles.iter(full("w:style")):
            number, level = value_of(style, ".//w:numId"), value_of(style, ".//w:ilvl")
            base = value_of(style, "w:basedOn") or ""
            self._styles[style.get(full("w:styleId"), "")] = _Style(number, level, base)
        for each in () if numbering is None else numbering.iter(full("w:abstractNum")):
            which = each.get(full("w:abstractNumId"), "")
            self._links[which] = value_of(each, "w:numStyleLink") or ""
            self._add_levels(which, self._levels[which], each)
        for each in () if numbering is None else numbering.iter(full("w:num")):
            number = each.get(full("w:numId"), "")
            self._list_of[number] = which = value_of(each, "w:abstractNumId") or ""
            for changed in each.iter(full("w:lvlOverride")):
                if restart := value_of(changed, "w:startOverride"):
                    at = int(changed.get(full("w:ilvl"), "0"))
                    self._restarts[number, at] = int(restart)
            self._add_levels(which, self._changed[number], each)
        for number, which in self._list_of.items():
            if style := self._styles.get(self._links.get(which, "")):
                self._list_of[number] = self._list_of.get(style.number or "", which)

    def _add_levels(self, which: str, levels: dict[int, _Level], parent: Any) -> None:
        for level in parent.iter(full("w:lvl")):
            at = int(level.get(full("w:ilvl"), "0"))
            start, form = value_of(level, "w:start"), value_of(level, "w:numFmt")
            text = value_of(level, "w:lvlText") or ""
            legal = level.find("w:isLgl", NAMES) is not None
            restart = int(value_of(level, "w:lvlRestart") or _LEVELS)
            levels[at] = _Level(int(start or 1), form or "decimal", text, legal, restart)
            if style := value_of(level, "w:pStyle"):
                self._styled[which, style] = at

    def mark(self, properties: Any) -> str | None:
        """What precedes the next paragraph: "" outside lists, None if it cannot be known.

        Args:
            properties: of the paragraph (`w:pPr`).
        """
        name = style = value_of(properties, "w:pStyle") or ""
        number = value_of(properties, "w:numPr/w:numId")
        level = value_of(properties, "w:numPr/w:ilvl")
        for _ in range(_LONGEST):
            if name not in self._styles or (number is not None and level is not None):
                break
            own = self._styles[name]
            if number is None and own.number is not None:
                number, style = own.number, name
            level = own.level if level is None else level
            name = own.base
        if number is None or number == "0":
            return ""
        which = self._list_of.get(number, "")
        at = self._styled.get((which, style), 0) if level is None else int(level)
        levels = {**self._levels.get(which, {}), **self._changed.get(number, {})}
        if at not in levels or not 0 <= at < _LEVELS:
            return None
        counts, restart = self._counts[which], self._restarts.pop((number, at), None)
        for deeper in range(at + 1, _LEVELS):
            if at < levels.get(deeper, _Level()).restart:
                counts.pop(deeper, None)
        counts[at] = counts.get(at, levels[at].start - 1) + 1 if restart is None else restart
        written = _written(levels, at, counts)
        return written and _INDENT * int(level or 0) + written


def _written(levels: dict[int, _Level], at: int, counts: dict[int, int]) -> str:
    if levels[at].form == "bullet":
        return "- "

    def number(found: re.Match[str]) -> str:
        level = levels.get(int(found[1]) - 1, _Level())
        count = counts.get(int(found[1]) - 1, level.start)
        if levels[at].legal:
            return str(count)
        if level.form == "decimalZero":
            return f"{count:02}"
        return "" if level.form == "none" else number_in(_FORMS.get(level.form, ""), count)

    text = re.sub(r"%([1-9])", number, levels[at].text)
    return f"{text} " if text.strip() else ""
