"""Edits: an agent's exact searches and replacements in a long file."""

import json
from functools import partial

from kvlite.bench.exercises.exercise import ASKED, Exercise, Material, Turn, asked_of
from kvlite.bench.exercises.source_file import Function, functions, source
from kvlite.config.checked_file import Damaged, from_json

_FORM = (
    "Edits of the file above have the line that changes as old_str, copied from the file exactly, "
    "with its spaces, and the line that replaces it as new_str. For example, to change the number "
    "in the function {} to 5:\n{}\n\n"
)
_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"old_str": {"type": "string"}, "new_str": {"type": "string"}},
        "required": ["old_str", "new_str"],
        "additionalProperties": False,
    }
)


def make(material: Material) -> Exercise:
    """The numbers in some functions are to be changed. Right is what leaves the very file that was
    wanted: what is searched for occurs once, and nothing else changes."""
    random = material.random
    known = functions(material, beside=_FORM)
    shown, *wanted = random.sample(known, 1 + ASKED)
    file = source(known)

    def turn(function: Function) -> Turn:
        limit = function.limit + random.randrange(1, 90)
        right = _edit(function, limit)
        check = partial(_check, file, file.replace(*_lines(function, limit)))
        question = f"Now change the number in the function {function.name} to {limit}."
        return Turn(question, check, right, _SCHEMA)

    form = _FORM.format(shown.name, _edit(shown, 5))
    return Exercise(asked_of(f"```python\n{file}\n```\n\n{form}", map(turn, wanted)))


def _lines(function: Function, limit: int) -> tuple[str, str]:
    old = function.limit_line
    return old, old.replace(str(function.limit), str(limit))


def _edit(function: Function, limit: int) -> str:
    return json.dumps(dict(zip(("old_str", "new_str"), _lines(function, limit), strict=True)))


def _check(file: str, wanted: str, answer: str) -> float:
    try:
        edit = from_json(answer)
        old, new = edit["old_str"], edit["new_str"]
    except (Damaged, TypeError, KeyError):
        return 0.0
    return float(file.count(old) == 1 and file.replace(old, new) == wanted)
