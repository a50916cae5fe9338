"""Code: a call whose signature stands elsewhere in a long file."""

import ast
from functools import partial

from kvlite.bench.exercises.exercise import Exercise, Material, Turn
from kvlite.bench.exercises.source_file import Function, functions, source

_FORM = """Write the one line of Python that calls it. Pass every parameter by keyword, in the order of the signature, from a variable of the same name, as in: result = some_name(first=first, second=second). Answer with this line only."""  # noqa: E501


def make(material: Material) -> Exercise:
    """Right is a call of this function with all of its parameters, in their order, and no other."""
    known = functions(material, beside=_FORM)
    wanted = material.random.choice(known)
    question = f"The function {wanted.name} is defined in the file above. {_FORM}"
    given = ", ".join(f"{each}={each}" for each in wanted.parameters)
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
    given = [(each.arg, ast.unparse(each.value)) for each in call.keywords]
    return float(given == [(name, name) for name in wanted.parameters])
