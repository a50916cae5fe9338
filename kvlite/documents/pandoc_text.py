"""Pandoc's tree of a document as text: a line for each row of a table, list levels indented, notes
in brackets at their place."""

import html
import re
from collections.abc import Sequence
from typing import Any

from kvlite.documents.tracker import Tracker

# Marks that readers put into what pandoc is given: around an item's own number, for a paragraph
# that is only a line, a tab, a level of a list, a space to keep, between pages.
LABEL, LABELLED, LINE, TAB, LEVEL, SPACE, PAGE = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4\ufdd5\ufdd6"
MARKS = f"[{LABEL}-{PAGE}]"
_LABELLED = re.compile(f"{LABEL}(.*?){LABELLED} *")
_INDENT = "  "
_KEPT = str.maketrans({TAB: "\t", LEVEL: _INDENT, SPACE: " "})
# Ligatures as letters, and no soft hyphens.
PLAIN = dict(enumerate(("ff", "fi", "fl", "ffi", "ffl", "st", "st"), 0xFB00)) | {0xAD: ""}
_LISTS = frozenset(("BulletList", "OrderedList", "DefinitionList"))
_ROMANS = ((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"),
           (40, "xl"), (10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i"))  # fmt: skip
# Cells are repeated up to this length, as labels are, and over so many columns.
_LABEL, _MOST_COLUMNS = 200, 100
_MARKED = {"Superscript": "^", "Subscript": "_"}
_MOST_LETTERS = 20
_AROUND = {"Period": "{}.", "OneParen": "{})", "TwoParens": "({})"}
_QUOTES = {"SingleQuote": "\u2018{}\u2019", "DoubleQuote": "\u201c{}\u201d"}

Node = dict[str, Any]


class PandocText:
    """Writes blocks as text.

    Attributes:
        tracker: counts characters, and pictures.
    """

    def __init__(self, tracker: Tracker, gap: str) -> None:
        """Of a document.

        Args:
            gap: what stands between two paragraphs.
        """
        self.tracker = tracker
        self._gap = gap

    def of(self, blocks: Sequence[Node]) -> str:
        """The text of blocks, lists and tables close to the line before them."""
        parts, last = list[str](), ""
        for block in blocks:
            written = self._block(block)
            if not written.strip("\n") and block["t"] not in ("Para", "Plain"):
                continue
            tight = block["t"] in _LISTS or block["t"] == "Table" or written.startswith(LINE)
            between = "\n" if tight and last != "Table" else self._gap
            parts += [between if last else "", written.removeprefix(LINE)]
            last = block["t"]
        return "".join(parts)

    def _block(self, block: Node) -> str:
        content: Any = block.get("c")
        match block["t"]:
            case "Para" | "Plain":
                return self._paragraph(content)
            case "Header":
                return self._paragraph(content[2])
            case "CodeBlock":
                self.tracker.add_characters(len(content[1]))
                return str(content[1])
            case "RawBlock":
                self.tracker.add_characters(len(content[1]))
                return _raw(*content).strip("\n")
            case "LineBlock":
                return "\n".join(map(self._paragraph, content))
            case "BlockQuote":
                return self.of(content)
            case "Div":
                return self.of(content[1])
            case "Figure":
                return self.of([*content[2], *content[1][1]])
            case "BulletList":
                return self._items([("-", item) for item in content])
            case "OrderedList":
                (start, style, around), items = content
                form = _AROUND.get(around["t"], "{}.")
                numbers = (form.format(_number(start + at, style["t"])) for at in range(len(items)))
                return self._items(list(zip(numbers, items, strict=True)))
            case "DefinitionList":
                return "\n".join(self._defined(*each) for each in content)
            case "Table":
                return self._table(content)
        return ""

    def _paragraph(self, inlines: Sequence[Node]) -> str:
        text = self._inlines(inlines)
        self.tracker.add_characters(len(text) + 1)
        lines = "\n".join(line.strip(" ") for line in text.split("\n"))
        return _LABELLED.sub(r"\1", lines).translate(_KEPT)

    def _items(self, items: Sequence[tuple[str, Sequence[Node]]]) -> str:
        lines = list[str]()
        for label, blocks in items:
            own = _own_label(blocks)
            text = PandocText(self.tracker, "\n").of(blocks)
            mark = "" if own else f"{label} "
            if text.strip():
                lines.append(mark + text.replace("\n", f"\n{_INDENT}"))
        return "\n".join(lines)

    def _defined(self, term: Sequence[Node], meanings: Sequence[Sequence[Node]]) -> str:
        return "\n".join([self._paragraph(term), *(self.of(each) for each in meanings)])

    def _table(self, content: Sequence[Any]) -> str:
        _, caption, _, head, bodies, foot = content
        groups = [head[1], *(rows for body in bodies for rows in body[2:4]), foot[1]]
        lines = [self.of(caption[1])]
        for rows in groups:
            above = dict[int, tuple[int, str]]()
            lines += [self._row(row[1], above) for row in rows]
        return "\n".join(line for line in lines if line.strip(" |"))

    def _row(self, cells: Sequence[Any], above: dict[int, tuple[int, str]]) -> str:
        """A row in a line; cells that reach into it or over several columns are repeated,
        and of the empty ones at its end one is left.

        Args:
            above: how many rows more a cell reaches down, and its text, by column.
        """
        texts = list[str]()

        def reach() -> None:
            while len(texts) in above:
                left, text = above.pop(len(texts))
                if left > 1:
                    above[len(texts)] = left - 1, text
                texts.append(text)

        for _, _, down, across, blocks in cells:
            reach()
            text = " ".join(self.of(blocks).split())
            again = text if len(text) <= _LABEL else ""
            for column in range(min(across, _MOST_COLUMNS)):
                if down > 1:
                    above[len(texts)] = down - 1, again
                texts.append(again if column else text)
        reach()
        filled = max((at for at, text in enumerate(texts, 1) if text), default=0)
        return " | ".join(texts[: filled + 1]).strip(" ")

    def _inlines(self, inlines: Sequence[Node]) -> str:
        texts = [self._inline(each) for each in inlines]
        for at in range(len(texts) - 1):
            mark = _MARKED.get(inlines[at]["t"])
            if mark and re.fullmatch(r"[\^_]\w*(\d\d|[^\W\d]{2})", texts[at] + texts[at + 1][:1]):
                texts[at] = f"{mark}({texts[at][1:]})"
        return "".join(texts)

    def _inline(self, inline: Node) -> str:
        content: Any = inline.get("c")
        match inline["t"]:
            case "Str":
                return str(content).translate(PLAIN)
            case "Space" | "SoftBreak":
                return " "
            case "LineBreak":
                return "\n"
            case "Emph" | "Strong" | "Underline" | "SmallCaps":
                return self._inlines(content)
            case "Strikeout":
                return _around("~~", self._inlines(content))
            case "Superscript":
                text = self._inlines(content)
                kinds = {each["t"] for each in content}
                if kinds == {"Note"} or not text.strip():
                    return text
                return f"[{text}]" if kinds == {"Link"} else _raised("^", text)
            case "Subscript":
                return _raised("_", self._inlines(content))
            case "Quoted":
                return _QUOTES[content[0]["t"]].format(self._inlines(content[1]))
            case "Cite" | "Link":
                return self._inlines(content[1])
            case "Code":
                return str(content[1])
            case "RawInline":
                return _raw(*content)
            case "Math":
                return _formula(content[1])
            case "Image":
                return self._picture(content)
            case "Note":
                text = " ".join(self.of(content).split())
                return f" [Note: {text}]" if text else ""
            case "Span":
                return self._span(*content)
        return ""

    def _span(self, about: Sequence[Any], inlines: Sequence[Node]) -> str:
        classes, values = about[1], dict(about[2])
        if "deletion" in classes:
            return ""
        text = self._inlines(inlines)
        if "comment-start" in classes:
            by = f" by {values['author']}" if values.get("author") else ""
            return f" [Comment{by}: {' '.join(text.split())}] "
        return text

    def _picture(self, content: Sequence[Any]) -> str:
        self.tracker.not_read["picture"] += 1
        described = " ".join(self._inlines(content[1]).split())
        return f"[Picture: {described}]" if described else ""


def _around(mark: str, text: str) -> str:
    return f"{mark}{text}{mark}" if text.strip() else text


def _raised(mark: str, text: str) -> str:
    """Raised or lowered text, in brackets if it is more than a word or a number."""
    if not text.strip():
        return text
    plain = re.fullmatch(r"[+\-\u2212]?\w+|\W", text)
    return mark + text if plain else f"{mark}({text})"


def _formula(tex: str) -> str:
    """TeX, without the brackets that it needs no more when people read it."""
    tex = re.sub(r"\\phantom\{[^{}]*\}", "", " ".join(tex.split()))
    tex = re.sub(r"([\^_])\{(\w+)\}(?!\w)", r"\1\2", tex)
    return re.sub(r"(?<![\w}])\\frac\{(\w+)\}\{(\w+)\}(?![\w({\\^])", r"\1/\2", tex)


def _raw(form: str, text: str) -> str:
    """What stands in a format of its own, of HTML without its tags."""
    if form != "html":
        return text
    for tag, written in (("sup", "^"), ("sub", "_"), ("br", "\n")):
        text = re.sub(rf"(?i)<{tag}\b[^<>]*>", written, text)
    return html.unescape(re.sub(r"</?[a-zA-Z!][^<>]*>", "", text))


def _own_label(blocks: Sequence[Node]) -> bool:
    """Whether an item begins with the number that its reader gave it."""
    first = blocks[0] if blocks else {}
    content = first.get("c") or [{}]
    return first.get("t") in ("Para", "Plain") and str(content[0].get("c")).startswith(LABEL)


def _number(number: int, style: str) -> str:
    if style.endswith("Alpha") and number > 0:
        repeats, letter = divmod(number - 1, 26)
        written = chr(ord("a") + letter) * min(repeats + 1, _MOST_LETTERS)
    elif style.endswith("Roman") and 0 < number < 4000:
        written = ""
        for value, sign in _ROMANS:
            written += sign * (number // value)
            number %= value
    else:
        return str(number)
    return written.upper() if style.startswith("Upper") else written
