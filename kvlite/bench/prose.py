"""What prompts are made of: real text, and names and numbers to hide in it."""

import hashlib
import re
from collections.abc import Sequence
from importlib.resources import files
from random import Random

_SENTENCE_END = re.compile(r"\.\s+")
_FIRST = """amber arctic brass bright broken calm cedar clever coastal copper coral crimson distant
dusty eager early empty faded frozen gentle golden hidden hollow humble iron ivory jolly lonely
lucky marble mellow misty narrow nimble northern olive patient plain polar proud quiet rapid rustic
scarlet secret silent silver simple sleepy smooth solar southern spare steady stormy sturdy sunny
tender timid velvet violet winter wooden yellow"""
_SECOND = """anchor antler badger bakery beacon beaver bishop bridge button candle canyon carpet
castle cellar cherry circle comet cotton cradle crater desert donkey dragon falcon feather ferry
fiddle forest garden glacier hammer harbour island jacket kettle ladder lantern lemon lizard meadow
mirror mitten monkey orchard otter oyster palace parrot pebble pepper pigeon pillow planet puzzle
rabbit ribbon saddle salmon shovel spider temple thunder tunnel turtle valley violin walnut
whistle window"""


def bundled_prose() -> str:
    """Some 12,000 tokens of real, public-domain prose: the Constitution of the United States
    with its amendments and the Declaration of Independence."""
    return files("kvlite.bench").joinpath("prose.txt").read_text(encoding="utf-8")


def begun_elsewhere(text: str, seed: int) -> str:
    """The text rotated so that it begins with another sentence; seed 0 leaves it as it is."""
    if not seed:
        return text
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    at = Random(f"begin {seed}").choice([0, *(end for end in ends if text[end:])])
    return f"{text[at:].rstrip()}\n\n{text[:at]}" if at else text


def hidden_in(text: str, sentences: Sequence[tuple[float, str]]) -> str:
    """Text with sentences inserted.

    Args:
        sentences: depth, 0 to 1 of the text, and what to insert at the end of the nearest
            sentence, or after the text, whose last sentence may be cut off. Of two at the same
            place the first given comes first.
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
    """A short hash of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def names(random: Random, count: int) -> list[str]:
    """Different names of two words each, which occur in no prose."""
    first, second = _FIRST.split(), _SECOND.split()
    drawn = random.sample(range(len(first) * len(second)), count)
    return [f"{first[n % len(first)]} {second[n // len(first)]}" for n in drawn]


def numbers(random: Random, count: int) -> list[str]:
    """Different numbers of seven digits."""
    return [str(number) for number in random.sample(range(1_000_000, 10_000_000), count)]
