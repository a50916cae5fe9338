"""Twenty turns: each tells a fact, and asks for an earlier one."""

import re
from functools import partial

from kvlite.bench.exercises.copy_many import FIELDS
from kvlite.bench.exercises.exercise import Exercise, Material, Turn
from kvlite.bench.prose import numbers

TURNS = 20


def make(material: Material) -> Exercise:
    """Right is the number that was told of something in an earlier message; in the first, in this
    one. An answer has no other words than those that are given, as else they would be those of all
    answers that follow, and one bad answer make many."""
    random = material.random
    things, codes = random.sample(FIELDS, TURNS), numbers(random, TURNS)
    text = material.prose_of(material.tokens - 60 * TURNS)
    size = len(text) // TURNS
    turns = []
    for number in range(TURNS):
        asked = random.randrange(max(1, number))
        told = f"Note that the {things[number]} is {codes[number]}."
        prose = text[number * size : (number + 1) * size]
        begun = f"The {things[asked]} is "
        message = f"{told}\n\n{prose}\n\nWhat is the {things[asked]}? Answer: {begun}..."
        said = f'start: "{begun}" /[0-9]+/ "."'
        turns.append(Turn(message, partial(_check, codes[asked]), f"{begun}{codes[asked]}.", said))
    return Exercise(turns)


def _check(code: str, answer: str) -> float:
    return float(re.findall(r"\d+", answer.replace(",", "")) == [code])
