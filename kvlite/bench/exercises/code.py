"""Code: calls whose signatures stand elsewhere in a long file."""

import ast
from functools import partial
from itertools import zip_longest
from statistics import fmean

from kvlite.bench.exercises.exercise import ASKED, Exercise, Material, Turn, asked_of
from kvlite.bench.exercises.source_file import Function, functions, source

_FORM = (
    "Calls of the functions above have all parameters by keyword, in the order of the signature, "
    "each with the value 1. For example, the call of {} is:\n{}\n\n"
)


def make(material: Material) -> Exercise:
    """Some functions are to be called. A call counts by the share of its parameters that are right
    and in their place; one too many counts as a wrong one."""
    known = functions(material, beside=_FORM)
    shown, *wanted = material.random.sample(known, 1 + ASKED)
    text = f"```python\n{source(known)}\n```\n\n{_FORM.format(shown.name, _call(shown))}"
    turns = (
        Turn(
            f"Now write the call of {each.name}. Answer with this line only.",
            partial(_check, each),
            _call(each),
        )
        for each in wanted
    )
    return Exercise(asked_of(text, turns))


def _call(function: Function) -> str:
    return f"result = {function.name}({', '.join(f'{each}=1' for each in function.parameters)})"


def _check(wanted: Function, answer: str) -> float:
    lines = [each.strip().strip("`") for each in answer.splitlines() if f"{wanted.name}(" in each]
    try:
        tree = ast.parse(lines[0])
    except (IndexError, SyntaxError):
        return 0.0
    call = next((each for each in ast.walk(tree) if isinstance(each, ast.Call)), None)
    if call is None or call.args or ast.unparse(call.func) != wanted.name:
        return 0.0
    given = [each.arg for each in call.keywords]
    return fmean(one == other for one, other in zip_longest(given, wanted.parameters))
