"""Edits: an agent's exact search-and-replace in a long file."""

import json
from functools import partial

from kvlite.bench.exercises.exercise import Exercise, Material, Turn
from kvlite.bench.exercises.source_file import functions, source
from kvlite.config.checked_file import Damaged, from_json

_FORM = (
    "Give the line that changes as old_str, copied from the file exactly, with its spaces, and the "
    "line that replaces it as new_str."
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
    """The number in one function is to be changed. Right is what leaves the very file that was
    wanted: what is searched for occurs once, and nothing else changes."""
    known = functions(material, beside=_FORM)
    wanted = material.random.choice(known)
    file = source(known)
    old = wanted.limit_line
    limit = wanted.limit + material.random.randrange(1, 90)
    new = old.replace(str(wanted.limit), str(limit))
    question = (
        f"In the file above, change the number in the function {wanted.name} to {limit}. {_FORM}"
    )
    right = json.dumps({"old_str": old, "new_str": new})
    check = partial(_check, file, file.replace(old, new))
    return Exercise([Turn(f"```python\n{file}\n```\n\n{question}", check, right, _SCHEMA)])


def _check(file: str, wanted: str, answer: str) -> float:
    try:
        edit = from_json(answer)
        old, new = edit["old_str"], edit["new_str"]
    except (Damaged, TypeError, KeyError):
        return 0.0
    return float(file.count(old) == 1 and file.replace(old, new) == wanted)
