"""Arithmetic: some of many word problems, two steps each."""

import re
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from kvlite.bench.exercises.exercise import ASKED, Exercise, Material, Turn, asked_of
from kvlite.bench.prose import names

# Tokens in which a model may work it out.
STEPS = 200
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*")
_FORM = "Say what {} has, and add it up: {}\n\n"


@dataclass(frozen=True)
class _Problem:
    name: str
    story: str
    solved: str
    result: int


def make(material: Material) -> Exercise:
    """The problems are told one after the other, and some of them are asked for. Right is an answer
    whose last number is the result."""
    random = material.random
    called = [name.title() for name in names(random, 2000)]

    def part(number: int) -> _Problem:
        name = called[number]
        red, blue, green = (random.randrange(10, 40) for _ in range(3))
        story = f"{name} has {red} red, {blue} blue and {green} green crates."
        steps = f"{red} + {blue} = {red + blue}, {red + blue} + {green} = {red + blue + green}"
        return _Problem(name, story, f"{story} {steps}.", red + blue + green)

    told = material.parts(part, attrgetter("story"), _FORM)
    shown, *wanted = random.sample(told, 1 + ASKED)
    text = "\n".join(each.story for each in told)
    turns = (
        Turn(
            f"Say what {each.name} has, and add it up.",
            partial(_check, each.result),
            each.solved,
            new_tokens=STEPS,
        )
        for each in wanted
    )
    return Exercise(asked_of(f"{text}\n\n{_FORM.format(shown.name, shown.solved)}", turns))


def _check(result: int, answer: str) -> float:
    found = _NUMBER.findall(answer)
    return float(bool(found) and int(found[-1].replace(",", "")) == result)
