"""Rich text (.rtf): its control words as the elements of a page."""

import codecs
import re
from dataclasses import dataclass, replace

from kvlite.documents.document import whole_characters
from kvlite.documents.tracker import Tracker
from kvlite.documents.visible_text import VisibleText, texts_of

_TOKEN = re.compile(
    r"\\([a-z]{1,32})(-?[0-9]{1,10})?[ ]?|\\'([0-9a-f]{2})|\\(.)|([{}])|([^\\{}]+)", re.I | re.S
)
# Tokens between two looks at whether someone cancelled.
_BEAT = 10_000
_CODECS = {
    77: "mac_roman", 128: "cp932", 129: "cp949", 130: "johab", 134: "gbk", 136: "cp950",
    161: "cp1253", 162: "cp1254", 163: "cp1258", 177: "cp1255", 178: "cp1256", 186: "cp1257",
    204: "cp1251", 222: "cp874", 238: "cp1250", 254: "cp437", 255: "cp437",
}  # fmt: skip
_PAGES = {"mac": "mac_roman", "pc": "cp437", "pca": "cp850"}
# What is no text, besides what begins with \*.
_SKIPPED = frozenset((
    "colortbl", "stylesheet", "info", "fldinst", "pict", "objdata", "nonshppict", "sp", "filetbl",
    "revtbl", "listtable", "xe", "tc", "template",
))  # fmt: skip
_SHOWN = frozenset(("shppict", "shpinst", "footnote", "annotation", "ud"))
_BRACKETED = {"footnote": "Note", "annotation": "Comment"}
_NOT_READ = {"pict": "picture", "objdata": "embedded object"}
_BESIDE = {each + which: each for each in ("header", "footer") for which in ("", "l", "r", "f")}
_CHARACTERS = {
    "tab": " ", "emdash": "\u2014", "endash": "\u2013", "lquote": "\u2018", "rquote": "\u2019",
    "ldblquote": "\u201c", "rdblquote": "\u201d", "bullet": "\u2022", "~": "\xa0", "_": "-",
    "\\": "\\", "{": "{", "}": "}", "emspace": " ", "enspace": " ", "nestcell": " | ",
}  # fmt: skip
_ENDS = frozenset(("par", "page", "sect", "nestrow", "\n", "\r"))


def rtf_text(data: bytes, tracker: Tracker) -> str:
    """The text of a file, a line for each paragraph and each row of a table. Notes stand where they
    belong, headers come first and footers last.

    Raises:
        ContextError: it is longer than could fit.
    """
    text = _RichText(tracker)
    text.read(data.decode("latin-1"))
    pages = [text.pages[name] for name in ("header", "", "footer")]
    return "\n".join(filter(None, texts_of(pages, tracker)))


@dataclass
class _Group:
    """What holds until the end of a group."""

    skipped: bool = False
    page: str = ""
    bracket: str = ""
    font: int = -1
    style: str = ""
    hidden: bool = False
    in_table: bool = False
    after_unicode: int = 1


class _RichText:
    def __init__(self, tracker: Tracker) -> None:
        self.pages = {name: VisibleText(tracker) for name in ("header", "", "footer")}
        self._tracker = tracker
        self._groups = [_Group()]
        self._page = "cp1252"
        self._fonts = dict[int, str]()
        self._in_fonts = 0
        self._decoder: codecs.IncrementalDecoder | None = None
        self._text = list[str]()
        self._text_style = ""
        self._to_skip = 0
        self._row = self._table = self._cell = False
        self._in_row = False

    def read(self, markup: str) -> None:
        """Read a whole file."""
        at = count = 0
        starred = False
        while found := _TOKEN.match(markup, at):
            at, count = found.end(), count + 1
            if count % _BEAT == 0:
                self._tracker.report(at, len(markup))
            word, number, byte, sign, brace, text = found.groups()
            if brace:
                self._begin() if brace == "{" else self._end()
            elif sign == "*":
                starred = True
                continue
            elif byte:
                self._bytes(int(byte, 16))
            elif text:
                self._plain(text)
            elif word == "bin" and number:
                at += max(0, int(number))
            elif word:
                self._word(word, None if number is None else int(number), starred)
            else:
                self._word(sign, None, False)
            starred = False
        self._flush()

    @property
    def _group(self) -> _Group:
        return self._groups[-1]

    def _begin(self) -> None:
        self._to_skip, self._decoder = 0, None
        self._groups.append(replace(self._group, bracket=""))

    def _end(self) -> None:
        self._to_skip, self._decoder = 0, None
        if self._group.bracket:
            self._put("]")
        if len(self._groups) == self._in_fonts:
            self._in_fonts = 0
        page = self._group.page
        if len(self._groups) > 1:
            if self._groups[-2].page != page:
                self._break()
            self._groups.pop()

    def _word(self, word: str, number: int | None, starred: bool) -> None:
        group = self._group
        on = number != 0
        if word in _SKIPPED or (starred and word not in _SHOWN):
            if word in _NOT_READ and not group.skipped:
                self._tracker.not_read[_NOT_READ[word]] += 1
            group.skipped = True
        elif word == "fonttbl":
            group.skipped, self._in_fonts = True, len(self._groups)
        elif word == "ansicpg" and number:
            self._page = _codec(f"cp{number}", self._page)
        elif word in _PAGES:
            self._page = _PAGES[word]
        elif word == "f" and number is not None:
            group.font, self._decoder = number, None
        elif word == "fcharset" and self._in_fonts and number in _CODECS:
            self._fonts[group.font] = _codec(_CODECS[number], self._page)
        elif word == "uc" and number is not None:
            group.after_unicode = max(0, number)
        elif word == "u" and number is not None:
            self._put(chr(number % 0x10000))
            self._to_skip = group.after_unicode
        elif word in ("super", "sub", "strike", "striked", "up", "dn"):
            names = {"super": "sup", "up": "sup", "sub": "sub", "dn": "sub"}
            group.style = names.get(word, "del") if on else ""
        elif word == "nosupersub":
            group.style = ""
        elif word in ("v", "deleted"):
            group.hidden = on
        elif word == "plain":
            group.style, group.hidden = "", False
        elif word == "pard":
            group.in_table = False
        elif word in ("intbl", "trowd"):
            group.in_table = group.in_table or word == "intbl"
            self._row = self._row or word == "trowd"
        elif group.skipped or group.hidden:
            return
        elif word in _BRACKETED:
            group.bracket, group.style = _BRACKETED[word], ""
            self._put(f" [{group.bracket}: ")
        elif word in _BESIDE:
            self._break()
            group.page = _BESIDE[word]
        elif word in ("cell", "row"):
            self._cells(word)
        elif word == "line":
            self._flush()
            self._sink("br")
        elif word in _ENDS:
            self._break()
        elif word in _CHARACTERS:
            self._put(_CHARACTERS[word])

    def _plain(self, text: str) -> None:
        text = re.sub(r"[\r\n]", "", text)
        if self._to_skip:
            skipped = min(self._to_skip, len(text))
            text, self._to_skip = text[skipped:], self._to_skip - skipped
        decoder = self._decoder
        if decoder is not None and decoder.getstate()[0] and text:
            self._put(decoder.decode(text[:1].encode("latin-1")), keep=True)
            text = text[1:]
        if text:
            self._put(text)

    def _bytes(self, byte: int) -> None:
        """A byte of the font's encoding, which may take two for a character."""
        if self._to_skip:
            self._to_skip -= 1
            return
        if self._decoder is None:
            name = self._fonts.get(self._group.font, self._page)
            self._decoder = codecs.getincrementaldecoder(name)("replace")
        self._put(self._decoder.decode(bytes((byte,))), keep=True)

    def _put(self, text: str, *, keep: bool = False) -> None:
        """Add text.

        Args:
            keep: what follows may be the second byte of a character.
        """
        if not keep:
            self._decoder = None
        group = self._group
        if group.skipped or group.hidden or not text:
            return
        if self._text_style != group.style:
            self._flush()
        self._text_style = group.style
        self._text.append(text)

    def _flush(self) -> None:
        """Hand on the text so far: halves of characters beyond the first 65,536 come one by one."""
        text, self._text = whole_characters("".join(self._text)), []
        if not text:
            return
        if text.strip():
            self._open_cell()
        page, style = self.pages[self._group.page], self._text_style
        if style and text.strip():
            page.start(style, {})
        page.data(text)
        if style and text.strip():
            page.end(style)

    def _break(self) -> None:
        """End a paragraph; an empty one keeps those around it apart."""
        if any(group.bracket for group in self._groups):
            self._put(" ")
            return
        empty = not self._text and not self._cell
        self._flush()
        self._sink("hr" if empty else "div")

    def _sink(self, name: str) -> None:
        page = self.pages[self._group.page]
        page.start(name, {})
        page.end(name)

    def _open_cell(self) -> None:
        """Begin a cell if the paragraph is in one, or end the table if it is not."""
        page = self.pages[self._group.page]
        if not (self._row or self._group.in_table):
            self._end_table(page)
            return
        for name, is_open in (("table", self._table), ("tr", self._in_row), ("td", self._cell)):
            if not is_open:
                page.start(name, {})
        self._table = self._in_row = self._cell = True

    def _end_table(self, page: VisibleText) -> None:
        for name, is_open in (("td", self._cell), ("tr", self._in_row), ("table", self._table)):
            if is_open:
                page.end(name)
        self._table = self._in_row = self._cell = False

    def _cells(self, word: str) -> None:
        self._flush()
        page = self.pages[self._group.page]
        if word == "cell":
            self._row = True
            self._open_cell()
            page.end("td")
            self._cell = False
            return
        if self._cell:
            page.end("td")
        if self._in_row:
            page.end("tr")
        self._cell = self._in_row = self._row = False


def _codec(name: str, other: str) -> str:
    try:
        return codecs.lookup(name).name
    except LookupError:
        return other
