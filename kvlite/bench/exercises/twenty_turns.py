"""Twenty turns: each tells a fact, and asks for an earlier one."""

import re
from functools import partial

from kvlite.bench.exercises.exercise import Exercise, Material, Turn
from kvlite.bench.prose import names, numbers

TURNS = 20


def make(material: Material) -> Exercise:
    """Right is the number that was told of a name in an earlier message, or in this one."""
    random = material.random
    called, codes = names(random, TURNS), numbers(random, TURNS)
    text = material.prose_of(material.tokens - 60 * TURNS)
    size = len(text) // TURNS
    turns = []
    for number in range(TURNS):
        asked = random.randrange(number + 1)
        told = f"The number of {called[number]} is {codes[number]}."
        prose = text[number * size : (number + 1) * size]
        question = f"What is the number of {called[asked]}? Answer with the number only."
        message = f"{prose}\n\n{told}\n\n{question}"
        turns.append(Turn(message, partial(_check, codes[asked]), codes[asked]))
    return Exercise(turns)


def _check(code: str, answer: str) -> float:
    return float(code in re.findall(r"\d+", answer.replace(",", "")))
