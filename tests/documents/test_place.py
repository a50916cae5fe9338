"""Where a passage is said to be: its page, the heading above it, or its lines."""

import pytest

from kvlite.conversation.sources import Source
from kvlite.documents import Document

MARKDOWN = """\
Before it.

# A book #

One.

```sh
# a comment
Two.
```

## C#

Three,
and four.
"""


@pytest.mark.parametrize(
    ("name", "passage", "where"),
    [
        ("a.md", "Before it.", "line 1"),
        ("a.md", "One.", "section \u201cA book\u201d"),
        ("a.md", "Two.", "section \u201cA book\u201d"),
        ("a.MD", "## C#", "section \u201cC#\u201d"),
        ("a.md", "Three,\nand", "section \u201cC#\u201d"),
        ("a.py", "One.", "line 5"),
        ("a.py", "Three,\nand four.", "lines 14-15"),
    ],
)
def test_a_place_is_a_heading_or_else_lines(name: str, passage: str, where: str) -> None:
    start = MARKDOWN.index(passage)
    assert Source(Document(name, MARKDOWN, ()), start, start + len(passage)).where == where


def test_a_page_comes_before_a_heading() -> None:
    document = Document("a.md", "# One\n\nA.\n\nB.", (0, 11), page_labels=("i", "ii"))
    assert Source(document, 11, 13).where == "page ii"


def test_a_long_heading_is_cut_and_long_lines_take_no_time() -> None:
    text = f"# {'long ' * 30}\n\nOne.\n\n# {' ' * 100_000}#\n\n{'`' * 100_000}\nThe end."
    where = Source(Document("a.md", text, ()), len(text) - 4, len(text)).where
    assert where.startswith("section \u201clong") and len(where) <= 70
