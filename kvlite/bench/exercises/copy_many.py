"""Copying many: thirty fields that are scattered over a text, as JSON."""

import json
from functools import partial
from statistics import fmean
from typing import Any

from kvlite.bench.exercises.exercise import Exercise, Material, Turn
from kvlite.bench.prose import hidden_in, names, numbers
from kvlite.config.checked_file import Damaged, from_json

_FIELDS = """hull number|keel date|home port code|owner|master|chief engineer|gross tonnage|draught
call sign|engine maker|engine number|boiler code|cargo licence|insurer|policy number|last survey
next survey|surveyor|crane permit|lifeboat maker|radio licence|anchor weight|chain length
flag certificate|charter party|charter date|broker|agent|dock permit|pilot code"""
FIELDS = _FIELDS.replace("\n", "|").split("|")


def make(material: Material) -> Exercise:
    """Each field is told in a sentence of its own somewhere in the prose; a field counts if its
    value is there to the letter."""
    random = material.random
    count = len(FIELDS)
    kinds = [numbers(random, count), names(random, count), _dates(random, count)]
    values = {field: random.choice(kinds)[index] for index, field in enumerate(FIELDS)}
    told = [(random.random(), f"The {field} is {value}.") for field, value in values.items()]
    keys = {field.replace(" ", "_"): value for field, value in values.items()}
    question = (
        "The text above has remarks on a ship. Copy them into a JSON object with the keys "
        f"{', '.join(keys)}."
    )
    beside = material.count(question + " ".join(sentence for _, sentence in told))
    text = hidden_in(material.prose_of(material.tokens - beside), told)
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: {"type": "string"} for key in keys},
        "required": [*keys],
        "additionalProperties": False,
    }
    right = json.dumps(keys)
    turn = Turn(f"{text}\n\n{question}", partial(_check, keys), right, json.dumps(schema))
    return Exercise([turn])


def _dates(random: Any, count: int) -> list[str]:
    return [
        f"{random.randrange(1950, 2026)}-{random.randrange(1, 13):02}-{random.randrange(1, 29):02}"
        for _ in range(count)
    ]


def _check(keys: dict[str, str], answer: str) -> float:
    try:
        made = from_json(answer)
    except Damaged:
        return 0.0
    return fmean(isinstance(made, dict) and made.get(key) == value for key, value in keys.items())
