"""Files that were read wrongly once, each with what is right."""

import contextlib
import re
import zipfile
from pathlib import Path

import pytest
from lxml import etree

from kvlite.documents import read_document

_FILES = Path(__file__).parent / "data" / "cases"
_MAIL = "From: a@x.example\nSubject: "
_OTTER = ("One\n\nThe otter woke at dawn.", "Two\n\nThe otter swam to the weir.",
          "Three\n\nThe otter slept under the alder.")  # fmt: skip
_RIVERS = "River | Fish | Note\nOuse | 14 |\nCam | 9 | closed\nNene |\nTees | 7 | open"
# The whole text of each.
_TEXTS = {
    "brcell.html": "a b | p1 p2 | - i1 - i2\nc | d | e",
    "empties.html": "a |\nb |\nc |\nd |\ne | 5\n\nAfter table.\nx |\n\nPara after empty cell.\n\n"
    "Para after empty item.\none |\ntwo | 2\n\nHead",
    "entities.html": "Caf\u00e9 <b> &amp; \u20ac5 \u2014 \xa0xy \u00acanentity; \xa9 2020 A&B "
    "\u2013 \ufffd \u2026\n\na\nb\ncd\n\nx^2 + H_2O\n\n~~old price 10~~ new price 8",
    "hidden.html": "Seen one.\n\nAria.\n\nMore\n\nFolded text.\n\nSeen two.",
    "lastcell.html": _RIVERS,
    "lastcell.pptx": _RIVERS,
    "math.html": "The dose is 10^6 units, H_2O, a_(1)2.\n\n"
    "Ratio 1/2, power 10^6, root \\sqrt{16}.\n\nFootnote mark in 1990[3].",
    "pre.html": "Code:\n\ndef f(x):\n    if x:\n        return 1\n\n\n    return   2\n\n"
    "after it\n\na   b\n  c\nt1\n  t2",
    "rowspan.html": "River | Year | Fish\nOuse | 2001 | 14\nOuse | 2002 | 19\n"
    "Cam | closed | closed\nNene | 2003 | 7",
    "strike.html": "Price: ~~50~~ 40 euros. ~~Closed~~Open on Monday.",
    "enc.eml": f"{_MAIL}Secret",
    "mixed_min.eml": f"{_MAIL}Minutes\n\nSee below.\n\nThe vote was 7 to 2.",
    "plain_empty_html_full.eml": f"{_MAIL}News\n\nThe bridge opens in May.",
    "two_plain.eml": f"{_MAIL}Minutes\n\nFirst part.\n\nThe budget is 900 euros.",
    "crc.epub": f"{_OTTER[0]}\n\n{_OTTER[2]}",
    "missing_file.epub": f"{_OTTER[0]}\n\n{_OTTER[1]}",
    "nav_in_spine.epub": "\n\n".join(_OTTER),
    "svg_spine.epub": "\n\n".join(_OTTER[1:]),
    "hyphen.pdf": "The investigation\nof the waterworks\ntook sixtyfive\ndays. A soft hyphen\ntoo.",
    "lig.pdf": "The officer in the final flat said effective baffle.",
    "rtl_num.pdf": "\u05de\u05d7\u05d9\u05e8 450 \u05e9\u05e7\u05dc",
    "two_columns.pdf": "\n".join(
        [f"Left line {at} of the first column." for at in range(6)]
        + [f"Right line {at} of the second." for at in range(6)]
    ),
}
# What stands in longer ones.
_PARTS = {
    "controls.docx": ("Blue is the colour.", "[x] agreed", "Empty:\n"),
    "omml.docx": (
        r"frac (a+b)/2: \frac{a + b}{2}",
        r"cube root of x: \sqrt[3]{x}",
        r"half-open interval [0,1): \lbrack 0,1)",
        "x_i^2: x_i^2",
        r"lim x->0 f(x): \lim_{x \rightarrow 0}f(x)",
        r"matrix 1 2; 3 4: \begin{matrix} 1 & 2 \\ 3 & 4 \end{matrix}",
        r"binomial n over k (noBar): \binom{n}{k}",
    ),
    "article.pdf": ("A TALE OF A BRIDGE\nThe harbour council met in spring\nto settle",),
    "article_colmajor.pdf": ("A TALE OF A BRIDGE\nThe harbour council met in spring\nto settle",),
    "dos_cp850.txt": (
        "M\u00fcller, K\u00f6ln, Stra\u00dfe 5, Gr\u00f6\u00dfe: \u00e4u\u00dferst gro\u00df",
    ),
    "he_1255.txt": ("\u05d7\u05d5\u05d6\u05d4",),
    "he_long.txt": ("\u05d7\u05d5\u05d6\u05d4",),
    "ja_iso2022.txt": ("\u5fa1\u898b\u7a4d\u66f8",),
    "stray1.txt": ("Se\u00f1or Mu\u00f1oz lives in Caf\u00e9 Z\u00fcrich", "na\ufffdve"),
    "stray2.txt": ("Se\u00f1or Mu\u00f1oz lives in Caf\u00e9 Z\u00fcrich", "caf\ufffd"),
    "tr_long.txt": ("be\u015finde kiray\u0131 \u00f6der. \u0130stanbul ili, \u015ei\u015fli",),
    "utf8_cut.txt": ("R\u00e9sum\u00e9 \u2013 \u6f22\u5b57",),
    "utf8_one_bad_byte.txt": ("M\u00fcller aus K\u00f6ln. \u6f22\u5b57 \U0001f600", "caf\ufffd"),
    "utf8_then_latin.log": ("\u00fcbung eins", "\ufffdbung zwei"),
    "pics.pdf": ("Page one text.", "Page three text.", "Page six text."),
    "odd.xlsx": (
        "Date | Share | Sum\n2024-03-14 | 50% | 3.3 | [=A2+1: no value] | TRUE | "
        "#DIV/0!\n2024-03-14 18:00 | 36:00:00 | 1234567.891 EUR |  | 7%\nHIDDENROW\n\nSecret",
    ),
    "sup.xlsx": ("There are 10^6 cells\nx\nOuse | 2001\nOuse | 2002",),
    "repeat.ods": ("Ann | 0 | 0 | 0 | 7",),
}
# What is said besides.
_NOTES = {
    "enc.eml": "1 encrypted or signed part (smime.p7m) was not read",
    "crc.epub": "1 damaged part (m2.xhtml) was not read",
    "missing_file.epub": "1 damaged part (a3.xhtml) was not read",
    "svg_spine.epub": "1 picture was not read",
    "pics.pdf": "scanned pages 2, 4 (the setting ocr reads them) were not read",
    "odd.xlsx": "1 uncalculated formula (Sales!D2) was not read",
    "dos_cp850.txt": "read as cp437",
    "he_1255.txt": "read as Windows-1255",
    "he_long.txt": "read as Windows-1255",
    "tr_long.txt": "read as Windows-1254",
    "stray1.txt": "U+FFFD stands for what is no UTF-8 in 1 place",
    "stray2.txt": "U+FFFD stands for what is no UTF-8 in 1 place",
    "utf8_cut.txt": "U+FFFD stands for what is no UTF-8 in 1 place",
    "utf8_one_bad_byte.txt": "U+FFFD stands for what is no UTF-8 in 1 place",
    "utf8_then_latin.log": "U+FFFD stands for what is no UTF-8 in 20 places",
}


def test_every_file_has_what_is_right() -> None:
    assert {each.name for each in _FILES.iterdir()} == {*_TEXTS, *_PARTS}


@pytest.mark.parametrize("name", [*_TEXTS, *_PARTS])
def test_what_was_read_wrongly_once(name: str) -> None:
    document = read_document(str(_FILES / name))
    if name in _TEXTS:
        assert document.text == _TEXTS[name]
    for part in _PARTS.get(name, ()):
        assert part in document.text
    assert _NOTES.get(name, "") in document.note
    assert bool(document.note) == (name in _NOTES)


# Elements that hold what is shown, by the ends of files' names and of parts' names.
_SHOWN = {
    ".docx": (r"word/\w+\.xml", "{*}t"),
    ".pptx": (r"ppt/(slides|notesSlides)/\w+\.xml", "{*}t"),
    ".ods": (r"content\.xml", "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}p"),
    ".xlsx": (r"xl/(sharedStrings|worksheets/sheet\d+)\.xml", "{*}t"),
    ".epub": (r".*\.xhtml", "{*}p"),
}
# What is not shown: a placeholder, a list of pages, damaged parts.
_UNSEEN = {
    "controls.docx": {"Click", "or", "tap", "here", "to", "enter", "text", "placeholder"},
    "crc.epub": {"swam", "weir"},
    "omml.docx": {"PHANTOM"},
}


@pytest.mark.parametrize(
    "path",
    [each for each in sorted(_FILES.iterdir()) if each.suffix in _SHOWN],
    ids=lambda path: path.name,
)
def test_every_word_of_the_markup_is_read(path: Path) -> None:
    parts, name = _SHOWN[path.suffix]
    words = set[str]()
    with zipfile.ZipFile(path) as archive:
        for part in filter(re.compile(parts).fullmatch, archive.namelist()):
            with contextlib.suppress(zipfile.BadZipFile):  # one is damaged
                for each in etree.fromstring(archive.read(part)).iter(name):
                    words |= {*re.findall(r"\w+", "".join(each.itertext()))}
    text = read_document(str(path)).text
    found = re.findall(r"\w+", text + re.sub(r"[\^_]", "", text))
    assert words - {*found} <= _UNSEEN.get(path.name, set())
