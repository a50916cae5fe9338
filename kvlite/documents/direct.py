"""Formats that pandoc reads as they are: FictionBook (.fb2), Jupyter notebooks (.ipynb)."""

import re
from xml.parsers import expat

from kvlite.documents.pandoc import pandoc_text, with_lost
from kvlite.documents.plain_text import declared_in, decoded
from kvlite.documents.tracker import Tracker

# What of a book is no text.
_BESIDE = frozenset(("description", "binary"))


def fb2_text(data: bytes, tracker: Tracker) -> str:
    """The text of a book; what pandoc leaves out, such as tables, comes last. Errors as of
    `decoded` and `pandoc_text`."""
    markup = re.sub(r"^\s*<\?xml[^>]*\?>", "", decoded(data, tracker, declared_in(data)))
    pieces, beside = list[str](), 0

    def begin(name: str, _: dict[str, str]) -> None:
        nonlocal beside
        beside += name in _BESIDE

    def end(name: str) -> None:
        nonlocal beside
        beside -= name in _BESIDE

    def characters(text: str) -> None:
        if not beside:
            pieces.append(text)

    # Refuses what is damaged, and entities that name a file or fill memory.
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = begin, end
    parser.CharacterDataHandler = characters
    parser.Parse(markup.encode(), True)
    markup = re.sub(r"<binary\b[^>]*>[^<]*</binary>", "", markup)
    return with_lost(pandoc_text(markup.encode(), "fb2", tracker), pieces)


def notebook_text(data: bytes, tracker: Tracker) -> str:
    """The cells of a notebook and what came out of them; errors as of `pandoc_text`."""
    return pandoc_text(data, "ipynb", tracker)
