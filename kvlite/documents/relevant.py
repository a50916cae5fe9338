"""The parts of long documents that a text search finds for a question (BM25, Robertson and
Zaragoza, "The Probabilistic Relevance Framework", 2009), where all of them is more than a model
takes."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvlite.documents.document import Document
from kvlite.documents.place import place_of

# Characters of a passage, some two hundred words: fewer where there is room for fewer tokens.
_LENGTH, _SHORTEST = 1_200, 100
# BM25's usual constants: how soon a word that is repeated counts no more, and how much length does.
_K1, _B = 1.2, 0.75
# Tokens that a line takes which says what was left out.
_GAP = 30
# Chinese and Japanese have no spaces between words; of others the beginning counts, not the ending.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
_STEM = 6
_PARAGRAPH = re.compile(r"\n[^\S\n]*\n")


@dataclass(frozen=True)
class Passage:
    """Characters `start` to `end - 1` of document `index`."""

    index: int
    start: int
    end: int


def relevant(
    documents: Sequence[Document], question: str, room: int, tokens: Callable[[str], int]
) -> list[Document]:
    """Of each document the passages that fit the question best, in the order of the text, with
    lines between that say what was left out. A passage still knows its place in the whole.

    Args:
        room: tokens that they may take together.
        tokens: how many a text has.
    """
    length = max(_SHORTEST, min(_LENGTH, room))
    passages = [
        Passage(index, *span)
        for index, document in enumerate(documents)
        for span in _spans(document.text, length)
    ]
    texts = [documents[each.index].text[each.start : each.end] for each in passages]
    scores, kept = _bm25(texts, question), set[int]()
    for at in sorted(range(len(texts)), key=lambda each: -scores[each]):
        room -= tokens(texts[at]) + _GAP
        if room < 0 or (kept and not scores[at]):
            break
        kept.add(at)
    made = []
    for index, document in enumerate(documents):
        own = [at for at, each in enumerate(passages) if each.index == index]
        made.append(_excerpt(document, [passages[at] for at in own], [at in kept for at in own]))
    return made


def _spans(text: str, length: int) -> Iterator[tuple[int, int]]:
    """Where passages of at most such a length begin and end: with paragraphs, else with lines,
    sentences or words."""
    start = 0
    while start < len(text):
        end = start + length
        if end < len(text):
            ends = (text.rfind(gap, end - length // 2, end) for gap in ("\n\n", "\n", ". ", " "))
            end = next((at + 1 for at in ends if at > 0), end)
        if text[start:end].strip():
            yield start, min(end, len(text))
        start = end


def _bm25(texts: Sequence[str], question: str) -> list[float]:
    asked, counts = {*_words(question)}, [Counter(_words(each)) for each in texts]
    lengths = [each.total() for each in counts]
    mean = sum(lengths) / max(1, len(lengths)) or 1
    rarity = dict[str, float]()
    for word in asked:
        having = sum(word in each for each in counts)
        rarity[word] = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))

    def score(count: Counter[str], length: int) -> float:
        least = _K1 * (1 - _B + _B * length / mean)
        return sum(
            weight * count[word] * (_K1 + 1) / (count[word] + least)
            for word, weight in rarity.items()
        )

    return [score(*each) for each in zip(counts, lengths, strict=True)]


def _words(text: str) -> Iterator[str]:
    return (each[0][:_STEM] for each in _WORD.finditer(text.casefold()))


def _excerpt(document: Document, passages: Sequence[Passage], kept: Sequence[bool]) -> Document:
    if all(kept):
        return document
    text, places, left_out = "", list[tuple[int, str]](), 0
    for each, stays in zip(passages, kept, strict=True):
        if not stays:
            left_out += 1
            continue
        if left_out:
            text += _gap(left_out)
            left_out = 0
        shift = len(text) - each.start
        places += [
            (start + shift, place_of(document, start, end)) for start, end in _parts(document, each)
        ]
        text += document.text[each.start : each.end]
    text += _gap(left_out) if left_out else ""
    told = (
        f"read {sum(kept):,} of {len(kept):,} passages, those that a text search found for this "
        "question"
    )
    assumed, excerpt = (*document.assumed, told), tuple(places)
    return replace(
        document, text=text, page_starts=(), page_labels=(), assumed=assumed, excerpt=excerpt
    )


def _parts(document: Document, passage: Passage) -> Iterator[tuple[int, int]]:
    """Paragraphs of a passage that has text, which end with their page."""
    start, end = passage.start, passage.end
    ends = {each.end() for each in _PARAGRAPH.finditer(document.text, start, end)}
    ends |= {each for each in document.page_starts if start < each < end}
    for one, other in pairwise(sorted({start, end} | ends)):
        text = document.text[one:other]
        if text.strip():
            yield one + len(text) - len(text.lstrip()), one + len(text.rstrip())


def _gap(count: int) -> str:
    return f"\n\n[{count:,} passage{'s' * (count > 1)} left out here]\n\n"
