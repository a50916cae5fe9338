"""Which tokens of a message are which page of a document, and how much of them is held."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlite.documents import Document, whole_characters
from kvlite.model.chat_template import BETWEEN, Part, body_of, name_of, question_about, said_parts

from .kept import TokenShares

# A document without pages is divided into at most so many parts, of at least so many tokens.
PARTS, LEAST = 40, 32

Begins = NDArray[np.int64]


@dataclass(frozen=True)
class Page:
    """A page of a document, or one of the equal parts of a document that has none.

    Attributes:
        place: which of the message's documents it belongs to, from 0.
        document: its name.
        label: "page 3" or "part 3", counted from 1.
        start, end: its tokens are the message's `start` to `end - 1`. A token belongs to the page
            on which it begins.
    """

    place: int
    document: str
    label: str
    start: int
    end: int


@dataclass(frozen=True)
class Pages:
    """The pages of all documents of a message, and how many tokens the whole message has."""

    pages: tuple[Page, ...]
    tokens: int


@dataclass(frozen=True)
class PageShare:
    """How much of a page is held, and what came back of that during the answer: means over its
    tokens, from 0 to 1; see `TokenShares`."""

    place: int
    document: str
    label: str
    tokens: int
    held: float
    back: float


def pages_of(
    tokenizer: Any,
    documents: Sequence[Document],
    question: str,
    *,
    opening: bool,
    first: bool,
    system: str = "",
) -> Pages | None:
    """The pages of the message `question_about(documents, question)`, which is encoded once more;
    other arguments are those of `said_tokens`. None where the tokenizer does not say where its
    tokens come from (slow ones), or the chat template changes the message."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    told = question_about(documents, question)
    parts = said_parts(tokenizer, told, opening=opening, first=first, system=system)
    message, encoded = whole_characters(told).strip(), [_encoded(tokenizer, each) for each in parts]
    tokens = before = sum(len(begins) for begins in encoded)
    for part, begins in zip(reversed(parts), reversed(encoded), strict=True):
        before -= len(begins)
        at = part.text.rfind(message)
        if at >= 0:
            return Pages(tuple(_pages(documents, begins - at, before)), tokens)
    return None


def page_shares(pages: Pages, shares: TokenShares, start: int) -> list[PageShare]:
    """How much of each page is held, 0 of a page without tokens, if the message's first token is at
    position `start`. Raises ValueError if there are too few tokens from there on."""
    if not 0 <= start <= len(shares.held) - pages.tokens:
        raise ValueError(f"no message of {pages.tokens:,} tokens was read at position {start:,}")
    sums = [np.cumsum(np.r_[0.0, each[start:]]) for each in (shares.held, shares.back)]
    made = []
    for page in pages.pages:
        count = page.end - page.start
        held, back = (float(each[page.end] - each[page.start]) / max(1, count) for each in sums)
        made.append(PageShare(page.place, page.document, page.label, count, held, back))
    return made


def _encoded(tokenizer: Any, part: Part) -> Begins:
    """Where in a part's text each token begins, ascending: a token that comes from nowhere begins
    with the one before it."""
    if part.begins is None:
        encoded = tokenizer(part.text, **part.options, return_offsets_mapping=True)
        begins = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)[:, 0]
    else:
        begins = np.array(part.begins, np.int64)
    return np.maximum.accumulate(begins)


def _pages(documents: Sequence[Document], begins: Begins, before: int) -> Iterator[Page]:
    """The pages of documents in a message whose tokens begin at `begins`, after `before` others."""
    at = 0
    for place, document in enumerate(documents):
        at += _width(name_of(document))
        body, text = body_of(document), document.text
        gone = len(text) - len(text.lstrip())
        starts = [min(max(start - gone, 0), len(body)) for start in document.page_starts[1:]]
        pieces = (body[begin:end] for begin, end in pairwise([0, *starts, len(body)]))
        edges = [*accumulate(map(_width, pieces), initial=at)]
        tokens = [before + int(each) for each in np.searchsorted(begins, edges)]
        kind = "page" if document.page_starts else "part"
        if not document.page_starts:
            tokens = _equal(*tokens)
        for number, (start, end) in enumerate(pairwise(tokens), 1):
            yield Page(place, document.name, f"{kind} {number}", start, end)
        at = edges[-1] + len(BETWEEN)


def _width(text: str) -> int:
    """How many characters the tokenizer gets for a text."""
    return len(whole_characters(text))


def _equal(start: int, end: int) -> list[int]:
    """Edges of parts whose sizes differ by at most one."""
    count = max(1, min(PARTS, (end - start) // LEAST))
    return [start + number * (end - start) // count for number in range(count + 1)]
