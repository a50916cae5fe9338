"""Where an answer came from: the passages, of some sentences, that its tokens looked at.

Heads that retrieve what was read are found in the middle layers ("Retrieval Head Mechanistically
Explains Long-Context Factuality", section 3). There the tokens of question and answer are compared
with those before the question, which are the same whatever is asked: attention that those pay, too,
to the last pages for instance, says nothing about this answer.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlite.config.settings import Settings
from kvlite.conversation.context import Context
from kvlite.conversation.metrics import Piece
from kvlite.documents import Document, whole_characters
from kvlite.documents.place import place_of
from kvlite.engine.passage_attention import passage_attention
from kvlite.memory.free import is_oom
from kvlite.model.answers.thinking import thinking_variables
from kvlite.model.chat_template import Part, asked_of, body_of, name_of, said_parts

# Attention less than this is noise.
FLOOR = 1e-4
# At most so many passages are named: those that stand out by at least so much, and by at least such
# a part of what the best one does. "Sources" in docs/benchmarks.md has how they were chosen.
BEST, LEAST_OUT, PART = 3, 0.1, 0.5

Said = tuple[str, int]
"""A message, and how many tokens were read up to its end."""

# Sentences are joined to passages of at least, and cut to at most, so many characters.
LEAST, MOST = 60, 400
# Chinese and Japanese sentences have no space after their full stop.
_FULL_WIDTH = "\u3002\uff01\uff1f"
_ENDS = re.compile(rf"[.;:?!][\"')\]\u201d\u2019]*\s+|\n\s*\n|[{_FULL_WIDTH}]")

Begins = NDArray[np.int64]


@dataclass(frozen=True)
class Source:
    """A passage that an answer came from: a document's characters `start` to `end - 1`."""

    document: Document
    start: int
    end: int

    @property
    def page(self) -> int | None:
        """Its page, from 1; None in formats without pages."""
        return self.document.page_of(self.start)

    @property
    def where(self) -> str:
        """The page as it is called, else the heading above it, else its lines."""
        return place_of(self.document, self.start, self.end)

    @property
    def text(self) -> str:
        """The passage, with single spaces."""
        return " ".join(self.document.text[self.start : self.end].split())

    def line(self, most: int | None = None) -> str:
        """Where it is, and at most so many characters of its text."""
        text = self.text
        if most is not None and len(text) > most:
            text = f"{text[: most - 1].rstrip()}\u2026"
        return f"{self.document.name}, {self.where}: \u201c{text}\u201d"

    def to_json(self) -> dict[str, Any]:
        """What it is, as JSON can hold it."""
        found = {name: getattr(self, name) for name in ("page", "where", "start", "end", "text")}
        return {"document": self.document.name, **found}


def with_sources(
    piece: Piece,
    context: Context,
    said: Sequence[Said],
    documents: Sequence[Document],
    settings: Settings,
) -> Piece:
    """The last piece of an answer with the passages that it came from; others as they are.

    There are none where nobody watched. Where they cannot be told, a note says why: in a cache that
    was compacted, or by a tokenizer that does not say where its tokens come from.

    Args:
        said: the messages so far, the first one of the conversation included.
        documents: that messages may have.
        settings: with the system message, and what the template is told.
    """
    if piece.finish_reason in (None, "memory") or not (documents and context.cache.queries):
        return piece
    try:
        return replace(piece, sources=_sources(context, said, documents, settings))
    except _Unknown as error:
        note = f"the passages that the answer came from cannot be told: {error}"
    except Exception as error:
        if not is_oom(error):
            raise
        note = "there was no memory left to find the passages that the answer came from"
    notes = *piece.figures.counted["notes"], note
    return replace(piece, figures=piece.figures.changed(notes=notes))


class _Unknown(Exception):
    """It cannot be known where in the cache documents are."""


def _sources(
    context: Context, said: Sequence[Said], documents: Sequence[Document], settings: Settings
) -> tuple[Source, ...]:
    passages, question, begun = list[tuple[int, Passage]](), 0, 0
    tokenizer = context.model.tokenizer
    for number, (text, end) in enumerate(said):
        first = number == 0
        made = message_passages(
            tokenizer,
            text,
            documents,
            opening=first,
            first=first,
            system=settings.system,
            variables=thinking_variables(settings.thinking),
        )
        if made is None:
            raise _Unknown("the model's tokenizer or chat template does not show where they are")
        begun = end - len(made.tokens)
        if begun < 0 or context.token_ids[begun:end] != made.tokens:
            raise _Unknown("what was read is not in the cache as it was said")
        passages += [(begun, each) for each in made.passages]
        question = begun + made.question
    if not passages:
        return ()
    seen, count = context.cache.seen, len(passages)
    owner = torch.full((seen,), count)
    for index, (start, passage) in enumerate(passages):
        owner[start + passage.first : start + passage.last] = index
        begun = max(begun, start + passage.last)
    scores, heads = torch.zeros(count), 0
    for index, log in context.cache.queries.items():
        layer, own = context.cache.layers[index], owner.to(log.queries.device)
        asked, usual = (
            passage_attention(layer, log, tokens, own, count)
            for tokens in (range(question, seen), range(begun, question))
        )
        scores += _standing_out(asked, usual).cpu()
        heads += len(asked)
    scores /= max(1, heads)
    least = max(LEAST_OUT, PART * float(scores.max()))
    best = [index for index in scores.argsort(descending=True).tolist() if scores[index] >= least]
    chosen = [passages[index][1] for index in best[:BEST]]
    return tuple(Source(each.document, each.start, each.end) for each in chosen)


def _standing_out(asked: Tensor, usual: Tensor) -> Tensor:
    """How much more attention passages got than usual, summed over heads: `(passages,)`."""
    return (asked * (asked / (usual + FLOOR)).clamp(min=1).log()).sum(0)


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
    tokenizer: Any, text: str, documents: Sequence[Document], **said: Any
) -> MessagePassages | None:
    """Where in a message `text` documents are, which is encoded once more; other arguments are
    those of `said_tokens`. None where the tokenizer does not say where its tokens come from (slow
    ones), or the chat template changes the message."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    parts, message = said_parts(tokenizer, text, **said), whole_characters(text).strip()
    encoded = [_encoded(tokenizer, each) for each in parts]
    before = sum(len(begins) for begins in encoded)
    for part, begins in zip(reversed(parts), reversed(encoded), strict=True):
        before -= len(begins)
        if (at := part.text.rfind(message)) >= 0:
            found = _Found(message, begins - at, before)
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
