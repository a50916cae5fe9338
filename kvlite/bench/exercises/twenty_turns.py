"""Twenty turns: each tells a fact, and asks for an earlier one."""

import re
from functools import partial

from kvlite.bench.exercises.copy_many import FIELDS
from kvlite.bench.exercises.exercise import Exercise, Material, Turn
from kvlite.bench.prose import numbers

TURNS = 20


def make(material: Material) -> Exercise:
    """Right is an answer whose only number is the one that was told of something in an earlier
    message; in the first, in this one."""
    random = material.random
    things, codes = random.sample(FIELDS, TURNS), numbers(random, TURNS)
    text = material.prose_of(material.tokens - 60 * TURNS)
    size = len(text) // TURNS
    turns = []
    for number in range(TURNS):
        asked = random.randrange(max(1, number))
        told = f"Note that the {things[number]} is {codes[number]}."
        prose = text[number * size : (number + 1) * size]
        question = f"What is the {things[asked]}? Answer: The {things[asked]} is ..."
        message = f"{told}\n\n{prose}\n\n{question}"
        turns.append(Turn(message, partial(_check, codes[asked]), codes[asked]))
    return Exercise(turns)


def _check(code: str, answer: str) -> float:
    return float(re.findall(r"\d+", answer.replace(",", "")) == [code])
