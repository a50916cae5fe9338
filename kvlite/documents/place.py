"""Where in a document a passage is, for people: its page, the heading above it, or its lines."""

import re
from pathlib import PurePath

from kvlite.documents.document import Document

# In other texts a line that begins with # is a comment.
_MARKDOWN = (".md", ".markdown", ".mdx", ".qmd", ".rmd")
# A block of code, which has no headings, or a heading.
_BLOCK = re.compile(
    r"^ {0,3}(?P<fence>`{3,}|~{3,}).*?(?:^ {0,3}(?P=fence)|\Z)"
    r"|^ {0,3}#{1,6}[ \t]+(?P<title>[^\n]*)$",
    re.MULTILINE | re.DOTALL,
)
# Characters of a heading.
_LONGEST = 60


def place_of(document: Document, start: int, end: int) -> str:
    """Where the characters `start` to `end - 1` are, such as "page 12", "section “Results”" or
    "lines 120-124": the page where there are pages, else the nearest heading above in Markdown. Of
    an excerpt, where its part is in the whole."""
    if document.excerpt:
        parts = [where for begins, where in document.excerpt if begins <= start]
        return (parts or [document.excerpt[0][1]])[-1]
    if page := document.page_label(start):
        return f"page {page}"
    if title := _heading(document, start):
        return f"section \u201c{title}\u201d"
    first = 1 + document.text.count("\n", 0, start)
    last = first + document.text.count("\n", start, end)
    return f"line {first:,}" if first == last else f"lines {first:,}-{last:,}"


def _heading(document: Document, at: int) -> str:
    """The nearest heading above a character, or the one that it is in."""
    if PurePath(document.name).suffix.lower() not in _MARKDOWN:
        return ""
    title = ""
    for block in _BLOCK.finditer(document.text):
        if block.start() > at:
            break
        title = _plain(block["title"] or "") or title
    return title if len(title) <= _LONGEST else f"{title[: _LONGEST - 1].rstrip()}\u2026"


def _plain(title: str) -> str:
    """A heading without the # that may end it."""
    title = title.strip()
    open_end = title.rstrip("#")
    return open_end.rstrip() if not open_end or open_end[-1].isspace() else title
