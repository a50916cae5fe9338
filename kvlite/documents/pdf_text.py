"""The lines of a PDF's page, from the places of its characters."""

import ctypes
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvlite.documents.reading_order import GUTTER, Box, is_leftward, lines_of

# PDFium's mark of a word that goes on in the next line.
_BROKEN = "\x02"
_HYPHENS = re.compile(rf"([^\W\d_])([{_BROKEN}\u00ad\u2010-])\n(\S+)(?: |\n|$)")
_JOINED = re.compile("[\ufb00-\ufdff\ufe70-\ufefc]+")
# TeX's codes, of files that don't say what their characters mean.
_UNNAMED = dict(enumerate(["\u201c", "\u201d", "\u201e", "\xab", "\xbb", "\u2013", "\u2014"], 0x10))
_UNNAMED |= dict(enumerate(["ff", "fi", "fl", "ffi", "ffl"], 0x1B))
# Raised or lowered text is at most so large, and is off the line by so much of the usual size.
_SMALL, _RAISED, _LOWERED = 0.8, 0.2, -0.08
# No gap is smaller, times the size of a character.
_THIN = 0.1
_WORD = re.compile(r"[^\W\d_]{2,}|[\W_]+")

# Left, top, right and bottom.
_Place = tuple[float, float, float, float]


@dataclass(slots=True)
class _Character:
    """One on the page; places count from the upper left corner of it, turned upright."""

    text: str
    index: int
    box: _Place
    spaced: bool = False
    level: str = ""

    @property
    def size(self) -> float:
        """How high its font is."""
        return self.box[3] - self.box[1]


def page_text(page: Any) -> str:
    """The lines of a page, in the order in which they are read."""
    text_page, turned = page.get_textpage(), defaultdict[int, list[Box]](list)
    for angle, run in _runs(text_page.raw, page.get_bbox()):
        if not angle:
            _mark_levels(text_page.raw, run)
        left, top, right, bottom = zip(*(each.box for each in run), strict=True)
        box = Box(_words(run), min(left), min(top), max(right), max(bottom))
        turned[angle].append(box)
    text_page.close()
    upright_first = sorted(turned.values(), key=len, reverse=True)
    text = "\n".join(line for boxes in upright_first for line in lines_of(boxes))
    text = _HYPHENS.sub(_whole_word, text).replace(_BROKEN, "-").replace("\u00ad", "")
    return _JOINED.sub(lambda found: unicodedata.normalize("NFKC", found[0]), text)


def _whole_word(found: re.Match[str]) -> str:
    first, hyphen, last = found.groups()
    if last[0].islower():
        return f"{first}{last}\n"
    return found[0].replace(hyphen + "\n", "-\n")


def _runs(raw: Any, seen: tuple[float, ...]) -> Iterator[tuple[int, list[_Character]]]:
    """Characters that follow each other in a line without a wide gap, and their angle."""
    import pypdfium2.raw as pdfium

    run, between, angle = list[_Character](), "", 0
    rect = pdfium.FS_RECTF()
    place = ctypes.byref(rect)
    for index in range(pdfium.FPDFText_CountChars(raw)):
        text = chr(pdfium.FPDFText_GetUnicode(raw, index)).translate(_UNNAMED)
        if text.isspace() or text == "\0":
            between += text
            continue
        pdfium.FPDFText_GetLooseCharBox(raw, index, place)
        x, y = (rect.left + rect.right) / 2, (rect.bottom + rect.top) / 2
        if not (seen[0] <= x <= seen[2] and seen[1] <= y <= seen[3]):
            continue
        now = -round(math.degrees(pdfium.FPDFText_GetCharAngle(raw, index))) % 360
        character = _Character(text, index, _turned(rect, now))
        if run and (now != angle or _is_apart(run, character, "\n" in between)):
            yield angle, run
            run = []
        if run and between:
            gap, usual = character.box[0] - run[-1].box[2], character.size
            # PDFium finds a space wherever the size changes.
            character.spaced = gap > _THIN * usual or abs(run[-1].size - usual) < _THIN * usual
        run.append(character)
        between, angle = "", now
    if run:
        yield angle, run


def _turned(rect: Any, angle: int) -> _Place:
    """A place on the page, once text at this angle is turned upright."""
    if not angle:
        return rect.left, -rect.top, rect.right, -rect.bottom
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    corners = [(x, y) for x in (rect.left, rect.right) for y in (rect.bottom, rect.top)]
    across = [x * cos + y * sin for x, y in corners]
    down = [x * sin - y * cos for x, y in corners]
    return min(across), min(down), max(across), max(down)


def _is_apart(run: list[_Character], new: _Character, in_new_line: bool) -> bool:
    """Whether a character is too far from a run to belong to it."""
    last, (left, top, _, bottom) = run[-1], new.box
    if last.box[1] != top:
        places = [each.box for each in run[-3:]]
        if not min(p[1] for p in places) < (top + bottom) / 2 < max(p[3] for p in places):
            return True
    gap, high = left - last.box[2], max(last.box[3] - last.box[1], bottom - top)
    if in_new_line:  # or only behind something raised
        larger = any(each.size >= new.size > last.size for each in run[-3:])
        return not (larger and abs(gap) < _THIN * high)
    if -2 * high < gap < GUTTER * high:
        return False
    return not is_leftward(last.text + new.text)


def _mark_levels(raw: Any, run: list[_Character]) -> None:
    """Say which characters of a run are raised or lowered, by their size and base line."""
    import pypdfium2.raw as pdfium

    def base(character: _Character) -> float:
        x, y = ctypes.c_double(), ctypes.c_double()
        pdfium.FPDFText_GetCharOrigin(raw, character.index, x, y)
        return y.value

    (usual, _), *other = Counter(round(each.size, 1) for each in run).most_common()
    if not any(size <= _SMALL * usual for size, _ in other):
        return
    line = base(next(each for each in run if round(each.size, 1) == usual))
    for each in run:
        if each.size <= _SMALL * usual:
            off = (base(each) - line) / usual
            each.level = "^" if off >= _RAISED else "_" if off <= _LOWERED else ""


def _words(run: list[_Character]) -> str:
    """The text of a run, raised and lowered parts marked."""
    made = ""
    parts = [(level, list(part)) for level, part in groupby(run, lambda each: each.level)]
    for at, (level, part) in enumerate(parts):
        text = "".join(" " * each.spaced + each.text for each in part)
        if level and made and not text.startswith(" ") and made[-1] not in "/\u2044":
            after = parts[at + 1][1][0] if at + 1 < len(parts) else None
            if not _WORD.fullmatch(text):
                follows = after.text if after is not None and not after.spaced else ""
                alike = follows.isalnum() and follows.isdigit() == text[-1].isdigit()
                text = f"{level}({text})" if alike or " " in text else level + text
        made += text
    return made
