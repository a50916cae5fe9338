"""Where an answer came from: the passages of documents that its tokens looked at.

Heads that retrieve what was read are found in the middle layers ("Retrieval Head Mechanistically
Explains Long-Context Factuality", section 3). There the tokens of question and answer are compared
with those before the question, which are the same whatever is asked: attention that those pay, too,
to the last pages for instance, says nothing about this answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvlite.cache.query_log import QueryLog
from kvlite.config.settings import Settings
from kvlite.conversation.context import Context
from kvlite.conversation.metrics import Piece
from kvlite.conversation.passages import Passage, message_passages
from kvlite.documents import Document
from kvlite.engine.passage_attention import passage_attention
from kvlite.memory.free import is_oom
from kvlite.model.answers.thinking import thinking_variables
from kvlite.model.shape import ModelShape

# Which layers are watched, from first (0) to last (1), of those that see everything.
WATCHED = (0.5, 0.6, 0.7, 0.8)
# Attention less than this is noise.
FLOOR = 1e-4
BEST = 3

Said = tuple[str, int]
"""A message, and how many tokens were read up to its end."""


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
        """The page as it is called, or how far into the document."""
        page = self.document.page_label(self.start)
        return f"page {page}" if page else f"{100 * self.start // len(self.document.text)}% in"

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


def watched(shape: ModelShape) -> dict[int, QueryLog]:
    """Empty logs for the layers whose queries tell."""
    full = shape.full_layers
    return {full[int(part * len(full))]: QueryLog() for part in WATCHED if full}


def with_sources(
    piece: Piece,
    context: Context,
    said: Sequence[Said],
    documents: Sequence[Document],
    settings: Settings,
) -> Piece:
    """The last piece of an answer with the passages that it came from; others as they are.

    There are none where nobody watched, or where it can't be known where documents are: in a cache
    that was compacted, or by a tokenizer that does not say where its tokens come from.

    Args:
        said: the messages so far, the first one of the conversation included.
        documents: that messages may have.
        settings: with the system message, and what the template is told.
    """
    if piece.metrics.finish_reason in (None, "memory") or not (documents and context.cache.queries):
        return piece
    try:
        return replace(piece, sources=_sources(context, said, documents, settings))
    except Exception as error:
        if not is_oom(error):
            raise
        note = "there was no memory left to find the passages that the answer came from"
        metrics = piece.metrics
        return replace(piece, metrics=replace(metrics, notes=(*metrics.notes, note)))


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
            return ()
        begun = end - len(made.tokens)
        if begun < 0 or context.token_ids[begun:end] != made.tokens:
            return ()
        passages += [(begun, each) for each in made.passages]
        question = begun + made.question
    if not passages:
        return ()
    seen, count = context.cache.seen, len(passages)
    owner = torch.full((seen,), count)
    for index, (start, passage) in enumerate(passages):
        owner[start + passage.first : start + passage.last] = index
        begun = max(begun, start + passage.last)
    scores = torch.zeros(count)
    for index, log in context.cache.queries.items():
        layer, own = context.cache.layers[index], owner.to(log.queries.device)
        asked, usual = (
            passage_attention(layer, log, tokens, own, count)
            for tokens in (range(question, seen), range(begun, question))
        )
        scores += _standing_out(asked, usual).cpu()
    best = [index for index in scores.argsort(descending=True).tolist() if scores[index] > 0]
    chosen = [passages[index][1] for index in best[:BEST]]
    return tuple(Source(each.document, each.start, each.end) for each in chosen)


def _standing_out(asked: Tensor, usual: Tensor) -> Tensor:
    """How much more attention passages got than usual, summed over heads: `(passages,)`."""
    return (asked * (asked / (usual + FLOOR)).clamp(min=1).log()).sum(0)
