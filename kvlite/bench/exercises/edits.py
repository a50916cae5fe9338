"""Edits: an agent's exact search-and-replace in a long file."""

import re
from functools import partial

from kvlite.bench.exercises.exercise import Exercise, Material, Turn
from kvlite.bench.exercises.source_file import functions, source

_BLOCK = re.compile(
    r"<<<<<<< SEARCH\r?\n(.*?)\r?\n=======\r?\n(.*?)\r?\n>>>>>>> REPLACE", re.DOTALL
)
_FORM = """Answer with one block of this form, and nothing else: first the line of the file that changes, copied exactly with its spaces, then the line that replaces it. For a file with the line `    speed = 3`, where speed becomes 5, that is:

<<<<<<< SEARCH
    speed = 3
=======
    speed = 5
>>>>>>> REPLACE"""  # noqa: E501


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
        f"In the file above, let the number in the function {wanted.name} be {limit}. {_FORM}"
    )
    right = f"<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE"
    check = partial(_check, file, file.replace(old, new))
    return Exercise([Turn(f"```python\n{file}\n```\n\n{question}", check, right)])


def _check(file: str, wanted: str, answer: str) -> float:
    found = _BLOCK.findall(answer)
    if len(found) != 1:
        return 0.0
    (search, replacement) = found[0]
    if file.count(search) != 1:
        return 0.0
    return float(file.replace(search, replacement) == wanted)
