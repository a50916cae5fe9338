"""The numbers and bullets of a Word document's lists, which stand nowhere in its text."""

import re
from collections import defaultdict
from dataclasses import dataclass, field

_LEVELS = 9
# How many styles may stand on one another.
_DEEP = 20
_ROMAN = (
    *((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l")),
    *((40, "xl"), (10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i")),
)


@dataclass
class _Level:
    start: int = 1
    form: str = "decimal"
    text: str = ""


@dataclass
class _Style:
    number: str | None = None
    level: str | None = None
    base: str = ""


@dataclass
class Lists:
    """The lists of a document; takes the markup of its styles and of its numbering."""

    _levels: dict[str, dict[int, _Level]] = field(default_factory=lambda: defaultdict(dict))
    _of: dict[str, str] = field(default_factory=dict)
    _restarts: dict[tuple[str, int], int] = field(default_factory=dict)
    _styles: dict[str, _Style] = field(default_factory=dict)
    _styled: dict[tuple[str, str], int] = field(default_factory=dict)
    _counts: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    _style: _Style = field(default_factory=_Style)
    _list: str = ""
    _number: str = ""
    _at: int = 0

    def begin(self, tag: str, attributes: dict[str, str]) -> None:
        """Take an element's beginning."""
        value = attributes.get("w:val", "")
        level = self._levels[self._list].get(self._at)
        if tag == "w:style":
            self._style = self._styles[attributes.get("w:styleId", "")] = _Style()
        elif tag == "w:basedOn":
            self._style.base = value
        elif tag == "w:numId":
            self._style.number = value
        elif tag == "w:ilvl":
            self._style.level = value
        elif tag == "w:abstractNum":
            self._list = attributes.get("w:abstractNumId", "")
        elif tag == "w:num":
            self._number = attributes.get("w:numId", "")
        elif tag == "w:abstractNumId":
            self._of[self._number] = self._list = value
        elif tag in ("w:lvl", "w:lvlOverride"):
            self._at = int(attributes.get("w:ilvl", "0"))
            if tag == "w:lvl":
                self._levels[self._list].setdefault(self._at, _Level())
        elif tag == "w:startOverride":
            self._restarts[self._number, self._at] = int(value)
        elif tag == "w:pStyle":
            self._styled[self._list, value] = self._at
        elif level is not None and tag == "w:start":
            level.start = int(value)
        elif level is not None and tag == "w:numFmt":
            level.form = value
        elif level is not None and tag == "w:lvlText":
            level.text = value

    def mark(self, style: str, number: str | None, level: str | None) -> str | None:
        """What stands before the next paragraph, if it is in a list; None if nobody can tell.

        Args:
            style, number, level: that the paragraph names.
        """
        name, seen = style, 0
        while (number is None or level is None) and name in self._styles and seen < _DEEP:
            own = self._styles[name]
            if number is None and own.number is not None:
                number, style = own.number, name
            level = own.level if level is None else level
            name, seen = own.base, seen + 1
        if number is None or number == "0":
            return ""
        which = self._of.get(number, "")
        at = self._styled.get((which, style), 0) if level is None else int(level)
        levels = self._levels.get(which, {})
        if at not in levels or not 0 <= at < _LEVELS:
            return None
        return self._written(levels, at, self._counted(which, number, levels[at], at))

    def _counted(self, which: str, number: str, level: _Level, at: int) -> dict[int, int]:
        counts, restart = self._counts[which], self._restarts.pop((number, at), None)
        for deeper in range(at + 1, _LEVELS):
            counts.pop(deeper, None)
        counts[at] = counts.get(at, level.start - 1) + 1 if restart is None else restart
        return counts

    @staticmethod
    def _written(levels: dict[int, _Level], at: int, counts: dict[int, int]) -> str:
        if levels[at].form == "bullet":
            return "- "

        def number(found: re.Match[str]) -> str:
            one = int(found[1]) - 1
            level = levels.get(one, _Level())
            return _formed(counts.get(one, level.start), level.form)

        text = re.sub(r"%([1-9])", number, levels[at].text)
        return f"{text} " if text.strip() else ""


def _formed(number: int, form: str) -> str:
    """A number as lists count; in digits, where they count in other ways."""
    if form == "none":
        return ""
    if form.endswith("Letter") and number > 0:
        repeats, letter = divmod(number - 1, 26)
        written = chr(ord("a") + letter) * min(repeats + 1, _DEEP)
        return written.upper() if form.startswith("upper") else written
    if form.endswith("Roman") and 0 < number < 4000:
        written = ""
        for value, sign in _ROMAN:
            written += sign * (number // value)
            number %= value
        return written.upper() if form.startswith("upper") else written
    return f"{number:02}" if form == "decimalZero" else str(number)
