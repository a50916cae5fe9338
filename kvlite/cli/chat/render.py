"""Markdown as it comes: blocks that are finished, and the one that still changes."""

from itertools import pairwise
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.segment import Segment
from rich.syntax import Syntax

from kvlite.printable import harmless

Line = list[Segment]

# Tags, and what looks like the definition of a link, are text: nothing a model wrote may vanish.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
_PARSER.disable("reference")


class Blocks:
    """A text that grows, cut where a block of Markdown has ended for good.

    Attributes:
        open: what may still change.
    """

    def __init__(self) -> None:
        self.open = ""

    def push(self, text: str) -> list[str]:
        """The blocks that are finished now: only whole lines tell what begins with them."""
        self.open += text
        if "\n" not in text:
            return []
        end = self.open.rfind("\n") + 1
        *finished, last = _blocks(self.open[:end]) or [""]
        self.open = last + self.open[end:] if finished else self.open
        return [block.rstrip() for block in finished]

    @property
    def parts(self) -> list[str]:
        """The blocks of what is open, as they look now."""
        return [block for block in _blocks(self.open) if block.strip()]


def _blocks(text: str) -> list[str]:
    """A text cut before each of its blocks but the first."""
    starts = [
        token.map[0]
        for token in _PARSER.parse(text)
        if token.level == 0 and token.map is not None and token.nesting >= 0
    ]
    lines = text.split("\n")
    ends = pairwise([0, *starts[1:], len(lines)])
    blocks = ["\n".join(lines[start:end]) for start, end in ends]
    return [f"{block}\n" for block in blocks[:-1]] + blocks[-1:]


class _LeftHeading(Heading):
    """A heading where text begins, without a box."""

    LEVEL_ALIGN = dict.fromkeys(Heading.LEVEL_ALIGN, "left")


class _PlainCode(CodeBlock):
    """Code without a background, indented, so that it can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(
            code,
            self.lexer_name,
            theme=self.theme,
            background_color="default",
            word_wrap=True,
            padding=(0, 2),
        )


class ChatMarkdown(Markdown):
    """Markdown as models write it: a line that ends, ends."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _LeftHeading,
        "fence": _PlainCode,
        "code_block": _PlainCode,
    }

    def __init__(self, text: str) -> None:
        super().__init__(text, code_theme="ansi_dark", hyperlinks=False)
        self.parsed = _PARSER.parse(text)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


def lines_of(console: Console, text: str, width: int) -> list[Line]:
    """A block of Markdown as lines of at most so many columns, with nothing invisible at their
    ends, and no empty ones around it."""
    options = console.options.update(width=width, height=None)
    drawn = console.render_lines(ChatMarkdown(harmless(text)), options, pad=False)
    lines = [_trimmed(line) for line in drawn]
    full = [number for number, line in enumerate(lines) if line]
    return lines[full[0] : full[-1] + 1] if full else []


def _trimmed(line: Line) -> Line:
    line = list(line)
    while line and not line[-1].text.rstrip():
        line.pop()
    if line:
        text, style, control = line[-1]
        line[-1] = Segment(text.rstrip(), style, control)
    return line
