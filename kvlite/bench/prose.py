"""Real text to hide things in, and where to hide them."""

import hashlib
import re
from collections.abc import Sequence
from importlib.resources import files
from random import Random

_SENTENCE_END = re.compile(r"\.\s+")


def bundled_prose() -> str:
    """Some 12,000 tokens of real, public-domain prose: the Constitution of the United States
    with its amendments and the Declaration of Independence."""
    return files("kvlite.bench").joinpath("prose.txt").read_text(encoding="utf-8")


def begun_elsewhere(text: str, seed: int) -> str:
    """The text turned round so that it begins with another sentence; seed 0 as it is."""
    if not seed:
        return text
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    at = Random(f"begin {seed}").choice([0, *(end for end in ends if text[end:])])
    return f"{text[at:].rstrip()}\n\n{text[:at]}" if at else text


def hidden_in(text: str, sentences: Sequence[tuple[float, str]]) -> str:
    """Text with sentences put in.

    Args:
        sentences: depth, 0 to 1 of the text, and what stands there: at the end of sentence that
            is nearest, or after the text, whose own last sentence may be cut off. Of two at the
            same place the earlier named comes first.
    """
    if not text.endswith((" ", "\n")):
        text += "\n\n"
    ends = [*(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
    placed = []
    for index, (depth, sentence) in enumerate(sentences):
        at = min(ends, key=lambda end: abs(end - depth * len(text))) if depth else 0
        placed.append((at, index, sentence))
    # From the last place to the first, so that places stay true.
    for at, _, sentence in sorted(placed, reverse=True):
        text = f"{text[:at]}{sentence} {text[at:]}"
    return text


def digest(text: str) -> str:
    """A name for a text that no other has."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
