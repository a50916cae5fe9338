"""Code: a call whose signature stands elsewhere in a long file."""

import ast
from functools import partial

from kvlite.bench.exercises.exercise import Exercise, Material, Turn
from kvlite.bench.exercises.source_file import Function, functions, source

_FORM = (
    "Write one line of Python that calls it. Pass all of its parameters by keyword, in the order "
    "of its signature, each with the value 1. Answer with this line only."
)


def make(material: Material) -> Exercise:
    """Right is a call of this function with all of its parameters, in their order, and no other."""
    known = functions(material, beside=_FORM)
    wanted = material.random.choice(known)
    question = f"The function {wanted.name} is defined in the file above. {_FORM}"
    given = ", ".join(f"{each}=1" for each in wanted.parameters)
    return Exercise(
        [
            Turn(
                f"```python\n{source(known)}\n```\n\n{question}",
                partial(_check, wanted),
                f"result = {wanted.name}({given})",
            )
        ]
    )


def _check(wanted: Function, answer: str) -> float:
    lines = [each.strip().strip("`") for each in answer.splitlines() if f"{wanted.name}(" in each]
    try:
        tree = ast.parse(lines[0])
    except (IndexError, SyntaxError):
        return 0.0
    call = next((each for each in ast.walk(tree) if isinstance(each, ast.Call)), None)
    if call is None or call.args or ast.unparse(call.func) != wanted.name:
        return 0.0
    return float([each.arg for each in call.keywords] == [*wanted.parameters])
