"""Documents in messages as passages: a sentence or a few, and which tokens they are."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlite.documents import Document, whole_characters
from kvlite.model.chat_template import Part, asked_of, body_of, name_of, said_parts

# Sentences are joined to passages of at least, and cut to at most, so many characters.
LEAST, MOST = 60, 400
# Chinese and Japanese sentences have no space after their full stop.
_FULL_WIDTH = "\u3002\uff01\uff1f"
_ENDS = re.compile(rf"[.;:?!][\"')\]\u201d\u2019]*\s+|\n\s*\n|[{_FULL_WIDTH}]")

Begins = NDArray[np.int64]


@dataclass(frozen=True)
class Passage:
    """A passage of a document: its characters `start` to `end - 1`, and the message's tokens
    `first` to `last - 1`. A token belongs to the passage in which, or before which, it begins."""

    document: Document
    start: int
    end: int
    first: int
    last: int


@dataclass(frozen=True)
class MessagePassages:
    """The passages of the documents in a message.

    Attributes:
        tokens: of the whole message, in the chat template.
        question: the token at which begins what the user typed.
    """

    passages: tuple[Passage, ...]
    tokens: list[int]
    question: int


def message_passages(
    tokenizer: Any,
    text: str,
    documents: Sequence[Document],
    *,
    opening: bool,
    first: bool,
    system: str = "",
    variables: Mapping[str, Any] | None = None,
) -> MessagePassages | None:
    """Where in a message `text` documents are, which is encoded once more; other arguments are
    those of `said_tokens`. None where the tokenizer does not say where its tokens come from (slow
    ones), or the chat template changes the message."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    parts = said_parts(
        tokenizer, text, opening=opening, first=first, system=system, variables=variables
    )
    said, encoded = whole_characters(text).strip(), [_encoded(tokenizer, each) for each in parts]
    before = sum(len(begins) for begins in encoded)
    for part, begins in zip(reversed(parts), reversed(encoded), strict=True):
        before -= len(begins)
        if (at := part.text.rfind(said)) >= 0:
            found = _Found(said, begins - at, before)
            passages = tuple(each for document in documents for each in found.passages(document))
            ids = [token for each in parts for token in each.ids]
            return MessagePassages(passages, ids, found.question(documents))
    return None


@dataclass(frozen=True)
class _Found:
    """A message, where in it each token of a part begins, and how many tokens come before."""

    said: str
    begins: Begins
    before: int

    def token(self, at: int) -> int:
        """The first token that begins at a character or after it."""
        return self.before + int(np.searchsorted(self.begins, at))

    def passages(self, document: Document) -> Iterator[Passage]:
        name, body = (whole_characters(each) for each in (name_of(document), body_of(document)))
        at = self.said.find(name + body)
        if at < 0:
            return
        at += len(name)
        gone = len(document.text) - len(document.text.lstrip())
        before = 0
        for start, end in spans(body):
            first, last = self.token(at + before), self.token(at + end)
            yield Passage(document, gone + start, gone + end, first, last)
            before = end

    def question(self, documents: Sequence[Document]) -> int:
        """The token at which begins what was typed, the space before it included."""
        for asked in (asked_of(documents[:1], ""), asked_of((), "")):
            before, found, _ = self.said.rpartition(asked.rstrip())
            if found:
                return self.token(len(before) + len(found))
        return self.token(1) - 1


def spans(text: str) -> Iterator[tuple[int, int]]:
    """Where the passages of a text begin and end, white space at their ends left out."""
    ends = {match.end(): match[0] for match in _ENDS.finditer(text)}
    begun = 0
    for start, end in pairwise([0, *ends, len(text)]):
        while end - start > MOST:  # a table, or code
            breaks = (text.rfind(gap, start + LEAST, start + MOST) for gap in "\n ")
            stop = next((at for at in breaks if at > 0), start + MOST)
            yield from _stripped(text, begun, stop)
            begun = start = stop
        ended = ends.get(end, "").strip() and "\n\n" in ends[end]  # a paragraph, no heading
        if end - begun >= LEAST or ended or end == len(text):
            yield from _stripped(text, begun, end)
            begun = end


def _stripped(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    piece = text[start:end]
    if piece.strip():
        yield start + len(piece) - len(piece.lstrip()), start + len(piece.rstrip())


def _encoded(tokenizer: Any, part: Part) -> Begins:
    # A token that comes from nowhere begins with the one before it.
    if part.begins is None:
        encoded = tokenizer(part.text, **part.options, return_offsets_mapping=True)
        begins = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)[:, 0]
    else:
        begins = np.array(part.begins, np.int64)
    return np.maximum.accumulate(begins)
