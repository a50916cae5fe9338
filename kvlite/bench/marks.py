"""Scores of an answer, strict and lenient."""

import re
from collections import Counter
from collections.abc import Sequence


def found(keys: Sequence[str], answer: str) -> float:
    """Share of the wanted keys that are in the answer literally, ignoring case."""
    said = answer.lower()
    return sum(key.lower() in said for key in keys) / len(keys)


def leading(keys: Sequence[str], answer: str) -> float:
    """Mean over the keys: of a number, the share of leading digits that are right, in the number of
    the answer that agrees longest; of other keys, the share of words that are in the answer."""
    return sum(
        _number(key, answer) if key.isdigit() else _words(key, answer) for key in keys
    ) / len(keys)


def rouge_1(reference: str, answer: str) -> float:
    """ROUGE-1 F: the harmonic mean of unigram precision and recall, ignoring case and punctuation,
    without stemming.

    Source: "ROUGE: A Package for Automatic Evaluation of Summaries", section 2.
    """
    wanted, said = Counter(_tokens(reference)), Counter(_tokens(answer))
    same = (wanted & said).total()
    return 2 * same / (wanted.total() + said.total()) if same else 0.0


def _number(key: str, answer: str) -> float:
    best = 0
    for number in re.findall(r"\d+", re.sub(r"(?<=\d),(?=\d)", "", answer)):
        same = next((i for i, (a, b) in enumerate(zip(key, number, strict=False)) if a != b), None)
        best = max(best, min(len(key), len(number)) if same is None else same)
    return best / len(key)


def _words(key: str, answer: str) -> float:
    wanted, said = _tokens(key), set(_tokens(answer))
    return sum(word in said for word in wanted) / len(wanted)


def _tokens(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())
