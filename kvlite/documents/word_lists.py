"""Numbers and bullets of a Word document's lists: counted from its styles and numbering, as its
text does not contain them."""

import re
from collections import defaultdict
from dataclasses import dataclass, field

_LEVELS = 9
# The longest chain of styles that is followed, and the most letters of a number such as "aaa".
_LONGEST = 20
_ROMAN_SIGNS = "m cm d cd c xc l xl x ix v iv i"
_ROMAN_VALUES = (1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1)


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
    """The lists of a document, collected from the markup of its styles, then of its numbering."""

    _levels: dict[str, dict[int, _Level]] = field(default_factory=lambda: defaultdict(dict))
    _list_of: dict[str, str] = field(default_factory=dict)
    _restarts: dict[tuple[str, int], int] = field(default_factory=dict)
    _styles: dict[str, _Style] = field(default_factory=dict)
    _styled: dict[tuple[str, str], int] = field(default_factory=dict)
    _counts: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    _style: _Style = field(default_factory=_Style)
    _list: str = ""
    _number: str = ""
    _at: int = 0

    def begin(self, tag: str, attributes: dict[str, str]) -> None:
        """Enter an element."""
        value = attributes.get("w:val", "")
        level = self._levels[self._list].get(self._at)
        match tag:
            case "w:style":
                self._style = self._styles[attributes.get("w:styleId", "")] = _Style()
            case "w:basedOn":
                self._style.base = value
            case "w:numId":
                self._style.number = value
            case "w:ilvl":
                self._style.level = value
            case "w:abstractNum":
                self._list = attributes.get("w:abstractNumId", "")
            case "w:num":
                self._number = attributes.get("w:numId", "")
            case "w:abstractNumId":
                self._list_of[self._number] = self._list = value
            case "w:lvl" | "w:lvlOverride":
                self._at = int(attributes.get("w:ilvl", "0"))
                if tag == "w:lvl":
                    self._levels[self._list].setdefault(self._at, _Level())
            case "w:startOverride":
                self._restarts[self._number, self._at] = int(value)
            case "w:pStyle":
                self._styled[self._list, value] = self._at
            case "w:start" if level:
                level.start = int(value)
            case "w:numFmt" if level:
                level.form = value
            case "w:lvlText" if level:
                level.text = value

    def mark(self, style: str, number: str | None, level: str | None) -> str | None:
        """What precedes the next paragraph: "" outside lists, None if it cannot be known.

        Args:
            style, number, level: as the paragraph names them.
        """
        name = style
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
        levels = self._levels.get(which, {})
        if at not in levels or not 0 <= at < _LEVELS:
            return None
        counts, restart = self._counts[which], self._restarts.pop((number, at), None)
        for deeper in range(at + 1, _LEVELS):
            counts.pop(deeper, None)
        counts[at] = counts.get(at, levels[at].start - 1) + 1 if restart is None else restart
        return _written(levels, at, counts)


def _written(levels: dict[int, _Level], at: int, counts: dict[int, int]) -> str:
    if levels[at].form == "bullet":
        return "- "

    def number(found: re.Match[str]) -> str:
        level = levels.get(int(found[1]) - 1, _Level())
        return _formatted(counts.get(int(found[1]) - 1, level.start), level.form)

    text = re.sub(r"%([1-9])", number, levels[at].text)
    return f"{text} " if text.strip() else ""


def _formatted(number: int, form: str) -> str:
    """A number in a list's format; in digits if the format is not known."""
    if form == "none":
        return ""
    if form.endswith("Letter") and number > 0:
        repeats, letter = divmod(number - 1, 26)
        written = chr(ord("a") + letter) * min(repeats + 1, _LONGEST)
    elif form.endswith("Roman") and 0 < number < 4000:
        written = ""
        for sign, value in zip(_ROMAN_SIGNS.split(), _ROMAN_VALUES, strict=True):
            written += sign * (number // value)
            number %= value
    else:
        return f"{number:02}" if form == "decimalZero" else str(number)
    return written.upper() if form.startswith("upper") else written
