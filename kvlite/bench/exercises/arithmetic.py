"""Arithmetic: one of many word problems, each a chain of steps."""

import re
from functools import partial
from operator import itemgetter

from kvlite.bench.exercises.exercise import Exercise, Material, Turn
from kvlite.bench.prose import names

# Tokens in which a model may work it out.
STEPS = 200
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*")


def make(material: Material) -> Exercise:
    """The problems are told one after the other, and one of them is asked for. Right is an answer
    whose last number is the result."""
    random = material.random
    called = [name.title() for name in names(random, 2000)]

    def part(number: int) -> tuple[str, int]:
        count = random.randrange(15, 40)
        story = [f"{called[number]} has {count} crates."]
        for _ in range(3):
            step, change = random.choice(("buys", "sells", "doubles")), random.randrange(1, 5)
            if step == "doubles":
                count *= 2
                story.append("Then they get as many crates again as they have.")
            elif step == "buys":
                count += change
                story.append(f"Then they buy {change} more.")
            else:
                count -= change
                story.append(f"Then they sell {change}.")
        return " ".join(story), count

    question = (
        "How many crates does {} have in the end? Say what they have after each step, and end with "
        "the number."
    )
    told = material.parts(part, itemgetter(0), question)
    wanted = random.randrange(len(told))
    text, result = "\n".join(story for story, _ in told), told[wanted][1]
    message = f"{text}\n\n{question.format(called[wanted])}"
    return Exercise([Turn(message, partial(_check, result), str(result), new_tokens=STEPS)])


def _check(result: int, answer: str) -> float:
    found = _NUMBER.findall(answer)
    return float(bool(found) and int(found[-1].replace(",", "")) == result)
